"""The plan document, schema version 1.

A plan states everything that can change the privacy guarantee of a training run. Its classes
are frozen and valid at construction. Structure and ranges are validated here, field by field.
``Plan`` (``affidavit.plan.parse``) also requires that the fields agree, as validated by
``affidavit.plan.validators``. Unknown fields are refused, and neither booleans nor strings count
as numbers. An integer may be written ``1``, ``1.0`` or ``1e0``.

Units: ε in nats, δ a probability, clip norms in l2, ``noise_std`` absolute and on the sum.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from affidavit.plan.diagnostics import pointer_to
from affidavit.plan.noise import Noise
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
from affidavit.plan.vocabulary import SOLVABLE_LOT_SIZE, Adjacency, Allocation, PrivacyUnit, Scheme

# Accounted releases of a plan besides its training steps. References: Andrew, Thakkar, McMahan and
# Ramaswamy, arXiv:1905.03871 (quantiles); Papernot and Steinke, arXiv:2110.03620 (selections).

Distribution = Literal["poisson", "geometric", "logarithmic", "truncated_negative_binomial"]


class Metric(StrictModel):
    """A Gaussian mechanism that is released ``count`` times.

    ``noise_multiplier`` is the standard deviation of its noise over its sensitivity under the
    plan's adjacency. With ``sampling_probability``, each release reads a fresh Poisson sample,
    independent of the lots of training.
    """

    kind: Literal["gaussian"]
    name: Name
    noise_multiplier: Positive
    count: Annotated[Integer, Field(ge=1)] = 1
    sampling_probability: Annotated[Real, Field(gt=0, le=1)] | None = None
    each_repetition: Annotated[bool, Field(strict=True)] | None = None


class LaplaceMetric(StrictModel):
    """A Laplace mechanism that is released ``count`` times.

    ``noise_multiplier`` is the scale of its noise over its l1 sensitivity under the plan's
    adjacency.
    """

    kind: Literal["laplace"]
    name: Name
    noise_multiplier: Positive
    count: Annotated[Integer, Field(ge=1)] = 1
    each_repetition: Annotated[bool, Field(strict=True)] | None = None


class ClippingQuantile(StrictModel):
    """The number of records below the clip norm in the lot of each step, with noise.

    Each record of the lot adds +1/2 if its norm is at most the clip norm and -1/2 if not.
    ``noise_std`` is σ_b, the standard deviation of the noise on this sum. ``quantile`` and
    ``learning_rate`` control the next clip norm and are post-processing. Every step releases
    ``count`` such sums, one per adapted clip norm.
    """

    kind: Literal["adaptive_clipping_quantile"]
    name: Name
    noise_std: Positive
    count: Annotated[Integer, Field(ge=1, le=1_000_000)] = 1
    quantile: Annotated[Real, Field(ge=0, le=1)] | None = None
    learning_rate: Positive | None = None


class Selection(StrictModel):
    """A run that is repeated K times, of which only the best is released.

    K has the given ``distribution`` and ``mean``, the mean number of runs. ``shape`` is η of the
    truncated negative binomial: 1 is geometric, 0 logarithmic, and Poisson is its limit.
    """

    kind: Literal["repeat_and_select"]
    name: Name
    distribution: Distribution
    mean: Annotated[Real, Field(ge=1, le=1e6)]
    shape: Annotated[Real, Field(ge=0, le=1e6)] | None = None


ExtraEvent = Annotated[
    Metric | LaplaceMetric | ClippingQuantile | Selection, Field(discriminator="kind")
]


# A claim is the number that a plan is reported to reach, with the digits in which it was published:
# "7.98" and "7.9800" have different precision, so a claim may be text. It changes no guarantee.

MIN_CLAIM, MAX_CLAIM = 1e-9, 1e9
"""Range of a claimed ε, in nats, and of a claimed noise multiplier."""
CLAIM_PATTERN = r"^[0-9]{1,12}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?$"
"""A published decimal: digits, an optional fraction and an optional exponent."""
_RULE = "a claim is a positive decimal, like 7.9852"


def _validate_decimal(value: Any) -> float | str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise PydanticCustomError("decimal_type", _RULE)
    if isinstance(value, str) and not re.fullmatch(CLAIM_PATTERN, value, re.ASCII):
        raise PydanticCustomError("decimal_form", _RULE)
    if not MIN_CLAIM <= (float(value) if isinstance(value, str) else value) <= MAX_CLAIM:
        raise PydanticCustomError(
            "out_of_range", f"a claim must lie between {MIN_CLAIM:g} and {MAX_CLAIM:g}"
        )
    return value if isinstance(value, str) else float(value)


Claimed = Annotated[
    float | str,
    PlainValidator(
        _validate_decimal,
        json_schema_input_type=Annotated[float, Field(ge=MIN_CLAIM, le=MAX_CLAIM)]
        | Annotated[str, StringConstraints(pattern=CLAIM_PATTERN)],
    ),
]
"""A positive decimal, as a number or as published text."""


class Claim(StrictModel):
    """A claimed ``epsilon``, in nats at the target's δ, or a claimed ``noise_multiplier``.

    The claimed noise multiplier is that of every block, and is claimed to meet the plan's target.
    """

    epsilon: Claimed | None = None
    noise_multiplier: Claimed | None = None

    @property
    def text(self) -> str:
        """The claimed number as published."""
        provided = self.epsilon if self.epsilon is not None else self.noise_multiplier
        return provided if isinstance(provided, str) else repr(provided)

    @property
    def number(self) -> Decimal:
        """The claimed number with its significant digits."""
        return significant_digits(self.text)

    @property
    def unit(self) -> Decimal:
        """The unit of the last significant digit."""
        return Decimal(1).scaleb(int(self.number.as_tuple().exponent))

    @property
    def largest(self) -> Fraction:
        """The largest number that rounds to the claim, half up or half down.

        >>> [float(Claim(epsilon=text).largest) for text in ("7.98", "8", "120")]
        [7.985, 8.05, 125.0]
        """
        return Fraction(self.number) + Fraction(self.unit) / 2


def _wrap_epsilon(value: Any) -> Any:
    return value if isinstance(value, dict | Claim | None) else {"epsilon": value}


GivenClaim = Annotated[
    Claim, BeforeValidator(_wrap_epsilon, json_schema_input_type=Claim | Claimed)
]
"""A claim in a plan, where ``claim: 7.98`` is a claimed ε."""


def significant_digits(text: str) -> Decimal:
    """Return ``text`` with its significant digits.

    Trailing zeros of a whole number are not significant, nor is the zero of ``94.0``, which is how
    programs print a whole number. At least two digits are significant: "8" means 8.0.

    >>> [str(significant_digits(text)) for text in ("7.9800", "94.0", "120", "8")]
    ['7.9800', '94', '1.2E+2', '8.0']
    """
    _, point, fraction = text.lower().partition("e")[0].partition(".")
    number = Decimal(text)
    if not point or fraction == "0":
        number = number.normalize()
    missing = 2 - len(number.as_tuple().digits)
    return number.quantize(number.scaleb(-missing)) if missing > 0 else number


class Dataset(StrictModel):
    """The data set: its name, its size in records, and the privacy unit.

    ``contributions_per_user`` is the largest number of records of one user, for user-level privacy.
    ``users_per_record`` is the largest number of users of one record, where users share records;
    who these are is then public and the same in neighbouring data sets.
    """

    name: Name | None = None
    size: Annotated[Integer, Field(ge=1)] | None = None
    unit: PrivacyUnit = "example"
    contributions_per_user: Annotated[Integer, Field(ge=1)] | None = None
    users_per_record: Annotated[Integer, Field(ge=2)] | None = None

    @property
    def records_per_unit(self) -> int:
        """The largest number of records of one privacy unit."""
        return self.contributions_per_user or 1


class Sampling(StrictModel):
    """How the lot of each step is drawn.

    Lot sizes are in records; the scheme decides whether ``lot_size`` is expected or fixed.
    ``probability`` is the probability that one record enters one lot. ``groups`` is the number of
    groups of ``cyclic_poisson``, and ``separation`` is b of ``b_min_sep``, in steps.
    ``participations`` is k of ``random_allocation``, the steps in which each record takes part.
    ``drop_last`` says of ``shuffled`` lots whether an epoch leaves out the records that do not fill
    a last lot (the default), or has a smaller one.
    """

    scheme: Scheme
    lot_size: Annotated[Integer, Field(ge=1)] | None = None
    probability: Annotated[Real, Field(gt=0, le=1)] | None = None
    max_lot_size: Annotated[Integer, Field(ge=1)] | None = None
    groups: Annotated[Integer, Field(ge=1)] | None = None
    separation: Annotated[Integer, Field(ge=1)] | None = None
    participations: Annotated[Integer, Field(ge=1)] | None = None
    bins_drawn: Literal["once", "each_epoch"] | None = None
    drop_last: Annotated[bool, Field(strict=True)] | None = None

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


def _british(value: Any) -> Any:
    return "randomised" if value == "randomized" else value


Clipping = Annotated[Literal["per_block", "flat", "randomised"], BeforeValidator(_british)]
"""How contributions are clipped. A plan may say ``randomised``, and is then refused by name."""

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
    clipping: Clipping = "per_block"
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
