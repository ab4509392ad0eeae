"""Mistakes about the releases of one step and their sensitivity."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from affidavit.assessment.diagnosis.accountant_inputs import PhaseAccount
from affidavit.assessment.diagnosis.mistake import (
    Case,
    Change,
    PhaseFacts,
    Way,
    mistake,
    scale_noise,
)
from affidavit.mechanisms import joint_noise_multiplier, noise_multiplier
from affidavit.plan import FIXED_ORDER, Phase

MAX_LONE_BLOCKS = 4
"""The most distinct blocks that are tried as the only counted one."""


@mistake(
    wrong="All blocks of a step see the same lot: a record is in all of them or in none. "
    "Together they are one release with the joint noise multiplier (Σ count/σ²)^(-1/2). "
    "Sampling amplifies that one release, not each block.",
    source="Kim and Fan, arXiv:2605.12994v1, Theorem 2.1 against Table 3",
    fix="Account the blocks of a step as one release at the joint noise multiplier.",
    field=("releases",),
)
def independent_blocks(case: Case) -> Iterator[Way]:
    """Account K same-lot blocks as K·T independently sampled releases."""
    blocks, steps = case.first.blocks, case.first.steps
    if _per_block(case) and blocks > 1:
        yield Way(
            text=f"the {blocks} blocks of each of {steps} steps were accounted as "
            f"{blocks * steps} releases with a lot of its own for each",
            change=lambda account, _: replace(account, blocks="independent"),
            cost=0.6,
        )


@mistake(
    wrong="Every block of a step is released, so each of them costs.",
    source="Kim and Fan, arXiv:2605.12994v1, Theorem 2.1",
    fix="Account the blocks of a step as one release at the joint noise multiplier.",
    field=("releases",),
)
def single_block(case: Case) -> Iterator[Way]:
    """Account one block alone, or all releases except one."""
    if not _per_block(case) or case.first.blocks < 2:
        return
    extra = 0.0 if case.plan.optimizer.name.startswith("dp_muon") else 0.8
    for place, sigma in enumerate(_distinct_sigmas(case.plan.phases[0])[:MAX_LONE_BLOCKS]):
        yield Way(
            text=f"one block was accounted alone at σ = {sigma:.6g}, and the other "
            f"{case.first.blocks - 1} were forgotten",
            change=_count_one_block(sigma),
            cost=0.8 + extra + 0.3 * place,
        )
    phase = case.plan.phases[0]
    if len(phase.releases) > 1 and len(case.plan.phases) == 1:
        for release in phase.releases:
            stored = [item for item in phase.releases if item is not release]
            joint = joint_noise_multiplier(phase.model_copy(update={"releases": tuple(stored)}))
            if joint is not None and sum(entry.count for entry in stored) > 1:
                yield Way(
                    text=f"the release {release.name} was forgotten",
                    change=_count_one_block(joint),
                    cost=2.5,
                )


@mistake(
    wrong="Layers that are each clipped to C can move by C all at once: the whole gradient "
    "moves by √(ΣC²).",
    source="McMahan et al., arXiv:1812.06210, section 2.1 (per-layer clipping)",
    fix="Account with √(ΣC²), or clip each of K layers to C/√K.",
    field=("releases",),
)
def clip_not_joint(case: Case) -> Iterator[Way]:
    """Account per-layer clipping to C each with sensitivity C."""
    phase = case.plan.phases[0]
    if not _per_block(case) or case.first.blocks < 2:
        return
    sigmas = [float(noise_multiplier(r)) for r in phase.releases]
    stds = [sigma * r.clip_norm for sigma, r in zip(sigmas, phase.releases, strict=True)]
    if max(stds) > min(stds) * (1 + 1e-9) and max(sigmas) > min(sigmas):
        return  # neither one noise nor one multiplier, so that it is not one clipped gradient
    extra = 0.8 if case.plan.optimizer.name.startswith("dp_muon") else 0.0
    norms = sorted({release.clip_norm for release in phase.releases}, reverse=True)
    true = math.sqrt(math.fsum(r.count * r.clip_norm**2 for r in phase.releases))
    for place, norm in enumerate(norms[:MAX_LONE_BLOCKS]):
        yield Way(
            text=f"{case.first.blocks} layers, each clipped to its own norm, were accounted "
            f"with sensitivity {norm:.6g} instead of √(ΣC²) = {true:.6g}",
            change=_count_one_block(sigmas[0] if max(sigmas) == min(sigmas) else stds[0] / norm),
            cost=0.7 + extra + 0.3 * place,
        )


@mistake(
    wrong="Clipping after the combination bounds a record by C whatever the filter, so the "
    "noise must be σC. Dividing it by the filter's norm leaves less. Combining sums that are "
    "already clipped leaves a sensitivity of (|c| + |1-c|) C.",
    source="Opacus research/disk_optimizer, KFOptimizer; Zaki, thesis, section 4.3",
    fix="Combine the two gradients, then clip to C, then add noise σC.",
    field=("optimizer",),
)
def filter_norm(case: Case) -> Iterator[Way]:
    """Account DiSK without its division of the noise or its combination after clipping."""
    filtered, optimizer = case.filter, case.plan.optimizer
    if filtered is None:
        return
    late = optimizer.combine == "after_clipping"
    divided = optimizer.noise_divisor == "filter_norm"
    reach, norm = filtered.distance, filtered.norm
    if divided:
        yield Way(
            text=f"the noise was divided by the filter's norm {norm:.6g}, and the accountant was "
            "given the multiplier before the division",
            change=lambda account, _: replace(account, scale=account.scale * norm),
            cost=0.5,
        )
    if late and reach > 1:
        yield Way(
            text="two sums that were clipped before they are combined were accounted with "
            f"sensitivity C; it is {reach:.6g} C",
            change=lambda account, _: replace(account, distance=account.distance / reach),
            cost=0.5,
        )
    if late and reach > 1 and divided:
        yield Way(
            text=f"the noise was divided by the filter's norm {norm:.6g}, and the sums were "
            "combined after clipping; the accountant was given neither",
            change=lambda account, _: replace(
                account, scale=account.scale * norm, distance=account.distance / reach
            ),
            cost=0.7,
        )
    if not late and not divided:
        for factor, words, cost in (
            (norm, "which is what it was before its division by the filter's norm", 0.8),
            (1 / norm, "as divided by the filter's norm", 1.2),
            (reach, "as if two clipped sums could not move by more than one", 1.6),
        ):
            yield Way(
                text=f"the accountant was given {factor:.6g} times this noise, {words}",
                change=scale_noise(factor),
                cost=cost,
            )


@mistake(
    wrong="The error state is made of raw gradients and carries a record into every later "
    "release. Its sensitivity is neither C₁ nor C₁ + C₂, and sampling does not amplify.",
    source="564612540/DiceSGD (optimizers_utils); Zaki, thesis, section 4.3",
    fix="Drop the error feedback, or certify it with a bound that is proved for it.",
    field=("optimizer", "name"),
)
def error_feedback(case: Case) -> Iterator[Way]:
    """Account DP-Dice as plain DP-SGD with C₁ or C₁ + C₂."""
    optimizer = case.plan.optimizer
    if optimizer.name != "dp_dice":
        return
    yield Way(
        text="the run was accounted as DP-SGD with clip norm C₁, without its error feedback",
        change=_as_dp_sgd(1.0),
        cost=0.5,
    )
    norm = case.plan.phases[0].releases[0].clip_norm
    second = (optimizer.error_clip_norm or norm) / norm
    yield Way(
        text="the run was accounted as DP-SGD with sensitivity C₁ + C₂, as if the clipped error "
        "were divided by the lot size too",
        change=_as_dp_sgd(1 + second),
        cost=0.6,
    )
    if case.first.lot is not None:
        yield Way(
            text="the run was accounted as DP-SGD with sensitivity C₁/B + C₂ of the mean",
            change=_as_dp_sgd(1 + second * case.first.lot),
            cost=0.9,
        )


@mistake(
    wrong="Noise σC belongs on the sum of the clipped gradients, and σC/B on their mean.",
    source="Abadi et al., arXiv:1607.00133, Algorithm 1",
    fix="State the noise on the sum (noise_multiplier, or noise_std on the sum).",
    field=("releases",),
)
def sum_or_mean(case: Case) -> Iterator[Way]:
    """Take noise on the sum for noise on the mean."""
    lot = case.first.lot or case.plan.dataset.size
    if case.first.scheme == "full_batch":
        lot = case.plan.dataset.size
    if lot is None or lot < 2:
        return
    yield Way(
        text=f"noise on the sum was read as noise on the mean: the multiplier was taken {lot} "
        "times too large",
        change=scale_noise(float(lot)),
        cost=1.5,
    )


@mistake(
    wrong="The noise multiplier is a standard deviation, σ; σ² is the variance.",
    source="formula: N(0, σ²C²I) of Abadi et al., arXiv:1607.00133, Algorithm 1",
    fix="State the standard deviation of the noise over the clip norm.",
    field=("releases",),
)
def variance_or_deviation(case: Case) -> Iterator[Way]:
    """Take the square or the root of the noise multiplier for it."""
    sigmas = {sigma for phase in case.plan.phases for sigma in _distinct_sigmas(phase)}
    if len(sigmas) > 1:
        return
    (sigma,) = sigmas
    # Either makes the noise look larger than it is.
    power, words = (2.0, "its square, the variance") if sigma > 1 else (0.5, "its root")
    yield Way(
        text=f"{sigma**power:.6g} was accounted as the noise multiplier: {words}",
        change=scale_noise(sigma ** (power - 1)),
        cost=2.2,
    )


def _per_block(case: Case) -> bool:
    return all(phase.clipping == "per_block" for phase in case.plan.phases)


def _distinct_sigmas(phase: Phase) -> list[float]:
    """Return the distinct multipliers of the blocks, the most frequent first."""
    counts: dict[float, int] = {}
    for release in phase.releases:
        sigma = float(noise_multiplier(release))
        counts[sigma] = counts.get(sigma, 0) + release.count
    return sorted(counts, key=lambda sigma: -counts[sigma])


def _count_one_block(sigma: float) -> Change:
    return lambda account, _: replace(account, blocks="alone", lone=sigma)


def _as_dp_sgd(share: float) -> Change:
    """Return the change to DP-SGD with the plan's sampler and sensitivity ``share`` times C₁."""

    def change(account: PhaseAccount, facts: PhaseFacts) -> PhaseAccount:
        sampled = facts.scheme not in FIXED_ORDER and facts.rate < 1
        return replace(
            account,
            known=True,
            distance=account.distance * share,
            probability=facts.rate if sampled else account.probability,
        )

    return change
