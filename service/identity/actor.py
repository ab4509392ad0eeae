"""The caller and their permissions: a name for the records, scopes, and a team.

Whoever has a team sees that team's objects alone. Whoever has none belongs to the team ``default``,
unless they approve, audit or administer: these see every team's.

>>> Actor("token:ci", frozenset({Scope.SUBMIT})).may(Scope.APPROVE)
False
>>> Actor("token:ci", frozenset({Scope.SUBMIT})).sees, Actor("x", frozenset({Scope.AUDIT})).sees
('default', None)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

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
