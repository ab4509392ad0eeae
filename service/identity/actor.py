"""The caller and their permissions, and the context of a change that they make.

Whoever has a team sees that team's objects alone. Whoever has none belongs to the team ``default``,
unless they approve, audit or administer: these see every team's.

>>> Actor("token:ci", frozenset({Scope.SUBMIT})).may(Scope.APPROVE)
False
>>> Actor("token:ci", frozenset({Scope.SUBMIT})).sees, Actor("x", frozenset({Scope.AUDIT})).sees
('default', None)
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Self

from fastapi import Header, Request

from affidavit.plan import StrictModel, digest_of
from affidavit.service.errors import IdempotencyKeyReused
from affidavit.service.teams import DEFAULT


class Scope(StrEnum):
    """What a token may be used for."""

    SUBMIT = "submit"
    APPROVE = "approve"
    AUDIT = "audit"
    WORK = "work"
    ADMIN = "admin"


OF_THE_ORGANISATION = frozenset({Scope.APPROVE, Scope.AUDIT, Scope.ADMIN})
"""Who has one of these, and no team, sees every team's objects."""
NEVER_OF_A_TEAM = frozenset({Scope.AUDIT, Scope.ADMIN})
"""Scopes for what has no team: the log, tokens, budgets, policies and keysets."""


SERVED = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Names of queues and data sets."""


@dataclass(frozen=True, slots=True)
class Serves:
    """What ``WORK`` is for: runs of these queues, and by hand reservations of these data sets."""

    queues: frozenset[str] = frozenset()
    datasets: frozenset[str] = frozenset()


DEFAULT_QUEUE = Serves(frozenset({"default"}))
"""What ``WORK`` is for where nothing is named."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Someone who was identified; ``name`` is what certificates and the log call them."""

    name: str
    scopes: frozenset[Scope]
    team: str | None = None
    serves: Serves = DEFAULT_QUEUE

    @property
    def sees(self) -> str | None:
        """The team whose objects they see; None for every team's."""
        if self.team is None and self.scopes & OF_THE_ORGANISATION:
            return None
        return self.works_for

    @property
    def works_for(self) -> str:
        """The team that what they submit belongs to."""
        return self.team or DEFAULT

    @property
    def side(self) -> str:
        """The name of the team that they act for; ``all teams`` for the organisation."""
        return "all teams" if self.sees is None else self.works_for

    @property
    def anonymous(self) -> bool:
        """Whether the caller is unknown and counts as nobody in particular."""
        return self.name.startswith("anonymous@")

    def may(self, scope: Scope) -> bool:
        """Whether ``scope`` is among theirs."""
        return scope in self.scopes


class AuthenticationError(Exception):
    """The request does not say who sends it; ``code`` is stable, the text is for the client."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


def is_loopback(address: str) -> bool:
    """Whether a literal IP address is one of this machine's loopback addresses."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


IdempotencyKey = Annotated[
    str | None,
    Header(
        pattern=r"^[!-~]{1,255}$",
        description="A repetition with the same key gets the first response again.",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandContext:
    """The caller of a change, the time, and how a repeated request is recognised."""

    actor: str
    at: datetime
    idempotency_key: str | None = None
    request_digest: str | None = None

    @classmethod
    def of(cls, actor: Actor, http: Request, key: str | None, body: StrictModel) -> Self:
        """The context of the request ``http``, whose method, path and ``body`` tell it apart."""
        request = {
            "method": http.method,
            "path": http.url.path,
            "body": body.model_dump(mode="json"),
        }
        if key is not None and actor.team is not None:
            # A person of several teams uses it once in each.
            key = hashlib.sha256(f"{actor.team} {key}".encode()).hexdigest()
        return cls(
            actor=actor.name,
            at=http.app.state.services.clock.now(),
            idempotency_key=key,
            request_digest=digest_of(request),
        )

    def require_same(self, request_digest: str | None) -> None:
        """Raise ``IdempotencyKeyReused`` unless the key came with this very request before."""
        if request_digest != self.request_digest:
            raise IdempotencyKeyReused(
                "this Idempotency-Key was already used for a different request.",
                "Use a new key for a new request.",
            )
