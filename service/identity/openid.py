"""Tokens of the OpenID provider, the keys that verify them (JWKS, RFC 7517), and sign-in.

A token is accepted only after these checks: the signature, by the key with the token's ``kid`` in
the provider's document and with that key's algorithm; ``iss`` and ``aud``, exactly; ``exp``,
``nbf`` and ``iat`` by the database's clock, with a minute of leeway. Keys and addresses in the
token (``jwk``, ``jku``, ``x5c``, ``x5u``) are ignored. A token with critical extensions (``crit``)
is refused, because none is supported.

The holder's name is ``sub``, which a provider never reassigns; addresses and display names can
change hands. Groups that the operator has not listed allow nothing.

Rules for keys:

- Only public signature keys of a listed algorithm are used. The key determines the algorithm, never
  the token.
- Keys are read again after five minutes. If that fails, the last ones are used for an hour.
- An unknown key id causes at most two reads a minute.
- One thread reads at a time, for at most five seconds and 256 KiB, and follows no redirect.

PyJWT's own client bounds neither size nor redirects, reads no file, and keeps no keys while the
provider is down. So this module reads the keys, and PyJWT verifies the tokens.

Sign-in is the authorization code flow with PKCE. The browser goes to the provider with a ``state``
(binds the response to this browser), a ``nonce`` (binds the token to this sign-in) and the hash of
a secret (binds the code to this service). It returns with a code, which the service exchanges for
an ID token. That token is verified like a bearer token, with this client as its audience.

References: OpenID Connect Core 1.0, 3.1; RFC 7636 (PKCE, S256); RFC 9207 (``iss`` in the
response); RFC 9700, 2.1.1 (best current practice).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import httpx
import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from affidavit.client import read_bounded
from affidavit.service.identity.actor import Actor, AuthenticationError
from affidavit.service.identity.provider import Provider, SignInClient
from affidavit.service.identity.scopes import Scope

ALGORITHMS = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
)  # fmt: skip
FRESH_SECONDS = 300.0
STALE_SECONDS = 3600.0
REREAD_SECONDS = 30.0
RETRY_SECONDS = 5.0
READ_SECONDS = 5.0
WAIT_SECONDS = 1.0
MAX_DOCUMENT_BYTES = 256 * 1024
MAX_KEYS = 100
RSA_KEY_BITS = (2048, 8192)
PRIVATE_FIELDS = ("d", "p", "q", "k")

log = logging.getLogger("affidavit.service")


def invalid_token(detail: str) -> AuthenticationError:
    """Build the error of a token that is not accepted."""
    return AuthenticationError("invalid_token", detail)


class ProviderUnavailable(Exception):
    """The caller cannot be authenticated, because the provider's keys cannot be read."""


class UnknownKey(Exception):
    """The provider has no such key."""


class ProviderKeys:
    """The keys in the JWKS document that ``read`` returns; safe to use from several threads."""

    def __init__(
        self, read: Callable[[], bytes], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._clock = clock
        # The keys and the time of reading are one attribute: threads read it without the lock.
        self._last: tuple[Mapping[str, jwt.PyJWK], float] | None = None
        self._next = float("-inf")
        self._failed = False
        self._lock = Lock()

    @classmethod
    def of(cls, provider: Provider) -> ProviderKeys:
        """Build the keys of a configured provider; reads nothing yet."""
        if provider.jwks_file is not None:
            path = provider.jwks_file
            return cls(lambda: _read_file(path))
        url = str(provider.jwks_url)
        return cls(lambda: _read_url(url))

    def key(self, kid: str) -> jwt.PyJWK:
        """Return the key of that id; raises ``UnknownKey`` or ``ProviderUnavailable``."""
        last = self._last
        if last is None or kid not in last[0] or self._clock() - last[1] > FRESH_SECONDS:
            self._refresh_if_due()
            last = self._last
        if last is None or self._clock() - last[1] > STALE_SECONDS:
            raise ProviderUnavailable
        key = last[0].get(kid)
        if key is not None:
            return key
        # If the last read failed, the key may be a new one.
        raise ProviderUnavailable if self._failed else UnknownKey

    def _refresh_if_due(self) -> None:
        """Read the keys again if it is time; threads only wait before the first read."""
        if not self._lock.acquire(timeout=WAIT_SECONDS if self._last is None else 0):
            return
        try:
            if self._clock() >= self._next:
                self._refresh()
        finally:
            self._lock.release()

    def _refresh(self) -> None:
        try:
            self._last = parse_keys(self._read()), self._clock()
            self._failed = False
        except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL, RecursionError) as error:
            log.error("the OpenID provider's keys cannot be read: %s", error)
            self._failed = True
        self._next = self._clock() + (RETRY_SECONDS if self._failed else REREAD_SECONDS)


