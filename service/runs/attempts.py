"""Attempts: what the service knows of the workers that had a run before.

It is what the service itself granted, and what the worker told while it trained, so that the
record of whoever goes on can be held against it.

>>> Attempt.of(1, {"begun": True, "further": False, "granted": 4, "head": None}).granted
4
>>> Attempt.of(1, {"code": "lease_lost"}).begun
False
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One that was handed over.

    ``granted`` steps were allowed to it and those before it together; ``further`` says that it
    finished one. ``head`` is the digest of a line of its record, as it told last.
    """

    fence: int
    begun: bool
    further: bool
    granted: int
    head: str | None

    @classmethod
    def of(cls, fence: int, body: Mapping[str, Any]) -> Self:
        """The attempt that an event of a run that waits again tells of."""
        return cls(
            fence=fence,
            begun=body.get("begun", False),
            further=body.get("further", False),
            granted=body.get("granted", 0),
            head=body.get("head"),
        )
