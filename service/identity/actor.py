"""The caller and their permissions, and the context of a change.

A caller with a team sees that team's objects only. A caller without one belongs to the team
``default``, unless they approve, audit or administer: then they see every team's objects.

>>> Actor("token:ci", frozenset({Scope.SUBMIT})).may(Scope.APPROVE)
False
>>> Actor("token:ci", frozenset({Scope.SUBMIT})).visible_team
'default'
>>> Actor("x", frozenset({Scope.AUDIT})).visible_team is None
True
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Self

from sqlalchemy import Connection

from affidavit.plan import StrictModel, digest_of
from affidavit.service.core.errors import IdempotencyKeyReused
from affidavit.service.core.teams import DEFAULT
from affidavit.service.identity.scopes import ORGANISATION_SCOPES, Scope

if TYPE_CHECKING:
    from fastapi import Request


WORK_TARGET_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Names of queues and data sets."""


@dataclass(frozen=True, slots=True)
class Serves:
    """The queues whose runs a worker claims, and the data sets it commits and settles by hand."""

    queues: frozenset[str] = frozenset()
    datasets: frozenset[str] = frozenset()


DEFAULT_QUEUE = Serves(frozenset({"default"}))
"""The queue of a worker whose token names none."""


@dataclass(frozen=True, slots=True)
class Actor:
    """An authenticated caller; certificates and the log use ``name``."""

    name: str
    scopes: frozenset[Scope]
    team: str | None = None
    serves: Serves = DEFAULT_QUEUE

    @property
    def visible_team(self) -> str | None:
        """The team whose objects the actor sees; None for every team."""
        if self.team is None and self.scopes & ORGANISATION_SCOPES:
            return None
        return self.owning_team

    @property
    def owning_team(self) -> str:
        """The team that owns the actor's submissions."""
        return self.team or DEFAULT

    @property
    def team_label(self) -> str:
        """The displayed name of the team; ``all teams`` for the organisation."""
        return "all teams" if self.visible_team is None else self.owning_team

    @property
    def is_anonymous(self) -> bool:
        """Whether the caller is unknown."""
        return self.name.startswith("anonymous@")

    def may(self, scope: Scope) -> bool:
        """Return whether the actor has ``scope``."""
        return scope in self.scopes


class AuthenticationError(Exception):
    """The caller could not be authenticated; ``code`` is stable, ``detail`` is for the client."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


def is_loopback(address: str) -> bool:
    """Return whether ``address`` is a literal loopback IP address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandContext:
    """The caller of a change, the time, and the key and digest that identify the request."""

    actor: str
    at: datetime
    idempotency_key: str | None = None
    request_digest: str | None = None

    @classmethod
    def of(cls, actor: Actor, http: Request, key: str | None, body: StrictModel) -> Self:
        """Build the context of a request, which its method, path and ``body`` identify."""
        request = {
            "method": http.method,
            "path": http.url.path,
            "body": body.model_dump(mode="json"),
        }
        if key is not None and actor.team is not None:
            # A person in several teams may use the key once in each.
            key = hashlib.sha256(f"{actor.team} {key}".encode()).hexdigest()
        return cls(
            actor=actor.name,
            at=http.app.state.services.clock.now(),
            idempotency_key=key,
            request_digest=digest_of(request),
        )

    def require_same(self, request_digest: str | None) -> None:
        """Raise ``IdempotencyKeyReused`` if the key was used for another request."""
        if request_digest != self.request_digest:
            raise IdempotencyKeyReused(
                "this Idempotency-Key was already used for a different request.",
                "Use a new key for a new request.",
            )


Approve = Callable[[Connection], object]
"""A callback that a change calls in its transaction; it raises if others have to agree first."""


def approve_alone(_: Connection) -> None:
    """Approve a change that one person makes."""