def parse_keys(document: bytes) -> dict[str, jwt.PyJWK]:
    """Parse the usable keys of a JWKS document by their ids; raises ``ValueError``."""
    value = json.loads(document)
    records = value.get("keys") if isinstance(value, dict) else None
    if not isinstance(records, list) or len(records) > MAX_KEYS:
        raise ValueError(f"it has no list of at most {MAX_KEYS} keys")
    usable = [(record["kid"], key) for record in records if (key := _parse_key(record)) is not None]
    times = Counter(kid for kid, _ in usable)
    return {kid: key for kid, key in usable if times[kid] == 1}


def _parse_key(record: Any) -> jwt.PyJWK | None:
    if not isinstance(record, dict) or any(name in record for name in PRIVATE_FIELDS):
        return None
    kid, operations = record.get("kid"), record.get("key_ops", ["verify"])
    if not isinstance(kid, str) or record.get("use", "sig") != "sig":
        return None
    if record.get("alg", ALGORITHMS[0]) not in ALGORITHMS:
        return None
    if not isinstance(operations, list) or "verify" not in operations:
        return None
    try:
        key = jwt.PyJWK(record)
    except (jwt.PyJWTError, TypeError, ValueError):
        return None
    if key.algorithm_name not in ALGORITHMS:
        return None
    if (
        isinstance(key.key, RSAPublicKey)
        and not RSA_KEY_BITS[0] <= key.key.key_size <= RSA_KEY_BITS[1]
    ):
        return None
    return key


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"it is longer than {MAX_DOCUMENT_BYTES} bytes")
    return content


def _read_url(url: str) -> bytes:
    status, content = fetch("GET", url, headers={"accept": "*/*"})
    if status != httpx.codes.OK:
        raise ValueError(f"the response's status is {status}")
    return content


def fetch(method: str, url: str, **arguments: Any) -> tuple[int, bytes]:
    """Send a request and return the response's status and content; follows no redirect.

    Raises httpx's errors, also for a response that is too large or takes too long.
    """
    with httpx.stream(
        method, url, timeout=READ_SECONDS, follow_redirects=False, **arguments
    ) as response:
        complete = read_bounded(response, MAX_DOCUMENT_BYTES, READ_SECONDS)
    return complete.status_code, complete.content


LEEWAY_SECONDS = 60
TOKEN_TYPES = frozenset({"jwt", "at+jwt", "application/at+jwt"})
"""Accepted values of ``typ``; the same keys sign other types for other uses."""
TIME_CLAIMS = ("exp", "nbf", "iat")
REQUIRED_CLAIMS = ("exp", "iat", "iss", "aud", "sub")
MAX_SUBJECT_LENGTH = 200
MAX_KID_LENGTH = 256


