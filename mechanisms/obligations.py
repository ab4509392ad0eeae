"""Obligations: what the trainer must do for the certificate to apply to its run.

A guarantee holds for the accounted mechanism, not for the intended script. Every certificate lists
the obligations of its trainer; ``checked_by`` says whether Affidavit's trainer meets them or the
user declares them.
"""

from __future__ import annotations

from collections.abc import Iterator

from affidavit.mechanisms.catalogue import INJECTED
from affidavit.mechanisms.lowering import Lowered
from affidavit.mechanisms.protocol import Obligation
from affidavit.plan import Plan

ALWAYS = (
    Obligation(
        code="clip_each_record",
        text="each record's contribution to each block is clipped to that block's l2 norm, "
        "the norm computed in at least float32",
    ),
    Obligation(
        code="every_tensor_in_one_block",
        text="every trainable tensor is in exactly one block of the plan, or is frozen",
    ),
    Obligation(
        code="noise_once_per_lot",
        text="noise is added once to the sum over the lot, whatever the microbatches and devices",
    ),
    Obligation(
        code="cryptographic_generator",
        text="sampling and noise come from a cryptographic generator, freshly keyed for each run",
    ),
    Obligation(
        code="empty_lot_counts",
        text="a lot without records still releases noise and counts as a step",
    ),
    Obligation(
        code="non_finite_is_zero",
        text="a record whose gradient is not finite contributes zero",
    ),
    Obligation(
        code="no_mixing_of_records",
        text="no layer or loss mixes records (no batch normalisation, in-batch loss or packing)",
    ),
    Obligation(
        code="charge_every_step",
        text="no more steps are run than certified; a repeated step is charged again and never "
        "reuses its noise",
    ),
)


CANARIES = Obligation(
    code="insert_the_canaries",
    text="the plan's canaries are records of the data set; whether one takes part is a fair coin "
    "of its own, drawn before the run and committed to in the first line of its record; one that "
    "takes no part contributes zero to every lot",
)


def obligations_of(lowered: Lowered) -> tuple[Obligation, ...]:
    """Return the obligations of the sampler, any trainer, the optimiser and the extras."""
    assumptions = dict.fromkeys(phase.sampled.assumption for phase in lowered.phases)
    samplers = tuple(
        Obligation(code="sampler_of_the_plan", text=assumption) for assumption in assumptions
    )
    obligations = (
        samplers + ALWAYS + lowered.mechanism.obligations + tuple(_noise_obligations(lowered))
    )
    if lowered.plan.dataset.unit == "user":
        data = lowered.plan.dataset
        shared = f", of which each belongs to at most {data.users_per_record} users"
        chosen = ", a choice that depends on who owns which record alone"
        is_shared = data.users_per_record is not None
        obligations += (
            Obligation(
                code="records_of_a_user",
                text=f"no user has more than {data.contributions_per_user} of the records"
                f"{shared * is_shared}; who has more is cut to that many before the run"
                f"{chosen * is_shared}",
                checked_by="declared",
            ),
        )
    if lowered.plan.canaries is not None:
        obligations += (CANARIES,)
    return tuple(dict.fromkeys(obligations)) + tuple(_additional_obligations(lowered.plan))


def _noise_obligations(lowered: Lowered) -> Iterator[Obligation]:
    if any(phase.has_exact_noise for phase in lowered.plan.phases):
        yield Obligation(
            code="round_to_the_grid",
            text="where the plan says exact_grid, what is released of an entry is its clipped sum "
            "plus exactly Gaussian noise, rounded to a grid whose step is a power of two, at most "
            "2^-20 of the noise's deviation",
        )
    correlated = [part for part in lowered.phases if part.correlation is not None]
    if any(phase.clip_schedule is not None for phase in lowered.plan.phases):
        yield Obligation(
            code="clip_by_the_schedule",
            text="step t clips each record to the plan's clip_schedule[t] times the clip norm; the "
            "noise does not follow it",
        )
    if not any(phase.noise.kind != "independent" for phase in lowered.plan.phases):
        return
    yield INJECTED
    for part in correlated:
        if part.correlation is not None and part.steps is not None:
            streaming = part.correlation.at(part.steps).strategy.streaming
            yield Obligation(
                code="noise_recurrence",
                text=f"at step t the noise is {streaming.recurrence}, z_t a fresh Gaussian of the "
                f"plan's standard deviation; {streaming.buffers} buffers are kept",
            )
    yield Obligation(
        code="keep_the_noise_state",
        text="the buffers of the noise are part of every checkpoint; a resumed run goes on with "
        "them, and no z is drawn anew or used twice",
    )


def _additional_obligations(plan: Plan) -> Iterator[Obligation]:
    kinds = {extra.kind for extra in plan.extra}
    if "adaptive_clipping_quantile" in kinds:
        yield Obligation(
            code="recentred_clipping_count",
            checked_by="declared",
            text="a record of the lot adds +1/2 to the clipping count if its norm is at most the "
            "clip norm and -1/2 if not; noise of the plan's standard deviation is added to that "
            "sum once; the next clip norm depends on released values only, and the noise of each "
            "release is its multiplier times the clip norm of its step",
        )
    if "repeat_and_select" in kinds:
        yield Obligation(
            code="repetitions_are_drawn",
            checked_by="declared",
            text="the number of repetitions is drawn once from the plan's distribution, whatever "
            "the results; every repetition is a fresh run of the plan, only the best is released, "
            "and hyperparameters are drawn independently of the data",
        )
        yield Obligation(
            code="score_is_accounted",
            checked_by="declared",
            text="repetitions are compared by a score of public data or of the repetition's "
            "released values, or by a metric that the plan marks each_repetition",
        )
