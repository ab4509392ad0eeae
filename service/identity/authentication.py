"""Who sends a request: the holder of a token, or the person at this machine.

A request that shows credentials is judged by them alone. One that shows none is known
only under the conditions of ``anonymous``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from starlette.concurrency import run_in_threadpool

from affidavit.plan import Reason
from affidavit.service.concurrency import Batcher, in_thread_pool
from affidavit.service.identity.actor import Actor
from affidavit.service.identity.bearer_jwt import ProviderTokens
from affidavit.service.identity.credentials import AuthenticationError
from affidavit.service.identity.loopback_auth import ANONYMOUS, came_directly
from affidavit.service.identity.rate_limit import counted
from affidavit.service.identity.token_repository import Token, TokenRepository
from affidavit.service.identity.tokens import PREFIX, TokenText, parse

WITHOUT_TOKENS = Reason(
    code="anonymous_access",
    pointer="",
    message="no token was ever made, so that every program on this machine may submit plans and "
    "read certificates.",
    remedy="Run: affidavit tokens new --name NAME --scope submit",
)

log = logging.getLogger("affidavit.service")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and under which name their requests are counted."""

    actor: Actor
    counted_as: str
    token_id: str | None = None


class Authenticator:
    """How callers become known; ``loopback`` says that the service listens there alone."""

    def __init__(
        self, tokens: TokenRepository, provided: ProviderTokens | None, *, loopback: bool
    ) -> None:
        self._tokens = tokens
        self._provided = provided
        self._loopback = loopback
        self._own: Batcher[TokenText, Token | None] = Batcher(in_thread_pool(self._look_up))

    async def by_token(self, text: str) -> Caller:
        """Its holder; raises ``AuthenticationError`` or ``ProviderUnavailable``."""
        if text.startswith(PREFIX):
            parsed = parse(text)
            return caller_of(None if parsed is None else await self._own(parsed))
        if self._provided is None:
            raise _invalid()
        actor = await run_in_threadpool(self._provided.actor, text)
        return Caller(actor, actor.name)

    def _look_up(self, texts: Sequence[TokenText]) -> list[Token | None]:
        found = self._tokens.find_all(texts)
        return [found[text] for text in texts]

    def without_token(
        self, address: str | None, headers: Mapping[str, str], http_version: str
    ) -> Caller:
        """The caller without credentials; raises ``AuthenticationError`` from another machine."""
        if self.open_to_this_machine() and came_directly(address, headers, http_version):
            return Caller(ANONYMOUS, counted(address))
        raise AuthenticationError(
            "unauthenticated",
            "this needs a token: send Authorization: Bearer TOKEN. affidavit tokens new makes one.",
        )

    def open_to_this_machine(self) -> bool:
        """Whether a program on this machine needs no token yet."""
        return self._loopback and self._provided is None and not self._tokens.exist()

    def warnings(self) -> list[Reason]:
        """What an operator should know of who is let in."""
        return [WITHOUT_TOKENS] if self.open_to_this_machine() else []

    def use_is_due(self, caller: Caller) -> bool:
        """Whether it is time to write down that the caller's token was used."""
        return caller.token_id is not None and self._tokens.use_is_due(caller.token_id)

    def write_use(self, caller: Caller) -> None:
        """Write it down."""
        if caller.token_id is not None:
            self._tokens.write_use(caller.token_id, datetime.now(UTC))

    def announce(self) -> None:
        """Say in the log when no token is asked for."""
        for warning in self.warnings():
            log.warning("OPEN: %s %s", warning.message, warning.remedy)


def caller_of(token: Token | None) -> Caller:
    """Who holds ``token``; raises ``AuthenticationError`` for one that does not count, or none."""
    if token is None:
        raise _invalid()
    if token.revoked_at is not None:
        raise AuthenticationError(
            "revoked_token", f"the token {token.id} was revoked; use another."
        )
    if token.expires_at <= datetime.now(UTC):
        raise AuthenticationError(
            "expired_token",
            f"the token {token.id} expired on {token.expires_at:%Y-%m-%d}; ask for another.",
        )
    return Caller(token.actor, f"token:{token.id}", token.id)


def _invalid() -> AuthenticationError:
    return AuthenticationError("invalid_token", "the token is not one that this service knows.")
