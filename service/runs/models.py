r"""Wire models of runs: what people and workers send, and the responses.

>>> body = b'{"fence": 1, "secret": "' + 64 * b"0" + b'", "steps": 7}'
>>> HeartbeatRequest.from_json(body).steps
7
>>> RunRequest.from_json(b'{"certificate": "x"}')
Traceback (most recent call last):
affidavit.service.errors.MalformedRequest: ...
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from fastapi import Path as PathParameter
from pydantic import BeforeValidator, Field, StringConstraints

from affidavit.certificate import read_choices
from affidavit.client import Count, Identifier, ResponseModel, Run, RunEvent
from affidavit.plan import MAX_JSON_BYTES, Integer, Name, StrictModel
from affidavit.service.models import UUID, Comment, Digest, RequestModel
from affidavit.service.runs.repository import StoredRun, StoredRunEvent
from affidavit.worker import TEXTS

REFERENCE = f"^{TEXTS['data'].pattern}$"
OUTPUT = f"^{TEXTS['output'].pattern}$"
SECRET = f"^{TEXTS['secret'].pattern}$"

RunId = Annotated[str, PathParameter(pattern=UUID, description="The run's `id`.")]
Reference = Annotated[str, StringConstraints(strict=True, pattern=REFERENCE)]
Memory = Annotated[Integer, Field(ge=0, le=2**31 - 1)]
Fence = Annotated[Integer, Field(ge=1, le=2**31 - 1)]
Steps = Annotated[Integer, Field(ge=0, le=2**31 - 1)]
Flag = Annotated[bool, Field(strict=True)]


# ---- requests ------------------------------------------------------------------------


class RunRequestModel(RequestModel):
    """Base of what people and workers send about runs."""

    guide = "docs/worker.md"


def _choices(value: Any) -> Any:
    """Raises ``ValueError``."""
    return {name: list(values) for name, values in read_choices(value).items()}


class Requirements(StrictModel):
    """What an engine gives the run; memory in MiB, 0 for the engine's default."""

    gpus: Annotated[Integer, Field(ge=0, le=1024)] = 0
    memory: Memory = 0


class SearchRequest(StrictModel):
    """What trials of a search try, and the public data that they are compared on."""

    choices: Annotated[dict[str, list[str | float]], BeforeValidator(_choices)]
    score: Reference


class RunRequest(RunRequestModel):
    """A run of a certificate; ``time_limit`` is in seconds from its first step.

    Data and model are named as ``affidavit train`` takes them; output is a folder below the
    one that the worker keeps runs in. Without ``reservation`` one is made. ``search`` is for a
    certificate that repeats the run and selects.
    """

    noun = "a run"
    certificate: Digest
    data: Reference
    model: Reference
    output: Annotated[str, StringConstraints(strict=True, pattern=OUTPUT)]
    reservation: Annotated[str, StringConstraints(strict=True, pattern=UUID)] | None = None
    queue: Name = "default"
    requirements: Requirements = Requirements()
    time_limit: Annotated[Integer, Field(ge=1, le=31_536_000)] | None = None
    search: SearchRequest | None = None


class CancelRequest(RunRequestModel):
    """Why a run is to be stopped."""

    noun = "a cancellation"
    reason: Comment = ""


class RunClaimRequest(RunRequestModel):
    """Who claims the oldest run of the queue, or ``run``; ``lease`` is in seconds."""

    noun = "a claim"
    worker: Name
    lease: Annotated[Integer, Field(ge=1, le=86_400)] = 60
    run: Annotated[str, StringConstraints(strict=True, pattern=UUID)] | None = None


class FencedRequest(RunRequestModel):
    """A report about a run under the fencing token and the secret of its claim."""

    fence: Fence
    secret: Annotated[str, StringConstraints(strict=True, pattern=SECRET)]


class StartRequest(FencedRequest):
    """The first step is about to be taken, of the plan with this digest.

    A worker that gives ``wants`` charges no step that it was not granted (``HeartbeatRequest``),
    so that another may continue the run.
    """

    noun = "a start"
    plan_digest: Digest
    wants: Steps | None = None


