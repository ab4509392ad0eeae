"""Accounted events of a plan beside its steps of training.

* ``gaussian``: a metric or statistic released with Gaussian noise, on the whole data set
  or on a Poisson sample of its own.
* ``laplace``: the same with Laplace noise, on the whole data set.
* ``adaptive_clipping_quantile``: at every step, how many records of the *same lot* were
  below the clip norm, released with Gaussian noise to steer the next clip norm.
* ``repeat_and_select``: the whole run is repeated a random number of times, for example
  with random hyperparameters, and only the best is released.

References: Andrew, Thakkar, McMahan and Ramaswamy, arXiv:1905.03871 (quantiles);
Papernot and Steinke, arXiv:2110.03620 (repeat and select).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from affidavit.plan.diagnostics import Reason
from affidavit.plan.types import Integer, Name, Positive, Real, StrictModel

if TYPE_CHECKING:
    from affidavit.plan.document import Plan

Distribution = Literal["poisson", "geometric", "logarithmic", "truncated_negative_binomial"]


class Metric(StrictModel):
    """A Gaussian mechanism, ``count`` times.

    ``noise_multiplier`` is the standard deviation of its noise over its sensitivity under
    the plan's adjacency. With ``sampling_probability`` each of the releases is of a fresh
    Poisson sample, independent of the lots of training.
    """

    kind: Literal["gaussian"]
    name: Name
    noise_multiplier: Positive
    count: Annotated[Integer, Field(ge=1)] = 1
    sampling_probability: Annotated[Real, Field(gt=0, le=1)] | None = None
    each_repetition: Annotated[bool, Field(strict=True)] | None = None


class LaplaceMetric(StrictModel):
    """A Laplace mechanism, ``count`` times; ``noise_multiplier`` is scale over l1 sensitivity.

    The sensitivity is that under the plan's adjacency.
    """

    kind: Literal["laplace"]
    name: Name
    noise_multiplier: Positive
    count: Annotated[Integer, Field(ge=1)] = 1
    each_repetition: Annotated[bool, Field(strict=True)] | None = None


class ClippingQuantile(StrictModel):
    """The number of records below the clip norm, on each step's own lot, with noise.

    Each record of the lot adds +1/2 if its norm is at most the clip norm and -1/2 if not.
    ``noise_std`` is σ_b, the standard deviation of the noise on that sum; ``quantile`` and
    ``learning_rate`` steer the next clip norm and cost nothing. ``count`` such sums are
    released at every step, one for each clip norm that is adapted.
    """

    kind: Literal["adaptive_clipping_quantile"]
    name: Name
    noise_std: Positive
    count: Annotated[Integer, Field(ge=1, le=1_000_000)] = 1
    quantile: Annotated[Real, Field(ge=0, le=1)] | None = None
    learning_rate: Positive | None = None


class Selection(StrictModel):
    """The run, repeated K times and the best released; K has ``distribution`` and ``mean``.

    ``shape`` is η of the truncated negative binomial: 1 is geometric, 0 logarithmic, and
    Poisson its limit. The mean counts runs and is at least 1.
    """

    kind: Literal["repeat_and_select"]
    name: Name
    distribution: Distribution
    mean: Annotated[Real, Field(ge=1, le=1e6)]
    shape: Annotated[Real, Field(ge=0, le=1e6)] | None = None


ExtraEvent = Annotated[
    Metric | LaplaceMetric | ClippingQuantile | Selection, Field(discriminator="kind")
]


def contradictions(plan: Plan) -> Iterator[Reason]:
    """Extra events that cannot all be meant."""
    kinds: Counter[str] = Counter(event.kind for event in plan.extra)
    seen: set[str] = set()
    for index, event in enumerate(plan.extra):
        at = f"/extra/{index}"
        if event.name in seen:
            yield _conflict(
                f"{at}/name", f"the name {event.name} is used twice.", "Give each its own."
            )
        seen.add(event.name)
        if event.kind == "repeat_and_select":
            yield from _shape(event, f"{at}/shape")
            if kinds[event.kind] > 1:
                yield _conflict(
                    f"{at}/kind", "the run is repeated and selected from once.", "Keep one of them."
                )
        if isinstance(event, Metric | LaplaceMetric) and event.each_repetition is not None:
            yield from _repetition(kinds, f"{at}/each_repetition")
    if kinds["adaptive_clipping_quantile"]:
        yield from _fixed_noise(plan)


def _shape(event: Selection, pointer: str) -> Iterator[Reason]:
    wanted = event.distribution == "truncated_negative_binomial"
    if wanted and event.shape is None:
        yield Reason(
            code="missing_field",
            pointer=pointer,
            message="a truncated negative binomial has a shape.",
            remedy="Give shape, or distribution: geometric (shape 1) or logarithmic (shape 0).",
        )
    if not wanted and event.shape is not None:
        yield _conflict(
            pointer,
            f"{event.distribution} has no shape.",
            "Remove shape, or write distribution: truncated_negative_binomial.",
        )


def _repetition(kinds: Counter[str], pointer: str) -> Iterator[Reason]:
    if not kinds["repeat_and_select"]:
        yield _conflict(
            pointer,
            "each_repetition says that the metric is part of every repetition, and nothing "
            "is repeated.",
            "Remove it, or add the repeat_and_select event.",
        )


def _fixed_noise(plan: Plan) -> Iterator[Reason]:
    for index, phase in enumerate(plan.phases):
        for place, release in enumerate(phase.releases):
            if release.noise_std is not None:
                yield _conflict(
                    plan.pointer(index, "releases", place, "noise_std"),
                    "the clip norm is adapted during training, so that noise of a fixed "
                    "standard deviation has no fixed noise multiplier.",
                    "Give noise_multiplier; the noise then follows the clip norm.",
                )
                return


def _conflict(pointer: str, message: str, remedy: str) -> Reason:
    return Reason(code="conflict", pointer=pointer, message=message, remedy=remedy)
