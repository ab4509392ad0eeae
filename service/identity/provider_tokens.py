"""Tokens of the OpenID provider, and the keys that they are verified with (JWKS, RFC 7517).

Checked before anything in a token counts: the signature, by a key that the provider's document
has under the token's ``kid`` and with that key's algorithm; ``iss`` and ``aud``, exactly;
``exp``, ``nbf`` and ``iat`` by the database's clock, with a minute for clocks that differ. Keys or
addresses that
a token brings along (``jwk``, ``jku``, ``x5c``, ``x5u``) are not looked at, and one that
lists extensions as critical (``crit``) is refused, for none is understood here.

The holder's name is ``sub``, which a provider never gives to somebody else; an address or
a display name can change hands. Groups that the operator's table does not list allow
nothing.

Rules for the keys:

- Only public keys for signatures, of an algorithm of the list, are taken; a symmetric key
  in the document is no key. A key decides with which algorithm it is used, never a token.
- Keys count for five minutes and are then read again. While they cannot be read, the last
  ones go on counting for an hour, and then nobody is let in any more.
- A key that is not there makes us read again at most twice a minute, however many tokens
  name keys that nobody has; meanwhile they are refused.
- One thread reads at a time, for five seconds and 256 KiB at most, and follows no redirect.

PyJWT's own client of such documents bounds neither size nor redirects, reads no file, and keeps
no keys while the provider is down; so the keys are read here and PyJWT verifies.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any

import httpx
import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from affidavit.client import read_at_most
from affidavit.service.identity.actor import Actor, AuthenticationError, Scope
from affidavit.service.identity.provider import Provider

ALGORITHMS = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
)  # fmt: skip
FRESH_SECONDS = 300.0
STALE_SECONDS = 3600.0
REREAD_SECONDS = 30.0
RETRY_SECONDS = 5.0
READ_SECONDS = 5.0
WAIT_SECONDS = 1.0
LARGEST = 256 * 1024
MAX_KEYS = 100
RSA_BITS = (2048, 8192)
_PRIVATE = ("d", "p", "q", "k")

log = logging.getLogger("affidavit.service")


def invalid_token(detail: str) -> AuthenticationError:
    """The error of a token that cannot be taken."""
    return AuthenticationError("invalid_token", detail)


class ProviderUnavailable(Exception):
    """The caller cannot be authenticated, because the provider's keys cannot be read."""


class UnknownKey(Exception):
    """The provider has no such key."""


@dataclass(frozen=True, slots=True)
class CachedKeys:
    """The keys of a document, and when it was read (monotonic seconds)."""

    keys: Mapping[str, jwt.PyJWK]
    read_at: float


class ProviderKeys:
    """The keys behind ``read``, which returns a JWKS document; safe for several threads."""

    def __init__(
        self, read: Callable[[], bytes], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._clock = clock
        self._cached: CachedKeys | None = None
        self._next = float("-inf")
        self._failed = False
        self._lock = Lock()

    @classmethod
    def of(cls, provider: Provider) -> ProviderKeys:
        """The keys of a configured provider; reads nothing yet."""
        if provider.jwks_file is not None:
            path = provider.jwks_file
            return cls(lambda: _from_file(path))
        url = str(provider.jwks_url)
        return cls(lambda: _from_url(url))

    def key(self, kid: str) -> jwt.PyJWK:
        """The key of that id; raises ``UnknownKey`` or ``ProviderUnavailable``."""
        cached = self._cached
        if cached is None or kid not in cached.keys or self._age(cached) > FRESH_SECONDS:
            cached = self._again()
        if cached is None or self._age(cached) > STALE_SECONDS:
            raise ProviderUnavailable
        if kid in cached.keys:
            return cached.keys[kid]
        if self._failed:
            raise ProviderUnavailable  # it may be a new key; that cannot be told now
        raise UnknownKey

    def _age(self, cached: CachedKeys) -> float:
        return self._clock() - cached.read_at

    def _again(self) -> CachedKeys | None:
        """What is kept, read again if it is time to.

        No thread waits for another's reading while earlier keys are usable.
        """
        if not self._lock.acquire(timeout=WAIT_SECONDS if self._cached is None else 0):
            return self._cached
        try:
            if self._clock() >= self._next:
                self._refresh()
        finally:
            self._lock.release()
        return self._cached

    def _refresh(self) -> None:
        try:
            self._cached = CachedKeys(keys_of(self._read()), self._clock())
            self._failed = False
        except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL, RecursionError) as error:
            log.error("the OpenID provider's keys cannot be read: %s", error)
            self._failed = True
        self._next = self._clock() + (RETRY_SECONDS if self._failed else REREAD_SECONDS)


def keys_of(document: bytes) -> dict[str, jwt.PyJWK]:
    """The usable keys of a JWKS document by their ids; raises ``ValueError``."""
    value = json.loads(document)
    records = value.get("keys") if isinstance(value, dict) else None
    if not isinstance(records, list) or len(records) > MAX_KEYS:
        raise ValueError(f"it has no list of at most {MAX_KEYS} keys")
    usable = [(record["kid"], key) for record in records if (key := _usable(record)) is not None]
    times = Counter(kid for kid, _ in usable)
    return {kid: key for kid, key in usable if times[kid] == 1}


