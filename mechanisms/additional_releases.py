"""Additional releases: what a plan accounts besides its training steps, as events.

* A **metric** is a Gaussian or Laplace mechanism, on the whole data set or (Gaussian only) on
  Poisson samples independent of the lots of training. It composes with the run. For a user with m
  records its sensitivity is m times as large (triangle inequality, in l2 or l1).
* A **clipping quantile** is no event of its own. It counts records below the clip norm in the lot
  of each step, so it is one more block of the joint release of that step. A record of the lot
  adds +1/2 or -1/2 and other records add nothing, so one record moves the sum by at most 1/2 (by 1
  under replace_one, as every block moves by twice its bound). Noise of standard deviation σ_b on
  the sum is a block with multiplier 2σ_b, and the multiplier of the step is
  (σ_joint⁻² + (2σ_b)⁻²)^(-1/2). Accounting it with a sample of its own would claim too little.
* A **selection** repeats the whole run, with every metric marked ``each_repetition``, and
  releases only the best repetition. ``draw_repetitions`` draws the number of repetitions.

References: Andrew, Thakkar, McMahan and Ramaswamy, arXiv:1905.03871, Theorem 1 (the joint
multiplier); Papernot and Steinke, arXiv:2110.03620, Definition 1, Theorems 2 and 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cache

from affidavit.plan import (
    ClippingQuantile,
    LaplaceMetric,
    Metric,
    Plan,
    Reason,
    RefusedPlan,
    Selection,
    events,
)

SHAPES = {"poisson": math.inf, "geometric": 1.0, "logarithmic": 0.0}
"""η of the named distributions."""
COUNT_SENSITIVITY = 0.5
"""How far one record moves the recentred count, in records."""
ROUNDING = 8 * math.ulp(1.0)
"""Bound of the relative rounding error of a multiplier computed here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdditionalEvents:
    """The additional events of a plan.

    ``same_lot_multipliers`` are the noise multipliers of further blocks of every step.
    """

    released_once: tuple[events.Event, ...] = ()
    released_per_repetition: tuple[events.Event, ...] = ()
    same_lot_multipliers: tuple[float, ...] = ()
    selection: Selection | None = None

    def compose_with(self, run: Sequence[events.Event]) -> events.Composed:
        """Return the whole plan: ``run`` with all additional events.

        Raises ``ValueError`` for a selection without a shape, which no valid plan has.
        """
        if self.selection is None:
            return events.Composed(
                events=(*run, *self.released_per_repetition, *self.released_once)
            )
        repeated = events.Composed(events=(*run, *self.released_per_repetition))
        selected = events.RepeatAndSelect(
            event=repeated, mean=self.selection.mean, shape=_shape(self.selection)
        )
        return events.Composed(events=(selected, *self.released_once))


def lower_additional_releases(plan: Plan) -> AdditionalEvents:
    """Return the additional events of ``plan``; raises ``RefusedPlan`` with every reason."""
    once: list[events.Event] = []
    per_repetition: list[events.Event] = []
    same_lot: list[float] = []
    reasons: list[Reason] = []
    selection: Selection | None = None
    for index, release in enumerate(plan.extra):
        match release:
            case Metric() | LaplaceMetric():
                if (reason := _refused_sampling(plan, index, release)) is not None:
                    reasons.append(reason)
                elif release.each_repetition:
                    per_repetition.append(_metric_event(plan, release))
                else:
                    once.append(_metric_event(plan, release))
            case ClippingQuantile():
                if (reason := _refused_quantile(plan, index)) is not None:
                    reasons.append(reason)
                multiplier = release.noise_std / COUNT_SENSITIVITY / math.sqrt(release.count)
                same_lot.append(multiplier * (1 - ROUNDING))
            case Selection():
                selection = release
    if reasons:
        raise RefusedPlan(*reasons)
    return AdditionalEvents(
        released_once=tuple(once),
        released_per_repetition=tuple(per_repetition),
        same_lot_multipliers=tuple(same_lot),
        selection=selection,
    )


def _metric_event(plan: Plan, metric: Metric | LaplaceMetric) -> events.Event:
    records = plan.dataset.records_per_unit
    sigma = metric.noise_multiplier / records
    if isinstance(metric, LaplaceMetric):
        return events.Repeated(event=events.Laplace(noise_multiplier=sigma), count=metric.count)
    probability = metric.sampling_probability
    if probability is None or probability >= 1:
        return events.Repeated(event=events.Gaussian(noise_multiplier=sigma), count=metric.count)
    leaf: events.Leaf = events.PoissonSubsampledGaussian(
        sampling_probability=probability, noise_multiplier=sigma
    )
    if records > 1:
        leaf = events.PoissonSampledGroupGaussian(
            records=records,
            sampling_probability=probability,
            noise_multiplier=metric.noise_multiplier,
        )
    return events.Repeated(event=leaf, count=metric.count)