class ProviderTokens:
    """Tokens of one provider."""

    def __init__(self, provider: Provider, keys: ProviderKeys, now: Callable[[], datetime]) -> None:
        self._provider = provider
        self._keys = keys
        self._now = now

    def actor(self, token: str) -> Actor:
        """Return the token's holder; raises ``AuthenticationError`` or ``ProviderUnavailable``."""
        first, *others = self.actors_of(self.claims(token))
        teams = [actor.team for actor in (first, *others) if actor.team is not None]
        if len(teams) > 1:
            raise AuthenticationError(
                "several_teams",
                f"your groups belong to several teams ({', '.join(teams)}), and a request acts for "
                "one. Sign in to the pages and choose a team, or create a token of one: affidavit "
                "tokens new --team TEAM --person oidc:SUBJECT.",
            )
        return first

    def actors_of(self, claims: Mapping[str, Any]) -> tuple[Actor, ...]:
        """Return the subject of verified claims, once for each team of their groups.

        Teams are in alphabetical order; groups without a team, which allow more, are last. Raises
        ``AuthenticationError``.
        """
        name, team_of = _actor_name(claims["sub"]), self._provider.teams
        scopes: dict[str | None, frozenset[Scope]] = {}
        for group in self._groups(claims):
            if group in self._provider.scopes:
                granted = scopes.get(team_of.get(group), frozenset())
                scopes[team_of.get(group)] = granted | self._provider.scopes[group]
        ordered = sorted(scopes, key=lambda team: (team is None, team))
        return tuple(Actor(name, scopes[team], team) for team in ordered) or (
            Actor(name, frozenset()),
        )

    def claims(self, token: str) -> Mapping[str, Any]:
        """Return verified claims; raises ``AuthenticationError`` or ``ProviderUnavailable``."""
        try:
            key = self._key(jwt.get_unverified_header(token))
            claims: Mapping[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=self._provider.audience,
                issuer=self._provider.issuer,
                options={
                    "require": list(REQUIRED_CLAIMS),
                    "enforce_minimum_key_length": True,
                    # PyJWT uses this machine's clock; the service uses the database's.
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
            times = {name: int(claims[name]) for name in TIME_CLAIMS if name in claims}
        except (jwt.InvalidAudienceError, jwt.InvalidIssuerError):
            raise invalid_token(
                "the token was issued for another service or by another provider."
            ) from None
        # A signed token can contain times that no clock has.
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            raise invalid_token("the token is not from the provider.") from None
        now = self._now().timestamp()
        if times["exp"] <= now - LEEWAY_SECONDS:
            raise AuthenticationError("expired_token", "the token has expired; sign in again.")
        if max(times["iat"], times.get("nbf", 0)) > now + LEEWAY_SECONDS:
            raise invalid_token("the token is not valid yet; check the clocks.")
        # A security event (RFC 8417), such as a notice of signing out, is not an identity.
        if "events" in claims:
            raise invalid_token("the token is for an event, not an identity.")
        return claims

    def _key(self, header: Mapping[str, Any]) -> jwt.PyJWK:
        if header.get("alg") not in ALGORITHMS:
            raise invalid_token(f"the token must be signed with one of {', '.join(ALGORITHMS)}.")
        if str(header.get("typ", "JWT")).lower() not in TOKEN_TYPES:
            raise invalid_token("the token's type is not JWT.")
        kid = header.get("kid")
        if not isinstance(kid, str) or not 0 < len(kid) <= MAX_KID_LENGTH or "crit" in header:
            raise invalid_token("the token's header must have kid and not crit.")
        try:
            return self._keys.key(kid)
        except UnknownKey:
            raise invalid_token("the provider has no key with the token's kid.") from None

    def _groups(self, claims: Mapping[str, Any]) -> list[str]:
        value: Any = claims
        for name in self._provider.claim:
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, str):
            # OAuth's claim of scopes is one text (RFC 8693, 4.2); other groups may contain spaces.
            value = value.split() if self._provider.claim[-1] in ("scope", "scp") else [value]
        groups = value if isinstance(value, list) else []
        return [group for group in groups if isinstance(group, str)]


def _actor_name(subject: str) -> str:
    plain = subject.isascii() and subject.isprintable() and " " not in subject
    if not plain or not 0 < len(subject) <= MAX_SUBJECT_LENGTH:
        raise invalid_token(
            f"the token's sub is not 1 to {MAX_SUBJECT_LENGTH} visible ASCII characters."
        )
    return f"oidc:{subject}"


# ---- signing in ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SignInAttempt:
    """A sign-in in progress: the browser's secrets, and the page to open afterwards."""

    state: str
    nonce: str
    verifier: str
    next: str

    @classmethod
    def new(cls, next_path: str) -> SignInAttempt:
        """Create an attempt with new secrets."""
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        return cls(state, nonce, verifier, next_path)

    def to_cookie(self) -> str:
        """Encode the attempt for a cookie."""
        fields = [self.state, self.nonce, self.verifier, self.next]
        return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()

    @classmethod
    def from_cookie(cls, text: str) -> SignInAttempt | None:
        """Decode an attempt of ``to_cookie``; return None for any other text."""
        try:
            fields = json.loads(base64.urlsafe_b64decode(text.encode("ascii")))
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, list) or len(fields) != 4:
            return None
        return cls(*fields) if all(isinstance(field, str) for field in fields) else None


