"""The plan document, schema version 1.

A plan states everything that can change the privacy guarantee of a training run. Its classes
are frozen and valid at construction. Structure and ranges are validated here, field by field.
``Plan`` (``affidavit.plan.parse``) also requires that the fields agree, as validated by
``affidavit.plan.validators``. Unknown fields are refused, and neither booleans nor strings count
as numbers. An integer may be written ``1``, ``1.0`` or ``1e0``.

Units: ε in nats, δ a probability, clip norms in l2, ``noise_std`` absolute and on the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from affidavit.plan.additional_releases import ExtraEvent
from affidavit.plan.claim import GivenClaim
from affidavit.plan.diagnostics import pointer_to
from affidavit.plan.extensions import Noise
from affidavit.plan.optimizer import Optimizer
from affidavit.plan.strategies import Independent, Participation, Workload
from affidavit.plan.types import (
    Integer,
    Name,
    Positive,
    Probability,
    Real,
    StrictModel,
    Text,
    max_items,
)

Adjacency = Literal["add_remove", "replace_one", "zero_out"]
PrivacyUnit = Literal["example", "user"]
Allocation = Literal["uniform", "proportional", "optimal"]
Scheme = Literal[
    "poisson",
    "truncated_poisson",
    "fixed_size",
    "balls_in_bins",
    "shuffled",
    "cyclic",
    "cyclic_poisson",
    "b_min_sep",
    "full_batch",
]


FRESH_LOTS = frozenset({"poisson", "truncated_poisson", "fixed_size"})
"""Schemes that draw every lot afresh, so that a record may take part in any steps."""
FIXED_ORDER = frozenset({"shuffled", "cyclic"})
"""Schemes in which every record takes part once per epoch, at its place in an order."""
ONE_LOT_PER_EPOCH = FIXED_ORDER | {"balls_in_bins"}
"""Schemes in which every record is in exactly one lot of each epoch."""
SOLVABLE_LOT_SIZE = frozenset({"poisson", "fixed_size"})
"""Schemes for which ``lot_size: null`` asks for the largest lot that meets the target."""
BY_PROBABILITY = frozenset({"poisson", "truncated_poisson"})
"""Schemes that may be given by a sampling probability instead of a lot size."""
REQUIRED_FIELDS = {
    "truncated_poisson": "max_lot_size",
    "cyclic_poisson": "groups",
    "b_min_sep": "separation",
}
"""The field of ``sampling`` that a scheme requires and no other scheme takes."""


class Dataset(StrictModel):
    """The data set: its name, its size in records, and the privacy unit.

    ``contributions_per_user`` is the largest number of records of one user, for user-level privacy.
    """

    name: Name | None = None
    size: Annotated[Integer, Field(ge=1)] | None = None
    unit: PrivacyUnit = "example"
    contributions_per_user: Annotated[Integer, Field(ge=1)] | None = None

    @property
    def records_per_unit(self) -> int:
        """The largest number of records of one privacy unit."""
        return self.contributions_per_user or 1


class Sampling(StrictModel):
    """How the lot of each step is drawn.

    Lot sizes are in records; the scheme decides whether ``lot_size`` is expected or fixed.
    ``probability`` is the probability that one record enters one lot. ``groups`` is the number of
    groups of ``cyclic_poisson``, and ``separation`` is b of ``b_min_sep``, in steps.
    """

    scheme: Scheme
    lot_size: Annotated[Integer, Field(ge=1)] | None = None
    probability: Annotated[Real, Field(gt=0, le=1)] | None = None
    max_lot_size: Annotated[Integer, Field(ge=1)] | None = None
    groups: Annotated[Integer, Field(ge=1)] | None = None
    separation: Annotated[Integer, Field(ge=1)] | None = None
    bins_drawn: Literal["once", "each_epoch"] | None = None

    def is_null(self, field: Literal["lot_size", "probability"]) -> bool:
        """Whether ``field`` is null, which solves for it, and the other one is not given."""
        provided = self.lot_size is not None or self.probability is not None
        return not provided and field in self.model_fields_set


class Release(StrictModel):
    """``count`` blocks of one step, each clipped to ``clip_norm`` and noised.

    ``noise_multiplier`` is the noise standard deviation over the clip norm, on the sum;
    ``noise_std`` is the standard deviation itself. ``dimension`` is the number of entries of one
    block (for ``allocation: optimal``) and ``weight`` its relative noise (for ``proportional``).
    """

    name: Name
    count: Annotated[Integer, Field(ge=1, le=1_000_000)] = 1
    clip_norm: Positive
    noise_multiplier: Positive | None = None
    noise_std: Positive | None = None
    dimension: Annotated[Integer, Field(ge=1)] | None = None
    weight: Positive | None = None

    @property
    def has_noise(self) -> bool:
        """Whether the plan gives the noise of this release."""
        return self.noise_multiplier is not None or self.noise_std is not None


class AuditCanaries(StrictModel):
    """``count`` artificial records of the data set, for an audit of the run.

    A fair coin decides whether each one takes part. After the run, the audit guesses the coins of
    ``guesses`` canaries, an even number; the default is a third of them.
    """

    count: Annotated[Integer, Field(ge=2, le=1_000_000)]
    guesses: Annotated[Integer, Field(ge=2)] | None = None


class Target(StrictModel):
    """The privacy target: ε in nats at probability δ. Either one may be solved for."""

    epsilon: Positive | None = None
    delta: Probability | None = None


class LargeDelta(StrictModel):
    """The reason why this plan may claim a δ of 1/N or more."""

    reason: Annotated[Text, Field(min_length=1)]


def _wrap_reason(value: Any) -> Any:
    return {"reason": value} if isinstance(value, str) else value


ClipSchedule = Annotated[
    tuple[Positive, ...], Field(min_length=1, fail_fast=True), max_items(1_000_000)
]


class Phase(StrictModel):
    """A part of the training with one sampler, one set of releases and one kind of noise.

    ``clip_schedule`` has one factor per step, which multiplies every clip norm. The noise does not
    follow it.
    """

    sampling: Sampling
    steps: Annotated[Integer, Field(ge=1)] | None = None
    epochs: Positive | None = None
    releases: Annotated[
        tuple[Release, ...], Field(min_length=1, max_length=10_000), max_items(10_000)
    ]
    clipping: Literal["per_block", "flat"] = "per_block"
    noise: Noise = Independent()
    participation: Participation | None = None
    clip_schedule: ClipSchedule | None = None

    @property
    def asks_for_noise(self) -> bool:
        """Whether the noise of a release is to be solved for."""
        return any(not release.has_noise for release in self.releases)

    @property
    def has_exact_noise(self) -> bool:
        """Whether noisy sums are rounded to a grid exactly (``Independent.arithmetic``)."""
        return isinstance(self.noise, Independent) and self.noise.arithmetic is not None

    @property
    def asks_for_steps(self) -> bool:
        """Whether the number of steps is to be solved for."""
        return self.steps is None and self.epochs is None

    @property
    def asks_for_lot_size(self) -> bool:
        """Whether the phase gives ``lot_size: null`` and no probability."""
        return self.sampling.scheme in SOLVABLE_LOT_SIZE and self.sampling.is_null("lot_size")

    @property
    def asks_for_probability(self) -> bool:
        """Whether the phase gives ``probability: null`` and no lot size."""
        return self.sampling.scheme == "poisson" and self.sampling.is_null("probability")


PHASE_FIELDS = frozenset(Phase.model_fields)


def with_phases(document: dict[str, Any]) -> dict[str, Any]:
    """Return the plan ``document`` in the form with ``phases``."""
    if "phases" in document:
        return document
    phase = {key: value for key, value in document.items() if key in PHASE_FIELDS}
    rest = {key: value for key, value in document.items() if key not in PHASE_FIELDS}
    return {**rest, "phases": [phase]}


class PlanDocument(StrictModel):
    """The fields of a plan, each valid by itself.

    A missing quantity is an error. A quantity that is null is solved for: the largest one that
    meets the target. Noise is solved for where it is left out.
    """

    version: Integer
    name: Name | None = None
    notes: Text | None = None
    dataset: Dataset = Dataset()
    adjacency: Adjacency
    phases: Annotated[
        tuple[Phase, ...], Field(min_length=1, max_length=1000, fail_fast=True), max_items(1000)
    ]
    allocation: Allocation = "uniform"
    optimizer: Optimizer = Optimizer()
    workload: Workload | None = None
    canaries: AuditCanaries | None = None
    extra: Annotated[tuple[ExtraEvent, ...], Field(max_length=1000), max_items(1000)] = ()
    trajectory: Literal["all_iterates"] = "all_iterates"
    target: Target
    allow_large_delta: Annotated[LargeDelta, BeforeValidator(_wrap_reason)] | None = None
    claim: GivenClaim | None = None

    @model_validator(mode="before")
    @classmethod
    def _move_into_phases(cls, document: Any) -> Any:
        return with_phases(document) if isinstance(document, dict) else document

    def pointer(self, phase: int, *tokens: str | int) -> str:
        """Return the JSON pointer to a field of a phase; a single phase stands at the top level."""
        prefix = ("phases", phase) if len(self.phases) > 1 else ()
        return pointer_to(*prefix, *tokens)

    def with_noise_multipliers(self, multiplier: Callable[[int, Release], float | None]) -> Self:
        """Return the plan with new noise multipliers.

        ``multiplier`` receives the index of the phase and the release, and returns None to leave
        the release unchanged.
        """
        phases = []
        for index, phase in enumerate(self.phases):
            releases = (
                release
                if (sigma := multiplier(index, release)) is None
                else release.model_copy(update={"noise_multiplier": sigma, "noise_std": None})
                for release in phase.releases
            )
            phases.append(phase.model_copy(update={"releases": tuple(releases)}))
        return self.model_copy(update={"phases": tuple(phases)})

    @property
    def asks_for_noise(self) -> bool:
        """Whether the noise of any release is to be solved for."""
        return any(phase.asks_for_noise for phase in self.phases)

    @property
    def asks_for_steps(self) -> bool:
        """Whether the plan gives ``steps: null``: the most steps that meet the target."""
        return any(phase.asks_for_steps for phase in self.phases)

    @property
    def asks_for_lot_size(self) -> bool:
        """Whether the plan gives ``lot_size: null``: the largest lot that meets the target."""
        return any(phase.asks_for_lot_size for phase in self.phases)

    @property
    def asks_for_probability(self) -> bool:
        """Whether the plan gives ``probability: null``: the largest q that meets the target."""
        return any(phase.asks_for_probability for phase in self.phases)

    @property
    def is_open(self) -> bool:
        """Whether any quantity of the plan is to be solved for."""
        return (
            self.asks_for_noise
            or self.asks_for_steps
            or self.asks_for_lot_size
            or self.asks_for_probability
        )
