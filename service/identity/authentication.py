"""Authentication: the holder of a bearer token (RFC 6750), or the person at this machine.

A request with credentials is authenticated by them alone. A header that cannot be read is refused,
even if the request would be allowed without it. Credentials are never repeated in a response or a
log.

A request without credentials is answered only if all of these hold:

- the service listens on a loopback address only;
- no token was ever created, and no OpenID provider is configured;
- the connection comes from a loopback address;
- no header says that the request was forwarded, and it is not HTTP/1.0: a reverse proxy on this
  machine connects from 127.0.0.1 for the whole network, and nginx in its default configuration is
  recognisable only by the old version of HTTP;
- ``Host`` names this machine, so that another site's name that resolves to 127.0.0.1 (DNS
  rebinding) is refused;
- ``Origin``, if present, is this service, and ``Sec-Fetch-Site`` names no other site.

So ``X-Forwarded-For`` can only withdraw this access. An anonymous caller may submit plans and read,
but not approve, administer or work, which require an identity.

>>> parse_bearer(["Bearer abc.def"], "")
'abc.def'
>>> parse_bearer([], "") is None
True
>>> is_direct_request("127.0.0.1", {"host": "localhost:8321"})
True
>>> is_direct_request("127.0.0.1", {"host": "localhost:8321", "x-forwarded-for": "127.0.0.1"})
False
>>> is_direct_request("127.0.0.1", {"host": "rebound.example:8321"})
False
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import parse_qsl, urlsplit

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from affidavit.plan import Reason
from affidavit.service.core.concurrency import Batcher, in_thread_pool
from affidavit.service.identity.actor import Actor, AuthenticationError, is_loopback
from affidavit.service.identity.openid import ProviderTokens
from affidavit.service.identity.rate_limiter import key_of_address
from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import (
    TOKEN_PREFIX,
    Token,
    TokenRepository,
    TokenText,
    parse_token,
)

ANONYMOUS_ACCESS = Reason(
    code="anonymous_access",
    message="no token has been created, so every program on this machine may submit plans and "
    "read certificates.",
    remedy="Run: affidavit tokens new --name NAME --scope submit",
)

MAX_TOKEN_LENGTH = 16 * 1024
"""Characters of a bearer token; tokens that list many groups are long."""
TOKEN_PARAMETERS = frozenset(
    {"access_token", "api_key", "apikey", "authorization", "bearer", "token"}
)
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")

log = logging.getLogger("affidavit.service")


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller, and the key under which the rate limiter counts their requests.

    ``elsewhere`` is the same person in their other teams.
    """

    actor: Actor
    counted_as: str
    token_id: str | None = None
    elsewhere: tuple[Actor, ...] = ()


class Authenticator:
    """Authenticates callers; ``loopback`` tells whether the service listens only there."""

    def __init__(
        self,
        tokens: TokenRepository,
        provider_tokens: ProviderTokens | None,
        now: Callable[[], datetime],
        *,
        loopback: bool,
    ) -> None:
        self._tokens = tokens
        self._provider_tokens = provider_tokens
        self._now = now
        self._loopback = loopback
        self._find_tokens: Batcher[TokenText, Token | None] = Batcher(in_thread_pool(self._look_up))

    async def by_token(self, text: str) -> Caller:
        """Return the token's holder; raises ``AuthenticationError`` or ``ProviderUnavailable``."""
        if text.startswith(TOKEN_PREFIX):
            parsed = parse_token(text)
            return caller_of(
                None if parsed is None else await self._find_tokens(parsed), self._now()
            )
        if self._provider_tokens is None:
            raise _invalid()
        actor = await run_in_threadpool(self._provider_tokens.actor, text)
        return Caller(actor, actor.name)

    def _look_up(self, texts: Sequence[TokenText]) -> list[Token | None]:
        tokens_by_text = self._tokens.find_all(texts)
        return [tokens_by_text[text] for text in texts]

    def without_token(self, request: Request) -> Caller:
        """Return the anonymous caller; raises ``AuthenticationError`` if they are not allowed."""
        address, version = address_of(request), request.scope["http_version"]
        if self.allows_anonymous() and is_direct_request(address, request.headers, version):
            return Caller(ANONYMOUS, key_of_address(address))
        raise AuthenticationError(
            "unauthenticated",
            "authentication required: send Authorization: Bearer TOKEN. Create a token with "
            "affidavit tokens new.",
        )

    def allows_anonymous(self) -> bool:
        """Return whether programs on this machine need no token yet."""
        return self._loopback and self._provider_tokens is None and not self._tokens.has_any()

    def warnings(self) -> list[Reason]:
        """Return the warnings about access for the operator."""
        return [ANONYMOUS_ACCESS] if self.allows_anonymous() else []

    def log_warnings(self) -> None:
        """Log the warnings about access."""
        for warning in self.warnings():
            log.warning("OPEN: %s %s", warning.message, warning.remedy)