class HeartbeatRequest(FencedRequest):
    """Steps charged so far, and ``wants``: how many to charge at most until the next heartbeat.

    ``head`` is the digest of a line of the run's record that is on the disk.
    """

    noun = "a heartbeat"
    steps: Steps
    wants: Steps = 0
    head: Digest | None = None


class RecordPartRequest(FencedRequest):
    """A part of the run's record, counted from 1: whole lines."""

    noun = "a part of a record"
    max_bytes = MAX_JSON_BYTES
    part: Annotated[Integer, Field(ge=1, le=2**31 - 1)]
    lines: Annotated[str, StringConstraints(strict=True, min_length=1)]


class CompletionRequest(FencedRequest):
    """What was run: a DSSE envelope with in-toto provenance."""

    noun = "a completion"
    provenance: dict[str, Any]


class FailureRequest(FencedRequest):
    """Why the run cannot begin, or end with a record that counts.

    With ``again`` another worker may continue it.
    """

    noun = "a failure"
    code: Annotated[str, StringConstraints(strict=True, pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    message: Comment
    again: Flag = False


# ---- responses -----------------------------------------------------------------------


def run_of(run: StoredRun) -> Run:
    """The response for ``run``."""
    outcome = run.outcome or {}
    return Run.model_validate(
        {
            "id": run.id,
            "state": run.state,
            "certificate": run.certificate_id,
            "issue": run.issue,
            "plan_digest": run.plan_digest,
            "reservation": run.reservation_id,
            "queue": run.queue,
            "requirements": run.requirements,
            **{name: run.wanted[name] for name in ("time_limit", "data", "model", "output")},
            "worker": run.worker,
            "claims": run.fence,
            "cancel_asked": run.cancel_asked,
            "steps": {
                "certified": run.certified_steps,
                "granted": run.granted,
                "reported": run.steps,
                "charged": outcome.get("steps_charged"),
            },
            **{name: outcome.get(name) for name in ("code", "message", "record", "provenance")},
            "requested_by": run.requested_by,
            "requested_at": run.requested_at,
            "changed_at": run.changed_at,
        }
    )


def event_of(event: StoredRunEvent, state: str) -> RunEvent:
    """``event``, and the state of the run after it."""
    optional = ("code", "message", "worker", "fence", "steps_charged", "record")
    facts = {"seq": event.seq, "event": event.kind, "state": state, "at": event.at}
    return RunEvent.model_validate({**facts, **{name: event.body.get(name) for name in optional}})


class Job(ResponseModel):
    """A claimed run, as its worker needs it."""

    run: str
    fence: Count
    secret: Annotated[str, Field(pattern=SECRET)]
    certificate: Identifier
    plan_digest: Identifier
    granted: Count
    previous: int | None
    data: str
    model: str
    output: str
    time_limit: int | None

    @classmethod
    def of(cls, run: StoredRun, secret: str) -> Self:
        """The job of a ``run`` that was claimed with that secret."""
        return cls(
            run=run.id,
            fence=run.fence,
            secret=secret,
            certificate=run.certificate_id,
            plan_digest=run.plan_digest,
            granted=run.granted,
            previous=run.previous,
            **{name: run.wanted[name] for name in ("data", "model", "output", "time_limit")},
        )


class StartedRun(Run):
    """A run that has begun; ``search`` is the secret opening of one that is a search."""

    search: dict[str, Any] | None

    @classmethod
    def of(cls, run: StoredRun) -> Self:
        """The response to the worker of ``run``."""
        opening = None if run.search is None else run.search.as_document()
        return cls(**run_of(run).model_dump(), search=opening)


class RenewedLease(ResponseModel):
    """Whether the worker should stop the run, and the steps that it may charge."""

    cancel: bool
    granted: Count


class RecordPart(ResponseModel):
    """The part of a record that was stored."""

    part: Count