def _refused_sampling(plan: Plan, index: int, metric: Metric | LaplaceMetric) -> Reason | None:
    """Return why the sampling of a metric is not amplified, or None."""
    pointer = f"/extra/{index}/sampling_probability"
    remedy = "Remove sampling_probability; the metric is then accounted without amplification."
    if isinstance(metric, LaplaceMetric) or metric.sampling_probability in (None, 1.0):
        return None
    if plan.adjacency == "replace_one":
        return Reason(
            code="unsupported",
            pointer=pointer,
            message="under replace_one a sampled metric is bounded only if its contributions are "
            "centred, which the plan cannot say.",
            remedy=remedy,
        )
    if plan.dataset.records_per_unit > events.MAX_RECORDS:
        message = f"sampling is accounted for users of at most {events.MAX_RECORDS} records."
        return Reason(code="user_level_sampling", pointer=pointer, message=message, remedy=remedy)
    return None


def _refused_quantile(plan: Plan, index: int) -> Reason | None:
    """Return why a clipping quantile is not covered by the proof of the joint release, or None.

    The proof needs fresh noise at every step.
    """
    correlated = [phase.noise.kind for phase in plan.phases if phase.noise.kind != "independent"]
    if not correlated and plan.optimizer.name != "dp_dice":
        return None
    what = f"{correlated[0]} noise" if correlated else "dp_dice"
    return Reason(
        code="unsupported",
        pointer=f"/extra/{index}/kind",
        message=f"with {what}, the release of a step depends on earlier clip norms, and no bound "
        "is proved for adapted clip norms.",
        remedy="Use a fixed clip norm, or independent noise with another optimiser.",
    )


def _shape(selection: Selection) -> float:
    """Return η; raises ``ValueError`` for a truncated negative binomial without a shape."""
    shape = SHAPES.get(selection.distribution, selection.shape)
    if shape is None:
        raise ValueError("a truncated negative binomial needs a shape.")
    return shape


DIGITS = 60
"""Decimal digits in which a number of repetitions is drawn."""
NEGLIGIBLE_MASS = Decimal("1e-50")
"""The probability at which a distribution is cut off beyond its mean."""
UNIFORM_BITS = 512


def draw_repetitions(selection: Selection, uniform: int) -> int:
    """Return the number of repetitions K for the uniform number ``uniform`` / 2^512.

    K is the inverse of the distribution function that the accountants use: Poisson, or the
    negative binomial of shape η truncated to K ≥ 1, whose γ follows from the mean. In 60 digits the
    distribution of K is the certified one up to 10⁻⁵⁰. γ is rounded up, which makes K smaller and
    keeps the bound valid. A Poisson K may be 0. Raises ``ValueError`` for a number beyond 512 bits
    or a selection without its shape.

    >>> geometric = Selection(
    ...     kind="repeat_and_select", name="search", distribution="geometric", mean=4)
    >>> [draw_repetitions(geometric, part << 509) for part in range(8)]
    [1, 1, 2, 2, 3, 4, 5, 8]
    """
    if not 0 <= uniform < 1 << UNIFORM_BITS:
        raise ValueError(f"give a number of {UNIFORM_BITS} bits.")
    shape = _shape(selection)
    with localcontext(prec=DIGITS, Emin=-(10**17), Emax=10**17):
        quantile, mean = Decimal(uniform) / (1 << UNIFORM_BITS), Decimal(selection.mean)
        if selection.distribution == "poisson":
            return _poisson_quantile(mean, quantile)
        return 1 if mean == 1 else _negative_binomial_quantile(mean, Decimal(shape), quantile)


def _poisson_quantile(mean: Decimal, quantile: Decimal) -> int:
    count, mass = 0, (-mean).exp()
    below = mass
    while below <= quantile and (count < mean or mass > NEGLIGIBLE_MASS):
        count += 1
        mass *= mean / count
        below += mass
    return count


def _negative_binomial_quantile(mean: Decimal, shape: Decimal, quantile: Decimal) -> int:
    gamma = _gamma(mean, shape)
    count, rest = 1, 1 - gamma
    mass = rest / -gamma.ln() if shape == 0 else rest * shape / (gamma**-shape - 1)
    below = mass
    while below <= quantile and (count < mean or mass > NEGLIGIBLE_MASS):
        mass *= rest * (count + shape) / (count + 1)
        count += 1
        below += mass
    return count


@cache
def _gamma(mean: Decimal, shape: Decimal) -> Decimal:
    """Return γ for this mean, rounded up."""
    if shape == 1:
        return 1 / mean
    low, high = Decimal(0), Decimal(1)
    for _ in range(4 * DIGITS):
        middle = (low + high) / 2
        if _negative_binomial_mean(middle, shape) > mean:
            low = middle
        else:
            high = middle
    return high


def _negative_binomial_mean(gamma: Decimal, shape: Decimal) -> Decimal:
    odds = (1 - gamma) / gamma
    return odds / -gamma.ln() if shape == 0 else odds * shape / (1 - gamma**shape)
