"""One thing that a trainer must do for a certificate to be about its run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Obligation:
    """One thing that the trainer must do, by a stable code.

    Our trainer refuses to run what it does not keep, so what it keeps is ``checked_by`` it;
    the rest is ``declared`` by whoever runs the plan.
    """

    code: str
    text: str
    checked_by: Literal["trainer", "declared"] = "trainer"

    def as_dict(self) -> dict[str, str]:
        """The obligation as it stands in a certificate."""
        return {"code": self.code, "text": self.text, "checked_by": self.checked_by}
