"""Describe a closed plan in a result document; nothing here is accounted.

The errors of a strategy are those of the plan's workload at noise of standard deviation 1 on a
clip norm of 1. At Gaussian-DP parameter μ, multiply them by the sensitivity over μ. They are null
where they are too costly to compute. ``coefficients`` are those of the recurrence, if they are
few; ``noise_sha256`` is the digest of N, row by row in little-endian doubles, if the strategy is a
matrix.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from affidavit.assessment.assessment import Caveat, ReleaseNoise
from affidavit.mechanisms import (
    Lowered,
    add_same_lot_blocks,
    noise_energy,
    noise_multiplier,
    scaled_noise,
)
from affidavit.plan import KNOWN_PARTICIPATIONS, MAX_MATRIX_STEPS, Phase, Plan, lots_per_epoch

if TYPE_CHECKING:
    from affidavit.mechanisms import CorrelatedRun, LoweredPhase
    from affidavit.mechanisms.strategies import Participation, Strategy, Workload

MAX_COEFFICIENTS = 64
"""The most coefficients of a recurrence that a result lists."""


def joint_of(lowered: Lowered) -> float | None:
    """Return σ_joint of a step, or None if the phases differ; arXiv:2605.12994v1, Theorem 2.1."""
    joints = {phase.joint for phase in lowered.phases}
    joint = joints.pop() if len(joints) == 1 else None
    return None if joint is None else add_same_lot_blocks(joint, lowered.extra.same_lot_multipliers)


def releases_of(
    open_plan: Plan, closed: Plan, required_scale: float | None
) -> tuple[ReleaseNoise, ...]:
    """Return every release with its noise as ``open_plan`` gives it and as the target requires."""
    result = []
    for index, (provided, phase) in enumerate(zip(open_plan.phases, closed.phases, strict=True)):
        required = None if required_scale is None else scaled_noise(phase, required_scale)
        for place, release in enumerate(phase.releases):
            has_noise = provided.releases[place].has_noise
            result.append(
                ReleaseNoise(
                    name=release.name,
                    count=release.count,
                    given=float(noise_multiplier(release)) if has_noise else None,
                    required=None if required is None else required[place],
                    phase=index if len(closed.phases) > 1 else None,
                )
            )
    return tuple(result)


def sampling_of(lowered: Lowered) -> tuple[dict[str, Any], ...]:
    """Return the scheme, probability and steps of each phase, and its lot size if it has one.

    The participations of a record are included if they are known, the bins if there are any,
    and the largest size of truncated lots. Unknowns that the plan solves for are null.
    """
    result = []
    asks_for_rate = lowered.plan.asks_for_lot_size or lowered.plan.asks_for_probability
    for phase, part in _phases(lowered):
        entry: dict[str, Any] = {
            "scheme": phase.sampling.scheme,
            "probability": None if asks_for_rate else part.sampled.probability,
            "steps": None if asks_for_rate and phase.epochs is not None else part.steps,
        }
        if phase.sampling.lot_size is not None:
            entry["lot_size"] = phase.sampling.lot_size
        if phase.sampling.max_lot_size is not None:
            entry["max_lot_size"] = phase.sampling.max_lot_size
        if phase.sampling.scheme in KNOWN_PARTICIPATIONS and part.steps is not None:
            entry["participations"] = part.sampled.times(part.steps)
        if phase.sampling.scheme == "balls_in_bins":
            size, lot = lowered.plan.dataset.size, phase.sampling.lot_size
            entry["bins"] = lots_per_epoch(size, lot) if size and lot else None
        result.append(entry)
    return tuple(result)


def _phases(lowered: Lowered) -> list[tuple[Phase, LoweredPhase]]:
    return list(zip(lowered.plan.phases, lowered.phases, strict=True))


def sensitivity_of(lowered: Lowered) -> float | None:
    """Return how far one record moves the run, in clip norms, or None for several phases.

    If its k participations are known, they add up to √k, given the lots. Under sampling it is
    the distance of one step.
    """
    if len(lowered.phases) > 1:
        return None
    (part,) = lowered.phases
    if part.correlation is not None:
        streamed = _streamed(part)
        return None if streamed is None else streamed.distance * streamed.sensitivity.value
    if part.whole is not None and part.steps is not None:
        return part.whole.sensitivity(part.steps)
    if part.sampled.reach is not None and part.steps is not None:
        return part.sampled.reach(part.steps)
    if lowered.plan.phases[0].sampling.scheme in KNOWN_PARTICIPATIONS and part.steps is not None:
        return part.sampled.distance * math.sqrt(part.sampled.times(part.steps))
    return part.sampled.distance


def allocation_of(lowered: Lowered) -> dict[str, Any] | None:
    """Return how blocks share the noise, and the share of the noise energy that this saves.

    The energy is Σ count_g d_g σ_g² C_g², in C_g's unit² (``affidavit.mechanisms.joint_gaussian``).
    """
    if len(lowered.phases) > 1 or lowered.phases[0].joint is None:
        return None
    phase, joint = lowered.plan.phases[0], lowered.phases[0].joint
    sigmas = [float(noise_multiplier(release)) for release in phase.releases]
    result: dict[str, Any] = {"kind": lowered.plan.allocation}
    # An energy that no double can hold is left out: nothing depends on it.
    with contextlib.suppress(ArithmeticError):
        energy = noise_energy(phase, sigmas, joint)
        if energy is not None and math.isfinite(energy.allocated + energy.uniform):
            result |= {
                "noise_energy": energy.allocated,
                "uniform_noise_energy": energy.uniform,
                "saving": energy.saving,
            }
    return result


EXACT_NOISE = (
    "noise is exactly Gaussian and noisy sums are rounded to a grid, which raises δ by at most "
    "(1 + e^ε) n 2^-200 for n released entries; sums of clipped gradients, in floating point, are "
    "taken for exact"
)
"""The assumption about noise if every phase has exact noise (``docs/theorems/grid-noise.md``)."""


def assumptions_of(lowered: Lowered) -> tuple[str, ...]:
    """Return the assumptions of the guarantee beside the trainer's obligations."""
    data = lowered.plan.dataset
    ownership = (
        ""
        if data.users_per_record is None
        else f": in the contents of all the user's records, of which each belongs to up to "
        f"{data.users_per_record} users; who owns which record is public, not protected, and the "
        "same in both"
    )
    return (
        "every intermediate model may be released (trajectory: all_iterates)",
        f"neighbouring data sets differ in one {data.unit} ({lowered.plan.adjacency}){ownership}",
        EXACT_NOISE
        if all(phase.has_exact_noise for phase in lowered.plan.phases)
        else "noise is exactly Gaussian; floating-point noise is not modelled",
        *dict.fromkeys(phase.sampled.assumption for phase in lowered.phases),
    )


