r"""What people and workers send about runs.

>>> read_heartbeat(b'{"fence": 1, "steps": 7}').steps
7
>>> read_run(b'{"certificate": "x"}')
Traceback (most recent call last):
affidavit.service.wanted.MalformedRequest: ...
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StringConstraints

from affidavit.plan import MAX_JSON_BYTES, Integer, Name, StrictModel
from affidavit.service.wanted import UUID, Comment, Digest, MalformedRequest, Wanted, read_wanted
from affidavit.worker import TEXTS

REFERENCE = f"^{TEXTS['data'].pattern}$"
OUTPUT = f"^{TEXTS['output'].pattern}$"

Reference = Annotated[str, StringConstraints(strict=True, pattern=REFERENCE)]
Memory = Annotated[Integer, Field(ge=0, le=2**31 - 1)]
Fence = Annotated[Integer, Field(ge=1, le=2**31 - 1)]
Steps = Annotated[Integer, Field(ge=0, le=2**31 - 1)]
Flag = Annotated[bool, Field(strict=True)]


class Requirements(StrictModel):
    """What a worker must have; memory in MiB."""

    gpu: Flag = False
    memory: Memory = 0


class WantedRun(StrictModel):
    """A run of a certificate; ``time_limit`` is in seconds from its first step.

    Data and model are named as ``affidavit train`` takes them; output is a folder below the
    one that the worker keeps runs in. Without ``reservation`` one is made.
    """

    certificate: Digest
    data: Reference
    model: Reference
    output: Annotated[str, StringConstraints(strict=True, pattern=OUTPUT)]
    reservation: Annotated[str, StringConstraints(strict=True, pattern=UUID)] | None = None
    queue: Name = "default"
    priority: Annotated[Integer, Field(ge=-100, le=100)] = 0
    requirements: Requirements = Requirements()
    time_limit: Annotated[Integer, Field(ge=1, le=31_536_000)] | None = None


class WantedCancellation(StrictModel):
    """Why a run is to be stopped."""

    reason: Comment = ""


class WantedClaim(StrictModel):
    """A run for a worker that has this; ``lease`` is in seconds."""

    worker: Name
    lease: Annotated[Integer, Field(ge=1, le=86_400)] = 60
    gpu: Flag = False
    memory: Memory = 0
    place: Name | None = None


class WantedStart(StrictModel):
    """The first step is about to be taken, of the plan with this digest.

    A worker that gives ``wants`` charges no step that it was not granted (``WantedHeartbeat``),
    so that another may go on with the run; ``place`` is the name of where its checkpoint is.
    """

    fence: Fence
    plan_digest: Digest
    wants: Steps | None = None
    place: Name | None = None


class WantedHeartbeat(StrictModel):
    """The run goes on, has charged so many steps, and wants to have charged ``wants`` at most.

    ``head`` is the digest of a line of its record that is on the disk.
    """

    fence: Fence
    steps: Steps
    wants: Steps = 0
    head: Digest | None = None


class WantedRecord(StrictModel):
    """A part of the run's record, counted from 1: whole lines."""

    fence: Fence
    part: Annotated[Integer, Field(ge=1, le=2**31 - 1)]
    lines: Annotated[str, StringConstraints(strict=True, min_length=1)]


class WantedCompletion(StrictModel):
    """What was run: a DSSE envelope with in-toto provenance."""

    fence: Fence
    provenance: dict[str, Any]


class WantedFailure(StrictModel):
    """The run cannot be begun or ended without a record that counts.

    With ``again`` another worker may go on with it.
    """

    fence: Fence
    code: Annotated[str, StringConstraints(strict=True, pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    message: Comment
    again: Flag = False


def read_run(raw: bytes) -> WantedRun:
    """The run that ``raw`` (JSON) asks for; raises ``MalformedRequest``."""
    return _read(WantedRun, raw, "a run")


def read_cancellation(raw: bytes) -> WantedCancellation:
    """The cancellation that ``raw`` asks for, ``{}`` if empty; raises ``MalformedRequest``."""
    return _read(WantedCancellation, raw or b"{}", "a cancellation")


def read_claim(raw: bytes) -> WantedClaim:
    """What a worker has; raises ``MalformedRequest``."""
    return _read(WantedClaim, raw, "a claim")


def read_start(raw: bytes) -> WantedStart:
    """A run's start; raises ``MalformedRequest``."""
    return _read(WantedStart, raw, "a start")


def read_heartbeat(raw: bytes) -> WantedHeartbeat:
    """A heartbeat; raises ``MalformedRequest``."""
    return _read(WantedHeartbeat, raw, "a heartbeat")


def read_record(raw: bytes) -> WantedRecord:
    """A part of a record; raises ``MalformedRequest``."""
    return read_wanted(
        WantedRecord, raw, "a part of a record", "docs/worker.md", MalformedRequest, MAX_JSON_BYTES
    )


def read_completion(raw: bytes) -> WantedCompletion:
    """A completion; raises ``MalformedRequest``."""
    return _read(WantedCompletion, raw, "a completion")


def read_failure(raw: bytes) -> WantedFailure:
    """A failure; raises ``MalformedRequest``."""
    return _read(WantedFailure, raw, "a failure")


def _read(model: type[Wanted], raw: bytes, what: str) -> Wanted:
    return read_wanted(model, raw, what, "docs/worker.md", MalformedRequest)
