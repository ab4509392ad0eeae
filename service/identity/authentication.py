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

>>> bearer(["Bearer abc.def"], "")
'abc.def'
>>> bearer([], "") is None
True
>>> came_directly("127.0.0.1", {"host": "localhost:8321"})
True
>>> came_directly("127.0.0.1", {"host": "localhost:8321", "x-forwarded-for": "127.0.0.1"})
False
>>> came_directly("127.0.0.1", {"host": "rebound.example:8321"})
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
from affidavit.service.concurrency import Batcher, in_thread_pool
from affidavit.service.identity.actor import Actor, AuthenticationError, Scope, is_loopback
from affidavit.service.identity.openid import ProviderTokens
from affidavit.service.identity.rate_limiter import counted
from affidavit.service.identity.tokens import PREFIX, Token, TokenRepository, TokenText, parse

WITHOUT_TOKENS = Reason(
    code="anonymous_access",
    message="no token has been created, so every program on this machine may submit plans and "
    "read certificates.",
    remedy="Run: affidavit tokens new --name NAME --scope submit",
)

LONGEST = 16 * 1024
"""Characters of a bearer token; providers that list many groups make long ones."""
IN_URLS = frozenset({"access_token", "api_key", "apikey", "authorization", "bearer", "token"})
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")

log = logging.getLogger("affidavit.service")


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller, and the name under which their requests are counted.

    ``elsewhere`` is the same person in their other teams.
    """

    actor: Actor
    counted_as: str
    token_id: str | None = None
    elsewhere: tuple[Actor, ...] = ()


class Authenticator:
    """How callers become known; ``loopback`` says that the service listens there alone."""

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
        self._own: Batcher[TokenText, Token | None] = Batcher(in_thread_pool(self._look_up))

    async def by_token(self, text: str) -> Caller:
        """Its holder; raises ``AuthenticationError`` or ``ProviderUnavailable``."""
        if text.startswith(PREFIX):
            parsed = parse(text)
            return caller_of(None if parsed is None else await self._own(parsed), self._now())
        if self._provider_tokens is None:
            raise _invalid()
        actor = await run_in_threadpool(self._provider_tokens.actor, text)
        return Caller(actor, actor.name)

    def _look_up(self, texts: Sequence[TokenText]) -> list[Token | None]:
        tokens_by_text = self._tokens.find_all(texts)
        return [tokens_by_text[text] for text in texts]

    def without_token(self, request: Request) -> Caller:
        """The caller without credentials; raises ``AuthenticationError`` from another machine."""
        address, version = address_of(request), request.scope["http_version"]
        if self.open_to_this_machine() and came_directly(address, request.headers, version):
            return Caller(ANONYMOUS, counted(address))
        raise AuthenticationError(
            "unauthenticated",
            "authentication required: send Authorization: Bearer TOKEN. Create a token with "
            "affidavit tokens new.",
        )

    def open_to_this_machine(self) -> bool:
        """Whether a program on this machine needs no token yet."""
        return self._loopback and self._provider_tokens is None and not self._tokens.exist()

    def warnings(self) -> list[Reason]:
        """What an operator should know of who is let in."""
        return [WITHOUT_TOKENS] if self.open_to_this_machine() else []

    def announce(self) -> None:
        """Say in the log when no token is asked for."""
        for warning in self.warnings():
            log.warning("OPEN: %s %s", warning.message, warning.remedy)


def address_of(request: Request) -> str | None:
    """The address of whoever connected."""
    return request.client.host if request.client is not None else None


def caller_of(token: Token | None, now: datetime) -> Caller:
    """Who holds ``token``, as of ``now``.

    Raises ``AuthenticationError`` for none, and for one that does not count.
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


def bearer(headers: Sequence[str], query: str) -> str | None:
    """The token in the ``Authorization`` headers, None where there is none.

    Raises ``AuthenticationError`` when they hold anything else, or when the URL holds a token.
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
    if len(token) > LONGEST:
        raise AuthenticationError(
            "malformed_credentials", f"the token is longer than {LONGEST} characters."
        )
    if _TOKEN.fullmatch(token) is None:
        raise AuthenticationError(
            "malformed_credentials",
            "Bearer must be followed by one token of letters A to Z, digits and . _ ~ + / - =.",
        )
    return token


def _refuse_in_url(query: str) -> None:
    """URLs end in logs, histories and Referer headers, so that a token there is no secret."""
    parameters = parse_qsl(query, keep_blank_values=True)
    if any(name.lower() in IN_URLS or PREFIX in name + value for name, value in parameters):
        raise AuthenticationError(
            "token_in_url",
            "the URL contains a token, which others can now read: revoke it, and send a new one "
            "as Authorization: Bearer TOKEN.",
        )


# ---- the person at this machine ------------------------------------------------------

ANONYMOUS = Actor("anonymous@loopback", frozenset({Scope.SUBMIT, Scope.AUDIT}))

FORWARDED = (
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
"""Headers that proxies add; one that adds none of them cannot be told from a person."""


def came_directly(
    address: str | None, headers: Mapping[str, str], http_version: str = "1.1"
) -> bool:
    """Whether a program on this machine sent the request to this service by its own name."""
    if address is None or not is_loopback(address) or http_version < "1.1":
        return False
    if any(name in headers for name in FORWARDED):
        return False
    host = headers.get("host", "")
    if not _names_loopback(host):
        return False
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return False
    origin = headers.get("origin")
    return origin is None or origin == f"http://{host}"


def _names_loopback(host: str) -> bool:
    """Whether a ``Host`` header is ``localhost`` or a loopback address, with any port."""
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018  # raises where it is no port
    except ValueError:
        return False
    name = parts.hostname or ""
    return parts.netloc == host and "@" not in host and (name == "localhost" or is_loopback(name))
