"""Extra events: what a plan accounts beside its steps of training, lowered.

* A **metric** is a Gaussian or Laplace mechanism of its own, on the whole data set or (Gaussian
  only) on Poisson samples independent of the lots of training; it composes with the run. For
  a user with m records its sensitivity is m times as large (triangle inequality, l2 or l1).
* A **clipping quantile** is no event of its own. Its count of records below the clip norm
  is taken on each step's *own lot*, so that it is one more block of the step's joint
  release. A record of the lot adds +1/2 or -1/2, another record adds nothing: one record
  moves the sum by at most 1/2 (1 under replace_one, twice the bound on one contribution, as
  for every block). Noise of standard deviation σ_b on the sum is therefore a block of
  multiplier 2σ_b, and the step's multiplier is (σ_joint⁻² + (2σ_b)⁻²)^(-1/2). Accounting it
  as a release with a sample of its own would claim too little.
* A **selection** repeats the whole run, with every metric marked ``each_repetition``, and
  releases the best repetition only.

References: Andrew, Thakkar, McMahan and Ramaswamy, arXiv:1905.03871, Theorem 1 (the joint
multiplier); Papernot and Steinke, arXiv:2110.03620, Theorems 2 and 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from affidavit.plan import (
    MAX_RECORDS,
    ClippingQuantile,
    Composed,
    Event,
    Gaussian,
    Laplace,
    LaplaceMetric,
    Leaf,
    Metric,
    Plan,
    PoissonSampledGroupGaussian,
    PoissonSubsampledGaussian,
    Reason,
    RefusedPlan,
    RepeatAndSelect,
    Repeated,
    Selection,
)

SHAPES = {"poisson": math.inf, "geometric": 1.0, "logarithmic": 0.0}
"""η of the distributions that have a name of their own."""
HALF = 0.5
"""How far one record moves the recentred count, in records."""
ROUNDING = 8 * math.ulp(1.0)
"""Relative error of what is computed of multipliers here, with room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdditionalEvents:
    """A plan's extra events: beside the run, within it, and around it.

    ``same_lot_multipliers`` are the noise multipliers of further blocks of every step.
    """

    released_once: tuple[Event, ...] = ()
    released_per_repetition: tuple[Event, ...] = ()
    same_lot_multipliers: tuple[float, ...] = ()
    selection: Selection | None = None

    def compose_with(self, run: Sequence[Event]) -> Composed:
        """The whole plan: ``run`` with everything that happens beside and around it.

        Raises ``ValueError`` for a selection without a shape, which no plan that was read has.
        """
        if self.selection is None:
            return Composed(events=(*run, *self.released_per_repetition, *self.released_once))
        shape = SHAPES.get(self.selection.distribution, self.selection.shape)
        if shape is None:
            raise ValueError("a valid truncated negative binomial has a shape")
        repeated = Composed(events=(*run, *self.released_per_repetition))
        selected = RepeatAndSelect(event=repeated, mean=self.selection.mean, shape=shape)
        return Composed(events=(selected, *self.released_once))


def lower_additional_releases(plan: Plan) -> AdditionalEvents:
    """The extra events of ``plan``; raises ``RefusedPlan`` with every reason."""
    beside: list[Event] = []
    repeated: list[Event] = []
    same_lot: list[float] = []
    reasons: list[Reason] = []
    selection: Selection | None = None
    for index, extra in enumerate(plan.extra):
        match extra:
            case Metric() | LaplaceMetric():
                if refused := _unsampled(plan, index, extra):
                    reasons += refused
                else:
                    (repeated if extra.each_repetition else beside).append(_metric(plan, extra))
            case ClippingQuantile():
                reasons += _same_lot_only(plan, index)
                same_lot.append(extra.noise_std / HALF / math.sqrt(extra.count) * (1 - ROUNDING))
            case Selection():
                selection = extra
    if reasons:
        raise RefusedPlan(*reasons)
    return AdditionalEvents(
        released_once=tuple(beside),
        released_per_repetition=tuple(repeated),
        same_lot_multipliers=tuple(same_lot),
        selection=selection,
    )


def _metric(plan: Plan, metric: Metric | LaplaceMetric) -> Event:
    records = plan.dataset.records_per_unit
    sigma = metric.noise_multiplier / records
    if isinstance(metric, LaplaceMetric):
        return Repeated(event=Laplace(noise_multiplier=sigma), count=metric.count)
    probability = metric.sampling_probability
    if probability is None or probability >= 1:
        return Repeated(event=Gaussian(noise_multiplier=sigma), count=metric.count)
    leaf: Leaf = PoissonSubsampledGaussian(sampling_probability=probability, noise_multiplier=sigma)
    if records > 1:
        leaf = PoissonSampledGroupGaussian(
            records=records,
            sampling_probability=probability,
            noise_multiplier=metric.noise_multiplier,
        )
    return Repeated(event=leaf, count=metric.count)


def _unsampled(plan: Plan, index: int, metric: Metric | LaplaceMetric) -> list[Reason]:
    """Amplification of a metric holds for one record that is there or not."""
    pointer = f"/extra/{index}/sampling_probability"
    if isinstance(metric, LaplaceMetric) or metric.sampling_probability in (None, 1.0):
        return []
    remedy = "Remove sampling_probability; the metric is then accounted without amplification."
    if plan.adjacency == "replace_one":
        message = (
            "under replace_one a sampled metric is bounded only if its contributions are "
            "centred, which the plan cannot say."
        )
        return [_reason("unsupported", pointer, message, remedy)]
    if plan.dataset.records_per_unit > MAX_RECORDS:
        message = f"sampling is accounted for users of at most {MAX_RECORDS} records."
        return [_reason("user_level_sampling", pointer, message, remedy)]
    return []


def _same_lot_only(plan: Plan, index: int) -> list[Reason]:
    """The joint release is proved for fresh noise at every step, steered by released values."""
    correlated = [phase.noise.kind for phase in plan.phases if phase.noise.kind != "independent"]
    if not correlated and plan.optimizer.name != "dp_dice":
        return []
    what = f"{correlated[0]} noise" if correlated else "dp_dice"
    return [
        _reason(
            "unsupported",
            f"/extra/{index}/kind",
            f"with {what} one step's release depends on earlier clip norms, and no bound is "
            "proved for clip norms that are adapted.",
            "Use a fixed clip norm, or independent noise with another optimiser.",
        )
    ]


def _reason(code: str, pointer: str, message: str, remedy: str) -> Reason:
    return Reason(code=code, pointer=pointer, message=message, remedy=remedy)
