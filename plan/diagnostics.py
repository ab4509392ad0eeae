"""Reasons: why a plan was not certified, in words that a person can act on.

Three kinds of refusal are told apart, because their remedies differ:

::

    PlanError
    ├── MalformedPlan    the document is not a plan (HTTP 4xx, exit code 2)
    └── RefusedPlan      a plan, but no theorem or no accountant covers it, or it is
                         known to be unsound (a signed refusal, exit code 1)

A ``code`` never changes its meaning once published.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """One finding: a stable code, where, what is wrong, and how to mend it.

    ``pointer`` is an RFC 6901 JSON pointer into the plan; ``line`` and ``column`` count
    from 1 and are given when the plan was read from text that has positions.
    """

    code: str
    pointer: str
    message: str
    remedy: str
    line: int | None = None
    column: int | None = None

    def as_dict(self) -> dict[str, str | int]:
        """The reason as it stands in a result document."""
        found: dict[str, str | int] = {
            "code": self.code,
            "pointer": self.pointer,
            "message": self.message,
            "remedy": self.remedy,
        }
        if self.line is not None and self.column is not None:
            found |= {"line": self.line, "column": self.column}
        return found

    def __str__(self) -> str:
        where = f" at {self.pointer}" if self.pointer else ""
        return f"{self.code}{where}: {self.message} {self.remedy}".rstrip()


class PlanError(Exception):
    """Base of both refusals; always carries at least one reason."""

    def __init__(self, *reasons: Reason) -> None:
        if not reasons:
            raise ValueError("a refusal needs a reason")
        super().__init__("; ".join(str(reason) for reason in reasons))
        self.reasons = reasons


class MalformedPlan(PlanError):
    """The document cannot be read as a plan of schema version 1."""


class RefusedPlan(PlanError):
    """A well-formed plan that nothing may be claimed about, with the reason."""


def pointer_to(*tokens: str | int) -> str:
    """An RFC 6901 pointer.

    >>> pointer_to("releases", 0, "a/b")
    '/releases/0/a~1b'
    """
    return "".join("/" + str(token).replace("~", "~0").replace("/", "~1") for token in tokens)
