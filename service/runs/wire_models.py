r"""Wire models of runs: requests of people and workers, and responses.

>>> HeartbeatRequest.from_data({"fence": 1, "secret": 64 * "0", "steps": 7}).steps
7
>>> RunRequest.from_data({"certificate": "x"})
Traceback (most recent call last):
affidavit.service.core.errors.MalformedRequest: ...
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import BeforeValidator, Field, StringConstraints

from affidavit.client import Run
from affidavit.evidence import MAX_CANARIES, ReplayRecord, read_choices
from affidavit.plan import MAX_JSON_BYTES, Integer, Name, StrictModel
from affidavit.service.core.wire_models import (
    UUID,
    Comment,
    Digest,
    RequestModel,
)
from affidavit.worker import Fence, Output, Reference, Secret, Steps
from affidavit.worker import RunId as AnyRun

RunId = Annotated[str, Path(pattern=UUID, description="The run's `id`.")]


# ---- requests ------------------------------------------------------------------------


class RunRequestModel(RequestModel):
    """Base of requests about runs."""


class Requirements(StrictModel):
    """The resources of a run: GPUs on each of its hosts, and memory in MiB (0: engine's default).

    Several hosts require Ray.
    """

    gpus: Annotated[Integer, Field(ge=0, le=1024)] = 0
    hosts: Annotated[Integer, Field(ge=1, le=1024)] = 1
    memory: Steps = 0


class SearchRequest(StrictModel):
    """The choices of a search's trials, and the public data that compares them."""

    choices: Annotated[
        dict[str, list[str | float]],
        BeforeValidator(lambda value: {name: list(of) for name, of in read_choices(value).items()}),
    ]
    score: Reference


class RunRequest(RunRequestModel):
    """A run of a certificate; ``time_limit`` is in seconds from its first step.

    Data and model are named as for ``affidavit train``; output is a folder below the worker's
    output folder. Without ``reservation`` one is created. ``search`` is for a
    certificate that repeats the run and selects.
    """

    noun = "a run"
    certificate: Digest
    data: Reference
    model: Reference
    output: Output
    reservation: AnyRun | None = None
    queue: Name = "default"
    requirements: Requirements = Requirements()
    time_limit: Annotated[Integer, Field(ge=1, le=31_536_000)] | None = None
    search: SearchRequest | None = None


class CancelRequest(RunRequestModel):
    """The reason of a cancellation."""

    noun = "a cancellation"
    reason: Comment = ""


class ReplayRequest(RunRequestModel, ReplayRecord):
    """What a replay of the training script on the run's plan showed, as `affidavit replay` says."""

    noun = "a replay record"
    guide = "/docs/reference/replay-record"
    max_bytes = MAX_JSON_BYTES


class CanariesModel(StrictModel):
    """The file of canaries that the run left."""

    version: Literal[1]
    nonce: Annotated[str, StringConstraints(strict=True, pattern="^[0-9a-f]{64}$")]
    count: Annotated[Integer, Field(ge=2, le=MAX_CANARIES)]
    guesses: Annotated[Integer, Field(ge=2, le=MAX_CANARIES)]


class AuditRequest(RunRequestModel):
    """The canaries of a run that ended, and the loss of the trained model on each, in order."""

    noun = "an audit"
    max_bytes = MAX_JSON_BYTES
    canaries: CanariesModel
    losses: Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(min_length=2)]


class RunClaimRequest(RunRequestModel):
    """A claim of the oldest run of the queue, or of ``run``; ``lease`` is in seconds."""

    noun = "a claim"
    worker: Name
    lease: Annotated[Integer, Field(ge=1, le=86_400)] = 60
    run: AnyRun | None = None


class FencedRequest(RunRequestModel):
    """A report about a run under the fencing token and the secret of its claim."""

    fence: Fence
    secret: Secret


class StartRequest(FencedRequest):
    """The run begins its first step, of the plan with this digest.

    A worker that sends ``wants`` charges only granted steps (``HeartbeatRequest``), so that another
    worker may continue the run.
    """

    noun = "a start"
    plan_digest: Digest
    wants: Steps | None = None


class HeartbeatRequest(FencedRequest):
    """Steps charged so far, and ``wants``: the last step to charge before the next heartbeat.

    ``head`` is the digest of a line of the run's record that is stored on disk.
    """

    noun = "a heartbeat"
    steps: Steps
    wants: Steps = 0
    head: Digest | None = None


class RecordPartRequest(FencedRequest):
    """A part of the run's record, numbered from 1: whole lines."""

    noun = "a part of a record"
    max_bytes = MAX_JSON_BYTES
    part: Fence
    lines: Annotated[str, StringConstraints(strict=True, min_length=1)]


class CompletionRequest(FencedRequest):
    """The completed run: a DSSE envelope with in-toto provenance."""

    noun = "a completion"
    provenance: dict[str, Any]


class FailureRequest(FencedRequest):
    """The reason why the run cannot begin, or cannot end with a valid record.

    With ``again``, another worker may continue the run.
    """

    noun = "a failure"
    code: Annotated[str, StringConstraints(strict=True, pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    message: Comment
    again: Annotated[bool, Field(strict=True)] = False


# ---- responses -----------------------------------------------------------------------


class StartedRun(Run):
    """A run that has begun; ``search`` is the secret opening of a search."""

    search: dict[str, Any] | None