class CodeFlow:
    """The authorization code flow of one client with one provider.

    Methods raise ``AuthenticationError`` and ``ProviderUnavailable``.
    """

    def __init__(
        self,
        provider: Provider,
        client: SignInClient,
        keys: ProviderKeys,
        now: Callable[[], datetime],
    ) -> None:
        self._issuer = provider.issuer
        self._client = client
        self._tokens = ProviderTokens(replace(provider, audience=client.client_id), keys, now)

    def authorization_url(self, attempt: SignInAttempt, redirect_uri: str) -> str:
        """Return the provider's URL for the browser, which returns to ``redirect_uri``."""
        challenge = hashlib.sha256(attempt.verifier.encode()).digest()
        query = urlencode(
            {
                "response_type": "code",
                "client_id": self._client.client_id,
                "redirect_uri": redirect_uri,
                "scope": self._client.scope,
                "state": attempt.state,
                "nonce": attempt.nonce,
                "code_challenge": base64.urlsafe_b64encode(challenge).rstrip(b"=").decode(),
                "code_challenge_method": "S256",
            }
        )
        url = self._client.authorization_url
        return f"{url}{'&' if urlsplit(url).query else '?'}{query}"

    def complete(
        self, attempt: SignInAttempt | None, response: Mapping[str, str], redirect_uri: str
    ) -> tuple[Actor, ...]:
        """Return the person who signed in, once for each team. Raises ``AuthenticationError``."""
        if attempt is None or not _is_equal(attempt.state, response.get("state", "")):
            raise AuthenticationError(
                "sign_in_not_begun", "this sign-in did not start in this browser; sign in again."
            )
        if response.get("iss", self._issuer) != self._issuer:
            raise invalid_token("the response came from another provider; sign in again.")
        code = response.get("code", "")
        if not code:
            raise AuthenticationError(
                "sign_in_refused", "the provider denied the sign-in; sign in again."
            )
        token = self._exchange(code, attempt.verifier, redirect_uri)
        claims = self._tokens.claims(token)
        if not _is_equal(str(claims.get("nonce", "")), attempt.nonce):
            raise invalid_token("the token belongs to another sign-in; sign in again.")
        if claims.get("azp", self._client.client_id) != self._client.client_id:
            raise invalid_token("the token was issued to another client.")
        actors = self._tokens.actors_of(claims)
        if not actors[0].scopes:
            raise AuthenticationError(
                "no_scopes", "none of your groups may use this service; ask an administrator."
            )
        return actors

    def _exchange(self, code: str, verifier: str, redirect_uri: str) -> str:
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": verifier,
        }
        headers = {"accept": "application/json"}
        client = self._client
        if client.client_secret:
            # RFC 6749, 2.3.1: both are written as in a form before they are joined.
            credentials = (
                f"{quote(client.client_id, safe='')}:{quote(client.client_secret, safe='')}"
            )
            headers["authorization"] = f"Basic {base64.b64encode(credentials.encode()).decode()}"
        else:
            form["client_id"] = client.client_id
        try:
            status, content = fetch("POST", client.token_url, data=form, headers=headers)
        except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL):
            raise ProviderUnavailable from None
        if status in (400, 401):
            raise AuthenticationError(
                "sign_in_refused",
                "the provider does not accept the authorization code; sign in again.",
            )
        try:
            response: Any = json.loads(content) if status == httpx.codes.OK else None
        except (ValueError, RecursionError):
            response = None
        token = response.get("id_token") if isinstance(response, dict) else None
        if not isinstance(token, str):
            raise ProviderUnavailable
        return token


def _is_equal(first: str, second: str) -> bool:
    return hmac.compare_digest(first.encode(), second.encode())
