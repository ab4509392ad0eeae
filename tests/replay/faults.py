"""A fault that is planted in a loop, and the finding that must name it."""

from dataclasses import dataclass, field

import pytest
from _pytest.mark import ParameterSet

from affidavit.evidence import ReplayRecord


@dataclass(frozen=True)
class Fault:
    """Replaces texts of a loop, each of which it has once.

    ``code`` is the finding that must name it, ``where`` a text of the line that it must name,
    ``subject`` the tensor, setting or file. One that is ``ordinary`` is not left to the soak.
    """

    name: str
    texts: dict[str, str] = field(hash=False)
    code: str
    where: str | None = None
    subject: str | None = None
    ordinary: bool = False

    def planted(self, loop: str) -> str:
        """Return the loop with the fault."""
        for place, new in self.texts.items():
            assert loop.count(place) == 1, place
            loop = loop.replace(place, new)
        return loop

    def is_named(self, record: ReplayRecord, loop: str) -> bool:
        """Whether a finding of the replay of ``loop`` names the fault."""
        lines = loop.splitlines()
        for item in record.findings:
            line = lines[int(item.where.split(":")[1]) - 1] if item.where else ""
            is_named = item.code == self.code and self.subject in (None, item.subject)
            if is_named and item.refutes and (self.where is None or self.where in line):
                return True
        return False


def parameters(faults: list[Fault]) -> list[ParameterSet]:
    """Return the faults as parameters of a test."""
    return [
        pytest.param(fault, id=fault.name, marks=() if fault.ordinary else pytest.mark.soak)
        for fault in faults
    ]
