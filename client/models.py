"""Typed models of the service's answers; the service builds them too.

Numbers are rounded outward: bounds of ε, δ and μ up, the rest of a budget down. A bound that is
null in JSON is infinite.

>>> RunCharge.model_validate_json('{"epsilon": null, "delta": 1e-5, "mu": null}').epsilon
inf
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    RootModel,
    WithJsonSchema,
)

DIGEST = r"^sha256:[0-9a-f]{64}$"

Unit = Literal["example", "user"]
Adjacency = Literal["add_remove", "replace_one", "zero_out"]
ReservationState = Literal["reserved", "committed", "settled", "released"]
RunState = Literal["queued", "claimed", "running", "settled", "failed", "cancelled"]
Count = Annotated[int, Field(ge=0)]
Identifier = Annotated[str, Field(pattern=DIGEST)]
Item = TypeVar("Item")


def is_none(value: object) -> bool:
    """Whether ``value`` is None, so that its field is omitted."""
    return value is None


def _infinite(value: object) -> object:
    return math.inf if value is None else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _milliseconds(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


Bound = Annotated[
    float,
    BeforeValidator(_infinite),
    PlainSerializer(_finite),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}]}),
]
"""A number, rounded outward; null in JSON if it is infinite."""
Instant = Annotated[
    datetime,
    PlainSerializer(_milliseconds),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""A time in UTC, to the millisecond."""


class ResponseModel(BaseModel):
    """Base of JSON answers; reads attributes, so that rows and dataclasses can be validated."""

    model_config = ConfigDict(
        frozen=True, from_attributes=True, json_schema_serialization_defaults_required=True
    )


class Page(ResponseModel, Generic[Item]):
    """One page of a list; ``next`` is the path of the following page, null on the last one."""

    items: list[Item]
    next: str | None = None


class Interval(ResponseModel):
    """A lower and an upper bound; ``upper`` is null if there is none."""

    lower: float
    upper: float | None


# ---- certificates -------------------------------------------------------------------


class Certification(ResponseModel):
    """The progress of a plan that takes longer to certify than a request.

    ``certificate`` is the id when it is ``done``, and ``problem`` (RFC 9457) the error if it
    ``failed``.
    """

    id: str
    state: Literal["running", "done", "failed"]
    certificate: Identifier | None
    problem: dict[str, Any] | None
    requested_at: Instant


# ---- policies, decisions and keysets ------------------------------------------------


class PolicyReference(ResponseModel):
    """A policy and its version."""

    name: str
    version: int = Field(ge=1)
    digest: Identifier


class PolicySummary(PolicyReference):
    """A version of a policy in a list; the built-in policy has no creator."""

    datasets: Literal["default"] | list[str]
    active: bool = Field(description="Whether it applies to new plans.")
    created_by: str | None
    created_at: datetime | None


class PolicyDocument(RootModel[dict[str, Any]]):
    """A policy, whose schema is that of the certificate room."""


class PolicyVersion(PolicySummary):
    """A version of a policy with its document and its signed statement."""

    policy: PolicyDocument
    envelope: dict[str, Any] | None = Field(
        description="The signed statement (DSSE); null for the built-in policy."
    )


REVOCATION_CODES = {
    "plan_error": "the plan does not describe the run",
    "accounting_error": "the guarantee is wrong",
    "run_error": "the run did not do what was certified",
    "data_withdrawn": "the data may no longer be used",
    "policy_violation": "the organisation's policies do not allow it",
    "key_compromise": "another party may have used the signing key",
    "other": "see the reason",
}
"""Codes of a revocation; they never change their meaning."""

RevocationCode = Annotated[
    Literal[
        "plan_error",
        "accounting_error",
        "run_error",
        "data_withdrawn",
        "policy_violation",
        "key_compromise",
        "other",
    ],
    Field(description="; ".join(f"`{code}`: {text}" for code, text in REVOCATION_CODES.items())),
]


class Revocation(ResponseModel):
    """A revocation of an issue and of every issue before it."""

    certificate_id: Identifier
    issue: int
    envelope_digest: Identifier
    code: RevocationCode
    reason: str
    revoked_by: str
    at: datetime


class PublishedKeyset(ResponseModel):
    """A version of the keyset, as published."""

    version: int = Field(ge=1)
    digest: str


# ---- ledgers ------------------------------------------------------------------------


class ScopedModel(ResponseModel):
    """A resource of one data set, privacy unit and adjacency."""

    dataset: str
    unit: Unit
    adjacency: Adjacency


class Budget(ResponseModel):
    """The budget in force."""

    version: Count
    epsilon: Bound
    delta: Bound


class Reading(ResponseModel):
    """The spending by one composition; ``decides`` is true if it admits or refuses runs."""

    epsilon: Bound
    delta: Bound
    decides: bool
    meaning: str