# ---- correlated noise -----------------------------------------------------------------
# The strategies take long to import, and only correlated noise needs them.


def strategies_of(lowered: Lowered) -> tuple[dict[str, Any], ...]:
    """Return one entry for each phase with correlated noise."""
    result = []
    for phase, part in _phases(lowered):
        streamed = _streamed(part)
        if streamed is None or part.correlation is None or phase.noise.kind == "independent":
            continue
        strategy, sensitivity = streamed.strategy, streamed.sensitivity
        rms, largest = _errors(strategy, part.correlation.workload)
        result.append(
            {
                "kind": phase.noise.kind,
                "sensitivity": sensitivity.value,
                "exact": sensitivity.exact,
                "rms_error": rms,
                "max_error": largest,
                "participation": _participation_of(streamed.participation, strategy.steps),
                "buffers": strategy.streaming.buffers,
                "recurrence": strategy.streaming.recurrence,
                **_noise_of(strategy),
                **_construction_of(strategy),
            }
        )
    return tuple(result)


def _streamed(part: LoweredPhase) -> CorrelatedRun | None:
    """Return the strategy of a phase with correlated noise and known steps, or None."""
    if part.correlation is None or part.steps is None:
        return None
    return part.correlation.at(part.steps)


def _participation_of(turns: Participation, steps: int) -> dict[str, Any]:
    """Return the schema with its numbers, the steps of an epoch where they matter."""
    result = {
        "schema": turns.schema,
        "participations": turns.max_participations(steps),
        "separation": turns.separation,
    }
    return result if turns.epoch is None else {**result, "epoch": turns.epoch}


def _construction_of(strategy: Strategy) -> dict[str, Any]:
    """Return the digest of the certified coefficients and their gap to the optimum."""
    from affidavit.mechanisms.strategies import Dense, coefficients_digest

    coefficients = strategy.coefficients
    result: dict[str, Any] = {"digest": coefficients_digest(coefficients)} if coefficients else {}
    if isinstance(strategy, Dense) and strategy.gap is not None and math.isfinite(strategy.gap):
        result["gap"] = strategy.gap
    return result


def _noise_of(strategy: Strategy) -> dict[str, Any]:
    """Return the certified noise if the plan only says how to compute it."""

    coefficients = strategy.streaming.coefficients
    if 0 < len(coefficients) <= MAX_COEFFICIENTS:
        return {"coefficients": list(coefficients)}
    if strategy.streaming.form == "rows" and strategy.steps <= MAX_MATRIX_STEPS:
        doubles = strategy.noise_matrix().astype("<f8").tobytes(order="C")
        return {"noise_sha256": hashlib.sha256(doubles).hexdigest()}
    return {}


def _errors(strategy: Strategy, workload: Workload) -> tuple[float | None, float | None]:
    """Return the rms and largest error of the workload; None if unknown."""
    import numpy as np

    from affidavit.mechanisms.strategies import TooLarge

    try:
        with np.errstate(over="ignore", invalid="ignore"):
            errors = strategy.errors(workload)
            result = errors.rms, errors.max
    except TooLarge:
        return None, None
    return result if all(map(math.isfinite, result)) else (None, None)


# ---- warnings ---------------------------------------------------------------------------


def caveats_of(lowered: Lowered) -> tuple[Caveat, ...]:
    """Return the warnings that change no number."""
    return (*_plan_caveats(lowered), *_bins_caveats(lowered), *_strategy_caveats(lowered))


