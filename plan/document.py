"""The plan document, schema version 1.

A plan says everything that can change the privacy guarantee of a training run. Its
classes are frozen and valid at construction: structure and ranges are checked field by
field here; ``Plan`` (``affidavit.plan.parse``) is a ``PlanDocument`` whose fields agree, as
``affidavit.plan.validators`` checks. Unknown fields are refused, booleans are not numbers, and
strings are not numbers; an integer may be written ``1``, ``1.0`` or ``1e0``, because these are
one number.

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


FRESH_LOTS = frozenset({"poisson", "fixed_size"})
"""Schemes of which the largest lot size that fits can be asked: fresh lots, drawn alike."""


class Dataset(StrictModel):
    """The data set by name and size, in records; ``unit`` is what one record protects.

    ``contributions_per_user`` is the most records of one user, where the unit is a user.
    """

    name: Name | None = None
    size: Annotated[Integer, Field(ge=1)] | None = None
    unit: PrivacyUnit = "example"
    contributions_per_user: Annotated[Integer, Field(ge=1)] | None = None

    @property
    def records_per_unit(self) -> int:
        """The most records that one unit of privacy has."""
        return self.contributions_per_user or 1


class Sampling(StrictModel):
    """How each step's lot is drawn; ``lot_size`` is expected or fixed, by the scheme.

    Both lot sizes are in records. ``probability`` is that of one record at one step, and
    ``groups`` are the groups of ``cyclic_poisson``, and ``separation`` is the b of ``b_min_sep``.
    """

    scheme: Scheme
    lot_size: Annotated[Integer, Field(ge=1)] | None = None
    probability: Annotated[Real, Field(gt=0, le=1)] | None = None
    max_lot_size: Annotated[Integer, Field(ge=1)] | None = None
    groups: Annotated[Integer, Field(ge=1)] | None = None
    separation: Annotated[Integer, Field(ge=1)] | None = None
    bins_drawn: Literal["once", "each_epoch"] | None = None

    def is_null(self, field: Literal["lot_size", "probability"]) -> bool:
        """Whether ``field`` is written as null, which asks for it, and the other is not given."""
        provided = self.lot_size is not None or self.probability is not None
        return not provided and field in self.model_fields_set


class Release(StrictModel):
    """``count`` blocks of one step, each clipped to ``clip_norm`` and noised.

    ``noise_multiplier`` is the noise standard deviation over the clip norm, on the sum;
    ``noise_std`` is that standard deviation itself. ``dimension`` is the number of
    entries of one block and ``weight`` its share, for the allocations that ask for them.
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
        """Whether the plan gives this release's noise."""
        return self.noise_multiplier is not None or self.noise_std is not None


class AuditCanaries(StrictModel):
    """``count`` made-up records among those of the data set, for an audit of the run.

    A fair coin decides of each whether it takes part. ``guesses`` of them, an even number, are
    guessed about when the run is over; a third unless it is given.
    """

    count: Annotated[Integer, Field(ge=2, le=1_000_000)]
    guesses: Annotated[Integer, Field(ge=2)] | None = None


class Target(StrictModel):
    """What the run must reach: ε in nats at probability δ; either may be asked for."""

    epsilon: Positive | None = None
    delta: Probability | None = None


class LargeDelta(StrictModel):
    """Why this plan may claim a δ of 1/N or more."""

    reason: Annotated[Text, Field(min_length=1)]


def _reason_in_words(value: Any) -> Any:
    return {"reason": value} if isinstance(value, str) else value


ClipSchedule = Annotated[
    tuple[Positive, ...], Field(min_length=1, fail_fast=True), max_items(1_000_000)
]


class Phase(StrictModel):
    """A stretch of training with one sampler, one set of releases and one kind of noise.

    ``clip_schedule`` has a factor a step on every clip norm; the noise stays that of the
    clip norm itself.
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
        """Whether a release leaves its noise to be solved for."""
        return any(not release.has_noise for release in self.releases)

    @property
    def has_exact_noise(self) -> bool:
        """Whether noisy sums are rounded to a grid, exactly (``Independent.arithmetic``)."""
        return isinstance(self.noise, Independent) and self.noise.arithmetic is not None

    @property
    def asks_for_steps(self) -> bool:
        """Whether the length is left to be solved for."""
        return self.steps is None and self.epochs is None

    @property
    def asks_for_lot_size(self) -> bool:
        """Whether the phase says ``lot_size: null`` and no probability."""
        return self.sampling.scheme in FRESH_LOTS and self.sampling.is_null("lot_size")

    @property
    def asks_for_probability(self) -> bool:
        """Whether the phase says ``probability: null`` and no lot size."""
        return self.sampling.scheme == "poisson" and self.sampling.is_null("probability")


PHASE_FIELDS = frozenset(Phase.model_fields)


def with_phases(document: dict[str, Any]) -> dict[str, Any]:
    """A plan's ``document`` in the form with phases; one that has them is returned as it is."""
    if "phases" in document:
        return document
    phase = {key: value for key, value in document.items() if key in PHASE_FIELDS}
    rest = {key: value for key, value in document.items() if key not in PHASE_FIELDS}
    return {**rest, "phases": [phase]}


class PlanDocument(StrictModel):
    """The fields of a plan, each valid by itself.

    A quantity that is left out is a mistake; one that is written as null is a question, the
    most of it that fits the target. Noise is asked for by leaving it out.
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
    allow_large_delta: Annotated[LargeDelta, BeforeValidator(_reason_in_words)] | None = None
    claim: GivenClaim | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_phase_at_the_top(cls, document: Any) -> Any:
        return with_phases(document) if isinstance(document, dict) else document

    def pointer(self, phase: int, *tokens: str | int) -> str:
        """JSON pointer to a field of a phase, which stands at the top when it is alone."""
        prefix = ("phases", phase) if len(self.phases) > 1 else ()
        return pointer_to(*prefix, *tokens)

    def with_noise_multipliers(self, multiplier: Callable[[int, Release], float | None]) -> Self:
        """This, each release with what ``multiplier`` says of its phase's number and itself.

        One of which it says None stays as it is.
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
        """Whether any release leaves its noise to be solved for."""
        return any(phase.asks_for_noise for phase in self.phases)

    @property
    def asks_for_steps(self) -> bool:
        """Whether the plan says ``steps: null``: the most steps that fit the target."""
        return any(phase.asks_for_steps for phase in self.phases)

    @property
    def asks_for_lot_size(self) -> bool:
        """Whether the plan says ``lot_size: null``: the largest lot that fits the target."""
        return any(phase.asks_for_lot_size for phase in self.phases)

    @property
    def asks_for_probability(self) -> bool:
        """Whether the plan says ``probability: null``: the largest q that fits the target."""
        return any(phase.asks_for_probability for phase in self.phases)

    @property
    def is_open(self) -> bool:
        """Whether the plan leaves something to be solved for."""
        return (
            self.asks_for_noise
            or self.asks_for_steps
            or self.asks_for_lot_size
            or self.asks_for_probability
        )
