"""DP-Dice: DP-SGD whose clipping error is fed back, certified where that is proved.

With lots B_t, a fixed divisor B, clip norms C₁ (records) and C₂ (error), step t computes

    v_t = (1/B) Σ_(i in B_t) clip(g_i, C₁) + clip(e_t, C₂),      e_1 = 0,
    releases v_t + N(0, σ₁² I),
    e_(t+1) = e_t + (1/B) Σ_(i in B_t) g_i - v_t.

The error state e_t is made of raw gradients and is never released. It carries a record into every
later release, so no step is a subsampled release by itself and sampling does not amplify. Given the
earlier releases and the lots, however, the state is a function of the data, and the whole run is
one Gaussian mechanism (docs/theorems/dp-dice.md):

* (A) a clipped state moves by at most 2C₂: with k participations in T steps,
  μ² σ₁² = (C₁/B)² + (k-1)(C₁/B + 2C₂)² + (T-k)(2C₂)²;
* (B) if raw gradients are first clipped to G >= C₁, the clipping residual is at most
  ρ = (G-C₁)/B per participation and leaves the state when it is released: μ σ₁ = γ_k, with
  γ_0 = 0 and γ_j² = (C₁/B)² + (ρ + γ_(j-1))². It is at most k √(C₁² + (G-C₁)²)/B.

The smaller one is certified. For a user with m records, or under replace_one, both are computed for
m or 2 times the contribution. Everything below is in units of C₁ on the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from affidavit.mechanisms.protocol import INDEPENDENT, Mechanism, Obligation, WholeRun
from affidavit.mechanisms.sampling_schemes import distance_of, sample
from affidavit.plan import (
    FIXED_ORDER,
    Phase,
    Plan,
    Reason,
    events,
    schedule,
)

THEOREM = "docs/theorems/dp-dice.md"
SCHEMES = ("poisson", "full_batch", "fixed_size", "shuffled", "cyclic")
"""Schemes in which the lots of other records do not depend on the differing record."""
MAX_STEPS_OF_RECURSION = 100_000
"""Participations up to which bound (B) is computed by recursion; above, γ_j <= jγ_1 is used."""
ROUND_UP = 1 + 1e-12
"""Rounds a noise multiplier up, for a lower bound."""
ROUNDING = 4 * math.ulp(1.0)
"""Bound of the relative error of one step of the recursion, and of each closed form."""


def by_error_clip(
    *, distance: float, error: float, participations: int, steps: int, records: int = 1
) -> float:
    """Return bound (A) in units of C₁.

    ``error`` is B C₂/C₁, and ``distance`` is how far the records of a unit move the sum. The first
    lot of a single record meets equal states. With several ``records`` only some may be in that
    lot, so the bound is not reduced.

    >>> round(by_error_clip(distance=1, error=0, participations=4, steps=9), 12)
    2.0
    """
    later, idle = distance + 2 * error, 2 * error
    first = distance if records == 1 else later
    squares = first**2 + (participations - 1) * later**2 + (steps - participations) * idle**2
    return math.sqrt(squares) * (1 + ROUNDING)


def by_pre_clip(*, distance: float, residual: float, participations: int) -> float:
    """Return bound (B) in units of C₁; ``residual`` is (G-C₁)/C₁.

    >>> round(by_pre_clip(distance=1, residual=1, participations=1) ** 2, 12)
    2.0
    """
    if participations > MAX_STEPS_OF_RECURSION:
        h, k = math.hypot(1.0, residual), participations
        return distance * math.sqrt(k * h**2 + k * (k - 1) * h * residual) * (1 + 4 * ROUNDING)
    reach = 0.0
    for _ in range(participations):
        reach = math.hypot(1.0, residual + reach)
    return distance * reach * (1 + participations * ROUNDING)


def whole_run(plan: Plan, index: int) -> WholeRun | None:
    """Return the phase as one release, in clip norms C₁; None if no sensitivity is proved."""
    if _check(plan):
        return None
    return WholeRun(sensitivity=_sensitivity(plan, index), attained=_attained(plan, index))


def _sensitivity(plan: Plan, index: int) -> Callable[[int], float]:
    phase = plan.phases[index]
    clip, optimizer = phase.releases[0].clip_norm, plan.optimizer
    exact = schedule.divisor(plan, phase)
    divisor = None if exact is None else schedule.double_up(exact)
    records = plan.dataset.records_per_unit
    distance = distance_of(plan)

    def sensitivity(steps: int) -> float:
        participations = _participations(plan, phase, steps)
        result = []
        if divisor is not None and optimizer.error_clip_norm is not None:
            error = divisor * optimizer.error_clip_norm / clip * (1 + ROUNDING)
            result.append(
                by_error_clip(
                    distance=distance,
                    error=error,
                    participations=participations,
                    steps=steps,
                    records=records,
                )
            )
        if optimizer.pre_clip_norm is not None:
            residual = (optimizer.pre_clip_norm - clip) / clip * (1 + ROUNDING)
            result.append(
                by_pre_clip(distance=distance, residual=residual, participations=participations)
            )
        return min(result)

    return sensitivity


def _attained(plan: Plan, index: int) -> Callable[[float, int], events.Event]:
    """Return the effect of a record whose first raw gradient is huge and not clipped.

    Its error state then points in one direction for the rest of the run, and each later step moves
    by C₂, and by C₁/B more if the record takes part. In random lots the record enters one of the
    first half, in shuffled ones of the first epoch, and the steps after that count. If raw
    gradients are clipped, or C₂ is small, a record within the clip norm leaves no error, and the
    run is that of DP-SGD.
    """
    phase, optimizer = plan.phases[index], plan.optimizer
    replace = plan.adjacency == "replace_one"
    reach = 2.0 if replace else 1.0
    exact, plain = schedule.divisor(plan, phase), sample(plan, index)
    error = 0.0
    if exact is not None and optimizer.error_clip_norm and not optimizer.pre_clip_norm:
        error = float(exact) * optimizer.error_clip_norm / phase.releases[0].clip_norm

    def attained(joint: float, steps: int) -> events.Event:
        probability, as_dp_sgd = plain.probability, plain.attained
        if as_dp_sgd is not None:
            probability = float(schedule.sampling_probability(plan, phase))
        if probability is None or probability >= 1:
            times = _participations(plan, phase, steps)
            squares = 1 + (times - 1) * (1 + error) ** 2 + (steps - times) * error**2
            return events.Gaussian(noise_multiplier=joint / (reach * math.sqrt(squares)) * ROUND_UP)
        if as_dp_sgd is None:
            tries = steps // 2
            chance = -math.expm1(tries * math.log1p(-probability)) / ROUND_UP
        else:
            tries = min(steps, schedule.lots_in_turn(plan, phase))
            chance = tries * probability / ROUND_UP
        shift = error * math.sqrt(steps - tries)
        if chance * shift <= probability * math.sqrt(steps):
            if as_dp_sgd is not None:
                return as_dp_sgd(joint, steps)
            return events.Repeated(event=plain.event(joint), count=plain.times(steps))
        return events.PoissonSubsampledGaussian(
            sampling_probability=chance,
            noise_multiplier=joint / shift * ROUND_UP,
            pair="replace_one" if replace else "add_remove",
        )

    return attained


def _participations(plan: Plan, phase: Phase, steps: int) -> int:
    if phase.sampling.scheme in FIXED_ORDER:
        return min(steps, schedule.participations(plan, phase, steps))
    return steps


def _check(plan: Plan) -> list[Reason]:
    optimizer, phase = plan.optimizer, plan.phases[0]
    if optimizer.error_clip_norm is None:
        return [
            Reason(
                code="unsound_optimizer",
                pointer="/optimizer/name",
                message="the error state of DP-Dice is built from raw gradients and carries a "
                "record into every later release, so no subsampled accountant covers it; the "
                "proof needs the clip norm of the state.",
                remedy=f"Give optimizer.error_clip_norm (see {THEOREM}), or use an optimiser whose "
                "state is built from released values only.",
            )
        ]
    result = []
    if len(plan.phases) > 1:
        result.append(
            Reason(
                code="unsound_optimizer",
                pointer="/phases",
                message="the error state carries over from one phase to the next, which no proof "
                "covers.",
                remedy="Write one phase.",
            )
        )
    if phase.sampling.scheme not in SCHEMES:
        result.append(
            Reason(
                code="unsupported",
                pointer=plan.pointer(0, "sampling", "scheme"),
                message=f"DP-Dice is not proved for {phase.sampling.scheme}.",
                remedy=f"Proved: {', '.join(SCHEMES)}.",
            )
        )
    if len(phase.releases) > 1 or phase.releases[0].count > 1:
        result.append(
            Reason(
                code="unsound_optimizer",
                pointer=plan.pointer(0, "releases"),
                message="DP-Dice is proved for one clip norm and one error state over all tensors.",
                remedy="Write one release with count 1.",
            )
        )
    if optimizer.pre_clip_norm is None and schedule.divisor(plan, phase) is None:
        result.append(
            Reason(
                code="missing_divisor",
                pointer=plan.pointer(0, "sampling", "lot_size"),
                message="error_clip_norm is on the mean, but the divisor of the sum is not given.",
                remedy="Give sampling.lot_size with dataset.size, or optimizer.pre_clip_norm.",
            )
        )
    return result


MECHANISM = Mechanism(
    name="dp_dice",
    title="DP-Dice",
    releases="each step's clipped mean plus the clipped error state, with Gaussian noise; the "
    "error state itself is never released",
    sensitivity="of the whole run, by error_clip_norm (A) or, where pre_clip_norm is given, by "
    "both (A) and (B), whichever is smaller; nothing is amplified by sampling",
    proof=f"{THEOREM}, Theorems 1 and 2; checked against a search over streams",
    post_processing=("the update from the released value, with momentum",),
    state_on_raw_data=(
        "the error state e_t, a sum of raw gradients less what was released of them; it is "
        "accounted in every later release",
    ),
    obligations=(
        Obligation(
            code="error_feedback_form",
            text="e_1 = 0; each step releases the clipped mean plus clip(e_t, error_clip_norm) "
            "with noise, and then adds to e_t the mean of the raw gradients (clipped to "
            "pre_clip_norm if it is given) less the released value before its noise",
        ),
        Obligation(
            code="one_divisor",
            text="both means of a step are divided by the fixed lot size of the plan",
        ),
        Obligation(
            code="error_state_is_private",
            checked_by="declared",
            text="the error state is not logged, stored unencrypted or released with the model",
        ),
    ),
    clipping="one norm over all tensors, for records and for the error state",
    noise=INDEPENDENT,
    sources=(
        "Zhang, Bu, Wu and Hong, arXiv:2311.14632",
        "Zaki, MSc thesis, Helsinki 2025, Algorithm 3",
    ),
    example={
        "adjacency": "zero_out",
        "sampling": {"scheme": "cyclic", "lot_size": 1000},
        "steps": 20,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 10}],
        "optimizer": {"name": "dp_dice", "error_clip_norm": 0.001, "pre_clip_norm": 2},
    },
    check=_check,
    whole_run=whole_run,
)
