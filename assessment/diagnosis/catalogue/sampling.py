"""Mistakes about the records of a step and the number of steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from affidavit.assessment.diagnosis.accountant_inputs import Pair, PhaseAccount
from affidavit.assessment.diagnosis.catalogue.correlated import amplify
from affidavit.assessment.diagnosis.mistake import (
    Case,
    Change,
    PhaseFacts,
    Way,
    mistake,
    scale_noise,
)
from affidavit.plan import Scheme

UNAMPLIFIED = frozenset(get_args(Scheme)) - {"poisson", "truncated_poisson", "full_batch"}
"""The schemes whose lots are not Poisson lots."""
MAX_MICROBATCHES = 1024
PHYSICAL_BATCH_SIZES = (1, 8, 16, 32, 64, 128, 256)
DEVICE_COUNTS = (2, 4, 8, 16, 32, 64, 128, 256, 3, 6, 12, 24)
ROUND_COUNTS = (2, 3, 5, 10, 20, 50, 100)
"""The numbers that are tried, the usual ones first."""


@mistake(
    wrong="In a shuffled or fixed order each record takes part once an epoch for certain. "
    "Amplification is proved for lots that each record joins independently, and not for these.",
    source="Chua et al., arXiv:2403.17673; Kim and Fan, arXiv:2605.12994v1, appendix D",
    fix="Sample by Poisson, or claim the unamplified value.",
    field=("sampling", "scheme"),
)
def poisson_for_shuffle(case: Case) -> Iterator[Way]:
    """Use a Poisson accountant with q = B/N for other lots."""
    facts = case.first
    if facts.scheme not in UNAMPLIFIED or facts.rate >= 1:
        return
    if not facts.independent:
        yield from _correlated_as_poisson(facts)
        return
    if case.account.phases[0].pair == "without_replacement":
        return
    replaces = case.plan.adjacency == "replace_one"
    for q, words, cost in _rates(facts):
        yield Way(
            text=f"{facts.scheme} lots were accounted as Poisson lots with q = {words}",
            change=_poisson(q),
            cost=0.4 + cost,
        )
        if replaces:
            yield Way(
                text=f"{facts.scheme} lots were accounted as Poisson lots with q = {words}, "
                "at half the noise multiplier",
                change=_poisson(q, halved=True),
                cost=0.7 + cost,
            )


def _correlated_as_poisson(facts: PhaseFacts) -> Iterator[Way]:
    """Do so under correlated noise, where ``amplified_correlated`` is more specific."""
    result = facts.correlation
    for sensitivity in {1.0, result.column} if result is not None else ():
        yield Way(
            text=f"{facts.scheme} lots were accounted as Poisson lots with q = {facts.rate:.6g}, "
            f"at σ over {sensitivity:.6g}",
            change=amplify(sensitivity),
            cost=1.4,
        )


def _rates(facts: PhaseFacts) -> Iterator[tuple[float, str, float]]:
    """Yield the sampling probabilities that a loader suggests: B/N, or one over its length."""
    yield facts.rate, f"B/N = {facts.rate:.6g}", 0.0
    for lots in reversed(facts.lots):
        if lots > 1 and abs(lots * facts.rate - 1) > 1e-12:
            yield 1 / lots, f"1/{lots}, one over the loader's length", 0.7


def _poisson(q: float, *, halved: bool = False) -> Change:
    def change(account: PhaseAccount, _facts: PhaseFacts) -> PhaseAccount:
        replaces = account.distance > 1 and not halved
        pair: Pair = "replace_one" if replaces else "add_remove"
        return replace(account, known=True, probability=q, pair=pair)

    return change


@mistake(
    wrong="Replacing a record removes one contribution and adds another: the sum moves by "
    "up to 2C, so noise σC has the effect of σ/2.",
    source="Kim and Fan, arXiv:2605.12994v1, Theorem 2.1 (replace-one)",
    fix="Double the noise, or claim add_remove.",
    field=("adjacency",),
)
def adjacency_factor(case: Case) -> Iterator[Way]:
    """Use the multiplier of add/remove for replaced records."""
    if case.plan.adjacency == "replace_one":
        yield Way(
            text="replacing a record was accounted as adding or removing one, at half its distance",
            change=lambda account, _: replace(
                account,
                pair="add_remove",
                distance=account.distance / (2.0 if account.distance > 1 else 1.0),
            ),
            cost=0.6,
        )


@mistake(
    wrong="All records of a user differ between neighbouring data sets. Each is drawn and clipped "
    "by itself, so a user moves a sum by one clip norm for each of its records in the lot.",
    source="McMahan et al., arXiv:1710.06963, on user-level against example-level privacy",
    fix="Account for contributions_per_user records, sample users and clip each user's sum once "
    "(contributions_per_user: 1), or claim unit: example.",
    field=("dataset", "contributions_per_user"),
)
def user_as_example(case: Case) -> Iterator[Way]:
    """Account a user with several records as one record."""
    records = case.plan.dataset.records_per_unit
    if records > 1:
        yield Way(
            text=f"a user's {records} records were accounted as one, for users as for examples",
            change=lambda account, facts: replace(
                account, distance=account.distance / facts.records, several=False
            ),
            cost=0.6,
        )


@mistake(
    wrong="A record's chance to be in a step is that of the whole lot, over all "
    "microbatches that are accumulated before the noise is added.",
    source="Opacus documentation, virtual steps and BatchMemoryManager",
    fix="Account with q = lot size / data set size and with the steps of the optimiser.",
    field=("sampling",),
)
def microbatch_rate(case: Case) -> Iterator[Way]:
    """Use q of the physical batch, with the steps of the optimiser or of the microbatches."""
    facts = case.first
    for parts in _accumulations(facts):
        odd = 0.0 if parts & (parts - 1) == 0 else 1.5
        cost = 2.0 + 0.1 * math.log2(parts) + odd
        size = "" if facts.lot is None else f" of {facts.lot // parts}"
        yield Way(
            text=f"q was taken from a physical batch{size}, a lot being {parts} of them",
            change=_rate_divided(parts),
            cost=cost,
        )
        yield Way(
            text=f"each of {parts} physical batches{size} a lot was accounted as a lot and a "
            "step of its own",
            change=_steps_multiplied(parts),
            cost=cost + 0.6,
        )
    yield from _physical_batches(facts)


def _physical_batches(facts: PhaseFacts) -> Iterator[Way]:
    """Yield batches of a usual size that do not divide the lot."""
    lot = facts.lot
    if lot is None or facts.rate >= 1:
        return
    for size in PHYSICAL_BATCH_SIZES:
        if size < lot and lot % size:
            yield Way(
                text=f"q was taken from a physical batch of {size}, the lot being {lot}",
                change=_rate_divided(lot / size),
                cost=3.2,
            )


def _accumulations(facts: PhaseFacts) -> Iterator[int]:
    """Yield the numbers of physical batches into which a lot may have been divided."""
    if facts.rate >= 1:
        return
    for parts in range(2, MAX_MICROBATCHES + 1):
        usual = parts & (parts - 1) == 0 and parts <= 64
        if (usual and facts.lot is None) or (facts.lot is not None and facts.lot % parts == 0):
            yield parts


def _rate_divided(parts: float) -> Change:
    def change(account: PhaseAccount, _facts: PhaseFacts) -> PhaseAccount:
        q = account.probability
        return account if q is None else replace(account, probability=q / parts)

    return change


def _steps_multiplied(parts: int) -> Change:
    def change(account: PhaseAccount, _facts: PhaseFacts) -> PhaseAccount:
        q = account.probability
        if q is None:
            return account
        return replace(account, probability=q / parts, steps=account.steps * parts)

    return change


@mistake(
    wrong="Every noisy step is a release and all of them count; T is epochs divided by q, "
    "rounded up.",
    source="Opacus, int(epochs / sample_rate): 1959 steps where 1960 are run",
    fix="Give the steps that are run.",
    field=("steps",),
)
def epochs_for_steps(case: Case) -> Iterator[Way]:
    """Count T in epochs, or with the steps of an epoch rounded down."""
    facts = case.first
    if facts.rate >= 1:
        return
    seen = {facts.steps}
    for steps, words, cost in _counts(facts):
        if 0 < steps < facts.steps and steps not in seen:
            seen.add(steps)
            yield Way(
                text=f"{steps} steps were accounted instead of {facts.steps}: {words}",
                change=_steps_shared(steps / facts.steps),
                cost=cost,
            )


def _counts(facts: PhaseFacts) -> Iterator[tuple[int, str, float]]:
    """Yield other counts of the same steps, with their causes."""
    whole = {round(facts.epochs), math.floor(facts.epochs), math.ceil(facts.epochs)}
    for lots in facts.lots:
        if lots and facts.steps % lots == 0:
            whole.add(facts.steps // lots)
    for epochs in sorted(whole, key=lambda item: abs(item - facts.epochs)):
        yield epochs, "epochs were counted", 1.2
    # An epoch is at most the whole run: at the smallest rates its length overflows.
    full = math.floor(min(1 / facts.rate * (1 + 1e-12), facts.steps))
    for epochs in sorted(whole, key=lambda item: abs(item - facts.epochs)):
        yield (epochs * full, f"{epochs} epochs of the full lots alone", 1.6)
    yield math.floor(facts.epochs / facts.rate), "epochs divided by q, and cut off", 2.0
    yield facts.steps - 1, "one step was lost in rounding", 2.2


def _steps_shared(share: float) -> Change:
    return lambda account, _: replace(account, steps=max(1, round(account.steps * share)))


@mistake(
    wrong="Noise is added once to the sum over all devices, and the lot is what all devices "
    "see together.",
    source="Opacus, DistributedDPOptimizer (noise on rank 0, expected batch over all ranks)",
    fix="Give the lot of all devices together, and the noise that their sum gets.",
    field=("sampling",),
)
def world_size(case: Case) -> Iterator[Way]:
    """Miscount the lot or the noise by the number of devices."""
    for place, devices in enumerate(DEVICE_COUNTS):
        cost = 2.6 + 0.2 * place
        yield Way(
            text=f"noise of {devices} devices was counted {devices} times: the multiplier "
            "was taken so much too large",
            change=scale_noise(float(devices)),
            cost=cost + 0.4,
        )
        yield Way(
            text=f"the noise of {devices} devices was added up as √{devices}: the multiplier "
            "was taken so much too large",
            change=scale_noise(math.sqrt(devices)),
            cost=cost,
        )
        if case.first.rate < 1:
            yield Way(
                text=f"q was taken from the share of one of {devices} devices",
                change=_rate_divided(devices),
                cost=cost + 0.1,
            )


@mistake(
    wrong="A record changes the clipped mean of its whole microbatch, by up to twice the clip "
    "norm, also when it is removed.",
    source="Ponomareva et al., arXiv:2303.00654, section 5.6; TensorFlow Privacy, "
    "compute_dp_sgd_privacy_statement (used_microbatching)",
    fix="Leave one record in each microbatch, or double the noise.",
    field=("releases",),
)
def microbatch_sensitivity(case: Case) -> Iterator[Way]:
    """Account a microbatch as one record."""
    if case.plan.adjacency != "replace_one":
        yield Way(
            text="noise was taken over the clip norm of a microbatch: the multiplier was taken "
            "twice too large",
            change=scale_noise(2.0),
            cost=2.7,
        )


@mistake(
    wrong="The steps, epochs and rounds of one training compose; an accountant that is made anew "
    "for each reports the last alone.",
    source="formula: Opacus, a PrivacyEngine made in each round of a Flower client's fit()",
    fix="Keep one accountant for the whole training.",
    field=("steps",),
)
def accountant_reset(case: Case) -> Iterator[Way]:
    """Report ε of one of several steps, epochs, rounds or phases."""
    last, first = len(case.facts) - 1, case.first
    for steps, part in {1: "step", **dict.fromkeys(first.lots, "epoch")}.items():
        if 0 < steps < first.steps:
            yield Way(
                text=f"one {part} was accounted instead of {first.steps} steps",
                change=_steps_shared(steps / first.steps),
                cost=2.0,
            )
    for index in sorted({0, 1, last - 1, last}) if last else ():
        yield Way(
            text=f"phase {index} alone was accounted, of {last + 1}",
            change=_keep_phase_only(case.facts[index]),
            cost=1.6 if index == last else 2.2,
        )
    for place, rounds in enumerate(ROUND_COUNTS):
        if first.steps % rounds == 0:
            yield Way(
                text=f"{first.steps // rounds} steps were accounted instead of "
                f"{first.steps}: the last of {rounds} rounds",
                change=_steps_shared(1 / rounds),
                cost=2.9 + 0.1 * place,
            )


def _keep_phase_only(phase: PhaseFacts) -> Change:
    return lambda account, facts: account if facts is phase else replace(account, steps=0)