def address_of(request: Request) -> str | None:
    """Return the address of the connection."""
    return request.client.host if request.client is not None else None


def caller_of(token: Token | None, now: datetime) -> Caller:
    """Return the holder of ``token``.

    Raises ``AuthenticationError`` for a missing, revoked or expired token.
    """
    if token is None:
        raise _invalid()
    if token.revoked_at is not None:
        raise AuthenticationError(
            "revoked_token", f"the token {token.id} was revoked; use another."
        )
    if token.expires_at <= now:
        raise AuthenticationError(
            "expired_token",
            f"the token {token.id} expired on {token.expires_at:%Y-%m-%d}; ask for another.",
        )
    return Caller(token.actor, f"token:{token.id}", token.id)


def _invalid() -> AuthenticationError:
    return AuthenticationError("invalid_token", "this service does not know the token.")


def parse_bearer(headers: Sequence[str], query: str) -> str | None:
    """Return the token in the ``Authorization`` headers, if any.

    Raises ``AuthenticationError`` for another content, and for a token in the URL.
    """
    if query:
        _refuse_in_url(query)
    if not headers:
        return None
    if len(headers) > 1:
        raise AuthenticationError(
            "malformed_credentials", "the request has several Authorization headers; send one."
        )
    scheme, _, token = headers[0].strip().partition(" ")
    if scheme.lower() != "bearer":
        raise AuthenticationError(
            "unsupported_scheme",
            "Authorization must be Bearer TOKEN; other schemes are not supported.",
        )
    token = token.strip(" ")
    if len(token) > MAX_TOKEN_LENGTH:
        raise AuthenticationError(
            "malformed_credentials", f"the token is longer than {MAX_TOKEN_LENGTH} characters."
        )
    if _TOKEN.fullmatch(token) is None:
        raise AuthenticationError(
            "malformed_credentials",
            "Bearer must be followed by one token of letters A to Z, digits and . _ ~ + / - =.",
        )
    return token


def _refuse_in_url(query: str) -> None:
    """Refuse a token in the URL, which logs, histories and Referer headers reveal."""
    parameters = parse_qsl(query, keep_blank_values=True)
    if any(
        name.lower() in TOKEN_PARAMETERS or TOKEN_PREFIX in name + value
        for name, value in parameters
    ):
        raise AuthenticationError(
            "token_in_url",
            "the URL contains a token, which others can now read: revoke it, and send a new one "
            "as Authorization: Bearer TOKEN.",
        )


# ---- the person at this machine ------------------------------------------------------

ANONYMOUS = Actor("anonymous@loopback", frozenset({Scope.SUBMIT, Scope.AUDIT}))

FORWARDED_HEADERS = (
    "forwarded",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-port",
    "x-forwarded-proto",
    "x-forwarded-server",
    "x-real-ip",
    "x-client-ip",
    "x-original-forwarded-for",
    "cf-connecting-ip",
    "true-client-ip",
)
"""Headers that proxies add; a proxy that adds none is not recognised."""


def is_direct_request(
    address: str | None, headers: Mapping[str, str], http_version: str = "1.1"
) -> bool:
    """Return whether a program on this machine sent the request directly to this service."""
    if address is None or not is_loopback(address) or http_version < "1.1":
        return False
    if any(name in headers for name in FORWARDED_HEADERS):
        return False
    host = headers.get("host", "")
    if not _names_loopback(host):
        return False
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return False
    origin = headers.get("origin")
    return origin is None or origin == f"http://{host}"


def _names_loopback(host: str) -> bool:
    """Return whether a ``Host`` header is ``localhost`` or a loopback address, with any port."""
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018  # raises for an invalid port
    except ValueError:
        return False
    name = parts.hostname or ""
    return parts.netloc == host and "@" not in host and (name == "localhost" or is_loopback(name))