def _usable(record: Any) -> jwt.PyJWK | None:
    if not isinstance(record, dict) or any(name in record for name in _PRIVATE):
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
    if isinstance(key.key, RSAPublicKey) and not RSA_BITS[0] <= key.key.key_size <= RSA_BITS[1]:
        return None
    return key


def _from_file(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"it is longer than {LARGEST} bytes")
    return content


def _from_url(url: str) -> bytes:
    status, content = fetch("GET", url, headers={"accept": "*/*"})
    if status != httpx.codes.OK:
        raise ValueError(f"the response's status is {status}")
    return content


def fetch(method: str, url: str, **arguments: Any) -> tuple[int, bytes]:
    """The provider's response, its status and content; no redirect is followed.

    Raises httpx's errors, also where it is too large or takes too long.
    """
    with httpx.stream(
        method, url, timeout=READ_SECONDS, follow_redirects=False, **arguments
    ) as response:
        whole = read_at_most(response, LARGEST, READ_SECONDS)
    return whole.status_code, whole.content


LEEWAY_SECONDS = 60
TYPES = frozenset({"jwt", "at+jwt", "application/at+jwt"})
"""What ``typ`` may be where a token has it: others are signed by the same keys for other uses."""
TIMES = ("exp", "nbf", "iat")
REQUIRED = ("exp", "iat", "iss", "aud", "sub")
LONGEST_SUBJECT = 200
LONGEST_KID = 256


class ProviderTokens:
    """Tokens of one provider."""

    def __init__(self, provider: Provider, keys: ProviderKeys, now: Callable[[], datetime]) -> None:
        self._provider = provider
        self._keys = keys
        self._now = now

    def actor(self, token: str) -> Actor:
        """Who holds ``token``; raises ``AuthenticationError`` or ``ProviderUnavailable``."""
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
        """The subject of checked claims, once for each team of their groups, by its name.

        What groups of no team allow, which reaches further, comes last. Raises
        ``AuthenticationError``.
        """
        name, team_of = _name(claims["sub"]), self._provider.teams
        scopes: dict[str | None, frozenset[Scope]] = {}
        for group in self._groups(claims):
            if group in self._provider.scopes:
                held = scopes.get(team_of.get(group), frozenset())
                scopes[team_of.get(group)] = held | self._provider.scopes[group]
        ordered = sorted(scopes, key=lambda team: (team is None, team))
        return tuple(Actor(name, scopes[team], team) for team in ordered) or (
            Actor(name, frozenset()),
        )

    def claims(self, token: str) -> Mapping[str, Any]:
        """Its verified claims; raises ``AuthenticationError`` or ``ProviderUnavailable``."""
        try:
            key = self._key(jwt.get_unverified_header(token))
            claims: Mapping[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=self._provider.audience,
                issuer=self._provider.issuer,
                options={
                    "require": list(REQUIRED),
                    "enforce_minimum_key_length": True,
                    # PyJWT compares with this machine's clock; ours is the database's.
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
            times = {name: int(claims[name]) for name in TIMES if name in claims}
        except (jwt.InvalidAudienceError, jwt.InvalidIssuerError):
            raise invalid_token(
                "the token was issued for another service or by another provider."
            ) from None
        # A signed document can still hold numbers that no clock has.
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            raise invalid_token("the token is not from the provider.") from None
        now = self._now().timestamp()
        if times["exp"] <= now - LEEWAY_SECONDS:
            raise AuthenticationError("expired_token", "the token has expired; sign in again.")
        if max(times["iat"], times.get("nbf", 0)) > now + LEEWAY_SECONDS:
            raise invalid_token("the token is not valid yet; check the clocks.")
        # Of a security event (RFC 8417), such as a provider's notice of signing out.
        if "events" in claims:
            raise invalid_token("the token is for an event, not an identity.")
        return claims

    def _key(self, header: Mapping[str, Any]) -> jwt.PyJWK:
        if header.get("alg") not in ALGORITHMS:
            raise invalid_token(f"the token must be signed with one of {', '.join(ALGORITHMS)}.")
        if str(header.get("typ", "JWT")).lower() not in TYPES:
            raise invalid_token("the token's type is not JWT.")
        kid = header.get("kid")
        if not isinstance(kid, str) or not 0 < len(kid) <= LONGEST_KID or "crit" in header:
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
            # OAuth's own claim of scopes is one text (RFC 8693 4.2); a group may have spaces.
            value = value.split() if self._provider.claim[-1] in ("scope", "scp") else [value]
        groups = value if isinstance(value, list) else []
        return [group for group in groups if isinstance(group, str)]


def _name(subject: str) -> str:
    plain = subject.isascii() and subject.isprintable() and " " not in subject
    if not plain or not 0 < len(subject) <= LONGEST_SUBJECT:
        raise invalid_token(
            f"the token's sub is not 1 to {LONGEST_SUBJECT} visible ASCII characters."
        )
    return f"oidc:{subject}"