class Composition(ResponseModel):
    """ε of all runs, composed as if fixed in advance; null if no engine bounds it."""

    engine: str | None
    epsilon: Interval | None
    delta: Bound
    decides: bool = False
    meaning: str = (
        "What the same runs would cost had all of them been fixed in advance. Not a bound for "
        "plans that were chosen in view of results, and not decisive."
    )


class Spent(ResponseModel):
    """The spending, by two or three compositions."""

    filter: Reading
    sum: Reading
    composed: Annotated[Composition | None, Field(exclude_if=is_none)] = None


class Remaining(ResponseModel):
    """The budget that remains by the privacy filter, rounded down."""

    epsilon: Bound


class RunCharge(ResponseModel):
    """A cost as ε with δ, and as μ if it is one Gaussian mechanism."""

    epsilon: Bound
    delta: Bound
    mu: float | None


class LedgerSummary(ScopedModel):
    """A ledger without its entries and without figures that need accounting."""

    budget: Budget
    runs: Count
    exhausted: bool
    spent: Spent
    remaining: Remaining


class Grant(ResponseModel):
    """The access of a team to the data set of another: reserve, read the ledger, or nothing."""

    dataset: str
    team: str
    may: Literal["reserve", "read", "nothing"]
    reason: str
    granted_by: str
    at: Instant


class Proposal(ResponseModel):
    """A budget or grant that needs the same ``content`` from further administrators."""

    digest: Identifier
    kind: Literal["budget", "grant"]
    content: dict[str, str]
    proposers: list[str]
    reason: str
    at: Instant


class RecordedRequest(ResponseModel):
    """A request that takes effect once ``required`` people have sent the same by ``expires_at``."""

    code: Literal["second_person_needed"]
    detail: str
    agreed: Count
    required: Count
    expires_at: Instant


class StepCounts(ResponseModel):
    """Steps of a reservation's run; ``run`` is null until it is settled."""

    certified: Count
    run: int | None


class Reservation(ScopedModel):
    """A reservation, with its reserved and its current charge."""

    id: str
    certificate: Identifier
    issue: Count
    plan_digest: Identifier
    name: str | None
    state: ReservationState
    steps: StepCounts
    record: str | None
    admitted_by: Literal["filter", "alone"]
    reserved: RunCharge
    charged: RunCharge
    reserved_by: str
    reserved_at: datetime
    changed_at: datetime


class Forecast(ResponseModel):
    """How many more runs of a certificate the privacy filter admits."""

    certificate: Identifier
    runs: Count
    at_least: bool
    message: str
    cost: RunCharge


class Ledger(LedgerSummary):
    """A ledger with its entries, latest first; ``forecast`` only if it was requested."""

    entries: list[Reservation]
    entries_total: Count
    forecast: Annotated[Forecast | None, Field(exclude_if=is_none)] = None


# ---- runs ---------------------------------------------------------------------------


class RunRequirements(ResponseModel):
    """The resources of a run: GPUs on each of its hosts, and memory in MiB."""

    gpus: int
    hosts: int = 1
    memory: Count


class RunSteps(ResponseModel):
    """Steps of a run; ``charged`` is null until it has ended."""

    certified: Count
    granted: Count
    reported: Count
    charged: int | None


class Run(ResponseModel):
    """A run: the request, its worker, its progress and its outcome.

    ``refusal`` is the engine's reason for refusing the last job of a waiting run.
    """

    id: str
    state: RunState
    certificate: Identifier
    issue: Count
    plan_digest: Identifier
    reservation: str
    queue: str
    requirements: RunRequirements
    time_limit: int | None
    data: str
    model: str
    output: str
    worker: str | None
    claims: Count
    cancel_asked: bool
    steps: RunSteps
    code: str | None
    message: str | None
    refusal: str | None = None
    record: str | None
    provenance: dict[str, Any] | None
    requested_by: str
    requested_at: Instant
    changed_at: Instant


class RunTest(ResponseModel):
    """What a replay, or an audit of canaries, showed of a run, as ``added_by`` declares.

    ``digest`` is that of its record.
    """

    run_id: str
    kind: Literal["replay", "audit"]
    digest: Identifier
    verdict: Literal["not_refuted", "refuted", "undecided"]
    added_by: str
    added_at: Instant


class RunEvent(ResponseModel):
    """The data of a server-sent event `state`."""

    seq: Count
    event: str
    state: RunState
    at: Instant
    code: str | None = None
    message: str | None = None
    worker: str | None = None
    fence: int | None = None
    steps_charged: int | None = None
    record: str | None = None


class StepsSpent(ResponseModel):
    """ε at the certificate's δ, rounded up, of ``steps`` steps: at least those reported."""

    steps: Count
    epsilon: Bound
    delta: Bound


class RunProgress(ResponseModel):
    """The data of a server-sent event `progress`; ``spent`` is null until it is known."""

    steps: Count
    certified: Count
    spent: StepsSpent | None
