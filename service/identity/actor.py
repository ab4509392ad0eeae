"""The caller and their permissions: a name for the records, and scopes.

>>> Actor("token:ci", frozenset({Scope.SUBMIT})).may(Scope.APPROVE)
False
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Scope(StrEnum):
    """What a token may be used for."""

    SUBMIT = "submit"
    APPROVE = "approve"
    AUDIT = "audit"
    WORK = "work"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Actor:
    """Someone who was identified; ``name`` is what certificates and the log call them."""

    name: str
    scopes: frozenset[Scope]

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