def _plan_caveats(lowered: Lowered) -> Iterator[Caveat]:
    plan = lowered.plan
    if plan.dataset.size is None:
        yield Caveat(
            code="delta_unchecked",
            message="dataset.size is not given, so that δ < 1/N was not checked.",
        )
    if plan.allow_large_delta is not None:
        yield Caveat(
            code="large_delta_allowed",
            message=f"δ of 1/N or more is allowed by the plan: {plan.allow_large_delta.reason}",
        )
    if lowered.mechanism.needs_auxiliary_block and all(
        len(phase.releases) == 1 for phase in plan.phases
    ):
        yield Caveat(
            code="no_auxiliary_block",
            message=f"{plan.optimizer.name} has a release for its matrices only; embeddings, "
            "norms and biases must be frozen or be a release of the plan.",
        )
    if lowered.mechanism.state_on_raw_data:
        yield Caveat(
            code="no_amplification",
            message=f"{plan.optimizer.name} carries a record into every later release, and "
            "no amplification by sampling is claimed.",
        )
    elif any(phase.sampling.scheme == "shuffled" for phase in plan.phases):
        yield Caveat(
            code="no_amplification",
            message="shuffled lots are not Poisson lots: each record takes part once an "
            "epoch, and only lots and records that an epoch leaves out amplify.",
        )


def _bins_caveats(lowered: Lowered) -> Iterator[Caveat]:
    """Yield at most one warning about balls in bins with independent noise."""
    binned = [
        (phase, part)
        for phase, part in _phases(lowered)
        if phase.sampling.scheme == "balls_in_bins" and part.correlation is None
    ]
    chained = lowered.single_record_run is not None
    bins_stay = [
        phase.sampling.bins_drawn != "each_epoch" and (part.sampled.run is not None or chained)
        for phase, part in binned
    ]
    if sum(bins_stay) > 1:
        yield Caveat(
            code="bins_thrown_anew",
            message="each phase throws the records into its bins anew; a sampler that keeps "
            "them from one phase to the next spends far more than is certified.",
        )
        return
    for phase, part in binned:
        if part.sampled.run is None:
            yield Caveat(
                code="no_amplification",
                message="no theorem of balls in bins covers replaced records, or users of "
                "several: ε is that of the run given its bins, or of a chain of neighbours if that "
                "is less.",
            )
            return
        several = part.steps is not None and part.sampled.times(part.steps) > 1
        if several and phase.sampling.bins_drawn is None:
            yield Caveat(
                code="bins_taken_as_kept",
                message="each record is taken to keep its lot in all epochs; lots that are "
                "drawn afresh cost less, and the plan may say so (bins_drawn: each_epoch).",
            )
            return


def _strategy_caveats(lowered: Lowered) -> Iterator[Caveat]:
    from affidavit.mechanisms.strategies import is_replaced

    last, incomplete = lowered.plan.phases[-1], False
    for index, (phase, part) in enumerate(_phases(lowered)):
        if (streamed := _streamed(part)) is None:
            continue
        random = ("cyclic_poisson", "b_min_sep", "balls_in_bins")
        if phase.sampling.scheme in random and streamed.route == "gaussian":
            turns = streamed.participation.max_participations(streamed.strategy.steps)
            chain = ", or ε is that of a chain of neighbours if that is less"
            yield Caveat(
                code="no_amplification",
                message=f"no theorem of {phase.sampling.scheme} sampling covers this run: each "
                f"record is taken to be in all of its {turns} turns"
                f"{'' if lowered.single_record_run is None else chain}.",
            )
        if is_replaced(lowered.plan, index, streamed.strategy.steps):
            yield Caveat(
                code="participation_not_drawn",
                message="the participation of the plan has patterns that the sampler never draws; "
                "the sensitivity is that of the patterns that it draws.",
            )
        if not streamed.sensitivity.exact:
            yield Caveat(
                code="sensitivity_is_a_bound",
                message="the sensitivity of the strategy is an upper bound that need not be "
                "attained; the lower end of ε is that of a pattern that is.",
            )
        incomplete |= _has_incomplete_tree(streamed.strategy, is_last=phase is last)
    if incomplete:
        yield Caveat(
            code="tree_not_completed",
            message="a new tree begins before the previous one is complete. A run that completes "
            "its trees (DP-FTRL's tree completion) releases more than is certified: make the "
            "length of each tree a power of two, with additional steps in which no record takes "
            "part.",
        )


def _has_incomplete_tree(strategy: Strategy, *, is_last: bool) -> bool:
    """Whether a new tree begins after one that has no root over all of its steps."""
    from affidavit.mechanisms.strategies import Tree

    if not isinstance(strategy, Tree):
        return False
    next_begins = strategy.steps > strategy.period or not is_last
    return next_begins and strategy.period & (strategy.period - 1) != 0


def narrowing_remedy(plan: Plan) -> str:
    """Return how the plan's bracket becomes narrower, if that is known, and a space."""
    if all(phase.sampling.max_lot_size is None for phase in plan.phases):
        return ""
    return "A larger sampling.max_lot_size truncates fewer lots and narrows the bracket. "
