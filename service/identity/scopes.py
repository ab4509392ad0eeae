"""The scopes of tokens: what their holders may do."""

from __future__ import annotations

from enum import StrEnum


class Scope(StrEnum):
    """A permission of a token."""

    SUBMIT = "submit"
    APPROVE = "approve"
    AUDIT = "audit"
    WORK = "work"
    ADMIN = "admin"


ORGANISATION_SCOPES = frozenset({Scope.APPROVE, Scope.AUDIT, Scope.ADMIN})
"""Scopes with which a caller without a team sees every team's objects."""
ORGANISATION_ONLY_SCOPES = frozenset({Scope.AUDIT, Scope.ADMIN})
"""Scopes for objects without a team: the log, tokens, budgets, policies and keysets."""
