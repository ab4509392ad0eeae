"""Who calls, the holder of a bearer token (RFC 6750) or the person at this machine, and how often.

A request that shows credentials is judged by them alone. One that shows none is known only
under the conditions of ``loopback_auth``. Nothing is guessed and nothing is repaired: a header
that is there but cannot be read is refused, whatever else would have let the request in, because
somebody who shows a bad token is not somebody who shows none. Nothing of what was sent is
repeated in a response or a log.

Each caller has a bucket that holds one minute's requests and fills evenly, so that a burst is
served and a stream is slowed to the rate. Callers are counted by their token, and by their address
where they have none; an IPv6 caller owns at least 64 bits of address, which count as one.
Requests that show a bad token are counted against the address, so that they cannot use
up what belongs to a token's holder. The buckets are those of one process: two processes together
let through twice as much.

>>> bearer(["Bearer abc.def"], "")
'abc.def'
>>> bearer([], "") is None
True
>>> limits = RateLimiter(per_minute=2, at_once=1)
>>> [limits.take("token:a", now=0.0) for _ in range(3)]
[0.0, 0.0, 30.0]
>>> limits.take("token:b", now=0.0)
0.0
>>> limits.fields("token:b", now=0.0)[1]
(b'ratelimit', b'"minute";r=1;t=30')
"""

from __future__ import annotations

import ipaddress
import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import parse_qsl

from starlette.concurrency import run_in_threadpool

from affidavit.plan import Reason
from affidavit.service.concurrency import Batcher, in_thread_pool
from affidavit.service.identity.actor import Actor, AuthenticationError
from affidavit.service.identity.loopback_auth import ANONYMOUS, came_directly
from affidavit.service.identity.provider_tokens import ProviderTokens
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

    def without_token(
        self, address: str | None, headers: Mapping[str, str], http_version: str
    ) -> Caller:
        """The caller without credentials; raises ``AuthenticationError`` from another machine."""
        if self.open_to_this_machine() and came_directly(address, headers, http_version):
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


MOST_KEPT = 10_000
"""Buckets in memory; the one unused for longest, and so fullest, is forgotten first."""


class RateLimiter:
    """The buckets of one process; belongs to one event loop."""

    def __init__(self, *, per_minute: int, at_once: int) -> None:
        self.per_minute = per_minute
        self.at_once = at_once
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._running: dict[str, int] = {}

    def take(self, caller: str, now: float | None = None) -> float:
        """Take one request from the caller's bucket.

        Returns 0, or the seconds until there is one where the bucket is empty.
        """
        moment = time.monotonic() if now is None else now
        left = self._left(caller, moment)
        allowed = left >= 1
        self._buckets[caller] = (left - 1 if allowed else left, moment)
        self._buckets.move_to_end(caller)
        while len(self._buckets) > MOST_KEPT:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - left) * 60 / self.per_minute

    def fields(self, caller: str, now: float | None = None) -> tuple[tuple[bytes, bytes], ...]:
        """``RateLimit-Policy`` and ``RateLimit``: the limit, what remains, and when all is back.

        Reference: draft-ietf-httpapi-ratelimit-headers-10.
        """
        left = self._left(caller, time.monotonic() if now is None else now)
        full = math.ceil((self.per_minute - left) * 60 / self.per_minute)
        return (
            (b"ratelimit-policy", f'"minute";q={self.per_minute};w=60'.encode()),
            (b"ratelimit", f'"minute";r={int(left)};t={full}'.encode()),
        )

    def _left(self, caller: str, moment: float) -> float:
        """The requests in the caller's bucket."""
        left, since = self._buckets.get(caller, (float(self.per_minute), moment))
        return min(left + (moment - since) * self.per_minute / 60, float(self.per_minute))

    def begin(self, caller: str) -> bool:
        """Count a request as being answered, until ``end``; False where no other may be."""
        running = self._running.get(caller, 0)
        if running < self.at_once:
            self._running[caller] = running + 1
        return running < self.at_once

    def end(self, caller: str) -> None:
        """A request that ``begin`` counted was answered."""
        if self._running[caller] == 1:
            del self._running[caller]
        else:
            self._running[caller] -= 1


def retry_after(seconds: float) -> str:
    """The value of ``Retry-After``: whole seconds, at least one."""
    return str(max(1, math.ceil(seconds)))


def counted(address: str | None) -> str:
    """The name under which requests from ``address`` are counted.

    >>> counted("2001:db8::1") == counted("2001:db8::2"), counted("::ffff:192.0.2.1")
    (True, 'address:192.0.2.1')
    """
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return "address:unknown"
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return f"address:{parsed.ipv4_mapped}"
        return f"address:{ipaddress.ip_network((int(parsed), 64), strict=False)}"
    return f"address:{parsed}"
