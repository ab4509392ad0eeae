"""Approvals, as a certificate carries them: how many it needs, and who gave theirs to what.

Where the policy wants somebody else to look first, a certified plan is issued with nothing
given yet, and is not usable: ``verify`` rejects it. Each approval names the digest of the
envelope that was approved, so that it cannot be moved to another. Once all are given, the
same statement is signed anew with the approvals in it, as the next issue.

>>> alice = Approval("alice", "2026-01-01T00:00:00Z", "agreed with the DPO", "sha256:…")
>>> Approvals(required=2, given=(alice,)).complete
False
>>> Approvals.of({"approvals": []})  # certificates from before there were approvals
Approvals(required=0, given=())
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Approval:
    """One person's word: ``at`` in UTC, ``envelope`` the digest of what they saw."""

    name: str
    at: str
    comment: str
    envelope: str


@dataclass(frozen=True, slots=True)
class Approvals:
    """How many approvals a certificate needs and which it has."""

    required: int = 0
    given: tuple[Approval, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether as many people as required approved."""
        return len({item.name for item in self.given}) >= self.required

    def as_document(self) -> dict[str, Any]:
        """The ``approvals`` of a statement."""
        return {"required": self.required, "given": [asdict(item) for item in self.given]}

    @classmethod
    def of(cls, predicate: Mapping[str, Any]) -> Approvals:
        """Those of a statement's predicate; raises ``ValueError`` for any other shape."""
        said = predicate.get("approvals")
        if said == []:
            return cls()
        try:
            required, given = said["required"], said["given"]  # type: ignore[index]  # tried
            found = cls(required, tuple(Approval(**entry) for entry in given))
        except (TypeError, KeyError):
            raise ValueError("its approvals cannot be read") from None
        words = [word for item in found.given for word in asdict(item).values()]
        plain = isinstance(required, int) and not isinstance(required, bool) and required >= 0
        if not plain or not all(isinstance(word, str) for word in words):
            raise ValueError("its approvals cannot be read")
        return found


NONE_NEEDED = Approvals()
