"""The record of a replay: what ran, on which script, and what it shows.

``affidavit replay --record replay.json`` writes it. It is bound to the bytes of the script and of
the local files that it imports, and to the plan, if one was given. It proves nothing: a check is
``shown`` if none of the runs refuted it.

>>> ran = ReplayedFile(path="train.py", sha256="0" * 64, lines=(1, 2, 7))
>>> ran.covers("0" * 64, 7), ran.covers("0" * 64, 3), ran.covers("1" * 64, 7)
(True, False, False)
"""

from __future__ import annotations

from typing import Literal

from pydantic import ValidationError

from affidavit.plan import CodedError, PlanError, load_json
from affidavit.plan.types import StrictModel

RECORD_TYPE = "affidavit.replay/1"
MAX_RECORD_BYTES = 16 << 20

Check = Literal["shown", "refuted", "undecided", "not_tested"]
Verdict = Literal["not_refuted", "refuted", "undecided"]


class BadReplayRecord(CodedError):
    """A file is not a replay record; ``code`` is ``bad_replay_record``."""


_CHANGES = {
    "removed": "that is removed",
    "zeroed": "that is zeroed",
    "replaced": "that is replaced by another",
    "outlier": "that is made an outlier",
    "not_finite": "that is made not finite",
    "mixed": "that is mixed with others",
}
"""What is done to a record, in words."""


class ChangedRecord(StrictModel):
    """How a neighbouring data set differs: ``record`` of ``dataset``, or many (``mixed``)."""

    kind: Literal["removed", "zeroed", "replaced", "outlier", "not_finite", "mixed"]
    dataset: int
    record: int

    def __str__(self) -> str:
        if self.kind == "mixed":
            return "data in which records are mixed"
        return f"record {self.record} {self.change}"

    @property
    def change(self) -> str:
        """What is done to the record, in words."""
        return _CHANGES[self.kind]


class ReplayFinding(StrictModel):
    """A difference between two runs, or a fault of the noise.

    ``where`` is ``file:line``, ``subject`` the tensor, setting or file, ``release`` the number of
    the release before which it shows, from 0. ``refutes`` says whether it fails the loop.
    """

    code: str
    message: str
    remedy: str
    check: Literal["sensitivity", "non_interference", "noise", "lots"]
    where: str | None = None
    subject: str | None = None
    release: int | None = None
    refutes: bool = True
    neighbour: ChangedRecord | None = None


class ReplayedFile(StrictModel):
    """A local file of which lines ran: its path, the SHA-256 of its bytes, the lines' numbers."""

    path: str
    sha256: str
    lines: tuple[int, ...]

    def covers(self, sha256: str, line: int) -> bool:
        """Whether ``line`` of a file with these bytes ran in the replay."""
        return self.sha256 == sha256 and line in self.lines


class ReplayChecks(StrictModel):
    """What the runs say of each check."""

    sensitivity: Check
    non_interference: Check
    noise: Check
    lots: Check


class ReplayRecord(StrictModel):
    """What a replay of ``steps`` releases on ``neighbours`` data sets shows of ``program``.

    ``largest_move`` is the largest move of a release before its noise, as a share of what its clip
    norm allows. ``plan`` is the digest of the plan that the noise and lots were compared with.
    ``unstable`` differs between two runs on the same data, and was not compared.
    """

    type: Literal["affidavit.replay/1"] = "affidavit.replay/1"
    verdict: Verdict
    program: str
    plan: str | None
    steps: int
    neighbours: int
    checks: ReplayChecks
    largest_move: float | None
    files: tuple[ReplayedFile, ...]
    findings: tuple[ReplayFinding, ...]
    notes: tuple[str, ...]
    releases: tuple[str, ...]
    ended: str
    unstable: tuple[str, ...]
    environment: dict[str, str]

    @property
    def shown(self) -> str:
        """How what was not refuted may be called."""
        return f"shown by replay of {self.steps} steps and {self.neighbours} neighbours"


def read_replay_record(raw: bytes) -> ReplayRecord:
    """Return the record in ``raw``; raises ``BadReplayRecord``."""
    try:
        return ReplayRecord.model_validate(load_json(raw, MAX_RECORD_BYTES).data)
    except (PlanError, ValidationError) as error:
        why = str(error).splitlines()[0]
        raise BadReplayRecord(
            "bad_replay_record",
            f"this is not a replay record: {why}",
            "Write one with affidavit replay --record FILE -- python train.py",
        ) from None
