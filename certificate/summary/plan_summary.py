"""Describe a closed plan in a result document; no accounting here."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from affidavit.certificate.assessment import Caveat, ReleaseNoise
from affidavit.mechanisms import Lowered, jointly, noise_energy, noise_multiplier, scaled_noise
from affidavit.plan import ONE_LOT_AN_EPOCH, Plan, lots_per_epoch


def joint_of(lowered: Lowered) -> float | None:
    """σ_joint of a step, where all phases share one; arXiv:2605.12994v1, Theorem 2.1."""
    joints = {phase.joint for phase in lowered.phases}
    joint = joints.pop() if len(joints) == 1 else None
    return None if joint is None else jointly(joint, lowered.extra.same_lot)


def releases_of(
    open_plan: Plan, closed: Plan, required_scale: float | None
) -> tuple[ReleaseNoise, ...]:
    """Every release with its noise as given in ``open_plan`` and as its target requires."""
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
    """One entry a phase: scheme, probability, steps, lot size if there is one, and more.

    With one lot an epoch also the participations of a record; the bins where there are any;
    where lots are cut, their largest size. Unknowns that the plan solves for are null.
    """
    result = []
    asks_for_rate = lowered.plan.asks_for_lot_size or lowered.plan.asks_for_probability
    for phase, part in zip(lowered.plan.phases, lowered.phases, strict=True):
        entry: dict[str, Any] = {
            "scheme": phase.sampling.scheme,
            "probability": None if asks_for_rate else part.sampled.probability,
            "steps": None if asks_for_rate and phase.epochs is not None else part.steps,
        }
        if phase.sampling.lot_size is not None:
            entry["lot_size"] = phase.sampling.lot_size
        if phase.sampling.max_lot_size is not None:
            entry["max_lot_size"] = phase.sampling.max_lot_size
        if phase.sampling.scheme in ONE_LOT_AN_EPOCH and part.steps is not None:
            entry["participations"] = part.sampled.times(part.steps)
        if phase.sampling.scheme == "balls_in_bins":
            size, lot = lowered.plan.dataset.size, phase.sampling.lot_size
            entry["bins"] = lots_per_epoch(size, lot) if size and lot else None
        result.append(entry)
    return tuple(result)


def sensitivity_of(lowered: Lowered) -> float | None:
    """How far one record moves the run, in clip norms; None where phases differ.

    With one lot an epoch its k participations add up to √k, given the lots; under
    sampling it is the distance of one step.
    """
    if len(lowered.phases) > 1:
        return None
    (part,) = lowered.phases
    if part.correlation is not None:
        # As in lowering: only correlated noise needs the strategies.
        from affidavit.certificate.summary.strategy_summary import streamed

        at = streamed(part)
        return None if at is None else at.distance * at.sensitivity.value
    if part.whole is not None and part.steps is not None:
        return part.whole.sensitivity(part.steps)
    if lowered.plan.phases[0].sampling.scheme in ONE_LOT_AN_EPOCH and part.steps is not None:
        return part.sampled.distance * math.sqrt(part.sampled.times(part.steps))
    return part.sampled.distance


def allocation_of(lowered: Lowered) -> dict[str, Any] | None:
    """How the noise is shared between blocks, and the share of the noise energy that this saves.

    The energy is Σ count_g d_g σ_g² C_g², in C_g's unit² (``affidavit.mechanisms.joint_gaussian``).
    """
    if len(lowered.phases) > 1 or lowered.phases[0].joint is None:
        return None
    phase, joint = lowered.plan.phases[0], lowered.phases[0].joint
    sigmas = [float(noise_multiplier(release)) for release in phase.releases]
    result: dict[str, Any] = {"kind": lowered.plan.allocation}
    # An energy that no double holds is left out: it decides nothing.
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
"""What is assumed instead where every phase has it (``docs/theorems/grid-noise.md``)."""


def assumptions_of(lowered: Lowered) -> tuple[str, ...]:
    """What the guarantee rests on beside the trainer's obligations."""
    return (
        "every intermediate model may be released (trajectory: all_iterates)",
        f"neighbouring data sets differ in one {lowered.plan.dataset.unit} "
        f"({lowered.plan.adjacency})",
        EXACT_NOISE
        if all(phase.has_exact_noise for phase in lowered.plan.phases)
        else "noise is exactly Gaussian; floating-point noise is not modelled",
        *dict.fromkeys(phase.sampled.assumption for phase in lowered.phases),
    )


def caveats_of(lowered: Lowered) -> tuple[Caveat, ...]:
    """Warnings that change no number."""
    return (*_of_plan(lowered), *_of_bins(lowered), *_of_streams(lowered))


def _of_plan(lowered: Lowered) -> Iterator[Caveat]:
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
            "epoch and no amplification by sampling is claimed.",
        )


def strategies_of(lowered: Lowered) -> tuple[dict[str, Any], ...]:
    """One entry for each phase with correlated noise."""
    if all(part.correlation is None for part in lowered.phases):
        return ()
    from affidavit.certificate.summary import strategy_summary

    return strategy_summary.strategies_of(lowered)


def _of_streams(lowered: Lowered) -> tuple[Caveat, ...]:
    if all(part.correlation is None for part in lowered.phases):
        return ()
    from affidavit.certificate.summary import strategy_summary

    return tuple(strategy_summary.caveats(lowered))


def _of_bins(lowered: Lowered) -> Iterator[Caveat]:
    """What a reader of a plan with balls in bins and independent noise should know, if anything."""
    binned = [
        (phase, part)
        for phase, part in zip(lowered.plan.phases, lowered.phases, strict=True)
        if phase.sampling.scheme == "balls_in_bins" and part.correlation is None
    ]
    chained = lowered.of_one_record is not None
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
