"""Mistakes about unamplified runs: correlated noise and repeated participation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from affidavit.assessment.diagnosis.accountant_inputs import PhaseAccount
from affidavit.assessment.diagnosis.mistake import (
    Case,
    Change,
    Correlation,
    PhaseFacts,
    Way,
    mistake,
)

_MATRIX = "Denisov et al., arXiv:2202.08312; Choquette-Choo et al., arXiv:2211.06530"


@mistake(
    wrong="What counts is how far a record moves N⁻¹ of the stream: the largest column norm of "
    "the inverse (κ). The column norm of the injected N is smaller.",
    source="Wang, An Optimization View of DP LLM Fine-tuning, Theorem 7",
    fix="Scale the noise by κ = √((1-λ^2T)/(1-λ²)), times what more participations cost.",
    field=("noise",),
)
def injection_norm(case: Case) -> Iterator[Way]:
    """Use the column norm of the injected N instead of that of its inverse."""
    result = case.first.correlation
    if result is None or result.injected >= result.sensitivity * (1 - 1e-9):
        return
    named = "√(1+λ²)" if result.kind == "bidiagonal" else "the column norm of N"
    yield from _with_sensitivity(
        case,
        result.injected,
        f"the noise was scaled by {named} = {result.injected:.6g} "
        f"instead of κ = {result.column:.6g}",
        0.5 if result.kind == "bidiagonal" else 1.2,
    )
    if result.participations > 1:
        root = math.sqrt(result.participations)
        yield from _with_sensitivity(
            case,
            result.injected * root,
            f"the noise was scaled by {named} = {result.injected:.6g} instead of κ = "
            f"{result.column:.6g}, times √{result.participations} for as many participations",
            0.8 if result.kind == "bidiagonal" else 1.5,
        )


@mistake(
    wrong="Noise that is subtracted again in the next step hides less: the whole run is one "
    "Gaussian mechanism with sensitivity sens(N⁻¹).",
    source="Wang, An Optimization View of DP LLM Fine-tuning, Theorem 7",
    fix="Account the run as one release with sensitivity sens(N⁻¹).",
    field=("noise",),
)
def no_kappa(case: Case) -> Iterator[Way]:
    """Account correlated noise as independent noise at the same σ."""
    result = case.first.correlation
    if result is None:
        return
    sampled = case.first.scheme == "poisson" and case.first.rate < 1
    yield Way(  # under sampling amplified_correlated is more likely
        text="noise that is correlated across steps was accounted as independent at the same σ",
        change=_independent,
        cost=0.9 if sampled else 0.7 if result.kind == "bidiagonal" else 1.1,
    )


@mistake(
    wrong="Sampling amplifies a step like this only if its noise is fresh. With correlated noise "
    "it amplifies the white part, or the run as a whole, and either by less.",
    source=f"{_MATRIX}; Choquette-Choo et al., arXiv:2306.08153",
    fix="Account the run as certified here, or sample by cyclic Poisson, which costs less.",
    field=("noise",),
)
def amplified_correlated(case: Case) -> Iterator[Way]:
    """Apply Poisson amplification to noise that is correlated across steps."""
    facts = case.first
    result = facts.correlation
    if result is None or facts.rate >= 1:
        return
    ways = [(result.column, "at σ over the sensitivity of one participation", 0.0)]
    if result.sensitivity > result.column * (1 + 1e-9):
        ways.append((result.sensitivity, "at σ over the sensitivity of the whole run", 0.4))
    if result.column > 1 + 1e-9:
        ways.append((1.0, "at σ itself", 0.1))
    for sensitivity, words, cost in ways:
        yield Way(
            text=f"each step was accounted as amplified by sampling with q = {facts.rate:.6g}, "
            + words,
            change=amplify(sensitivity),
            cost=0.6 + cost,
        )


@mistake(
    wrong="The added noise determines the guarantee, by sens(N⁻¹). The sensitivity of another "
    "factorisation says nothing about it.",
    source="public trainers that inject other noise than they account; " + _MATRIX,
    fix="Give the noise matrix N that is really injected, and account its inverse.",
    field=("noise",),
)
def injected_noise(case: Case) -> Iterator[Way]:
    """Use the sensitivity of another strategy than the injected noise."""
    result = case.first.correlation
    if result is None:
        return
    extra = 0.0 if result.kind in {"matrix", "toeplitz_inverse"} else 0.8
    for sensitivity, words, cost in (
        (1.0, "1", 0.0),
        (math.sqrt(result.participations), f"√k = √{result.participations}", 0.2),
    ):
        if sensitivity < result.sensitivity * (1 - 1e-9):
            yield from _with_sensitivity(
                case,
                sensitivity,
                f"the strategy's sensitivity was taken as {words}; that of the noise really "
                f"injected, sens(N⁻¹), is {result.sensitivity:.6g}",
                0.8 + extra + cost,
            )


@mistake(
    wrong="A record that takes part in several steps moves the run by all of them.",
    source=_MATRIX,
    fix="Account with the sensitivity of k participations, b steps apart.",
    field=("noise",),
)
def single_epoch_sensitivity(case: Case) -> Iterator[Way]:
    """Use the sensitivity of one participation for several."""
    result, account = case.first.correlation, case.account.phases[0]
    if case.first.independent and account.known and account.probability is None:
        if account.participations > 1:
            yield Way(
                text="the sensitivity of one participation was used for "
                f"{account.participations} participations",
                change=_participate_once,
                cost=1.0,
            )
        return
    if result is None or result.participations < 2:
        return
    yield from _with_sensitivity(
        case,
        result.column,
        f"the sensitivity of one participation, {result.column:.6g}, was used for "
        f"{result.participations} participations, whose is {result.sensitivity:.6g}",
        0.5,
    )


@mistake(
    wrong="With independent noise each of k participations costs, and together they move the "
    "run by √k.",
    source="a public matrix-mechanism trainer: 4.4 reported where 633.9 is true (T = 1000)",
    fix="Account with sensitivity √k, or sample by Poisson.",
    field=("sampling", "scheme"),
)
def identity_once(case: Case) -> Iterator[Way]:
    """Account independent noise over k unamplified participations with sensitivity 1."""
    account, result = case.account.phases[0], case.first.correlation
    if account.probability is not None or not (case.first.independent or _is_identity(result)):
        return
    if account.participations > 1 and account.known:
        yield Way(
            text=f"{account.participations} participations of a record were accounted with "
            "sensitivity 1 over the whole run",
            change=_participate_once,
            cost=0.5,
        )


def _participate_once(account: PhaseAccount, _facts: PhaseFacts) -> PhaseAccount:
    return replace(account, participations=1, sensitivity=None)


def _is_identity(correlation: Correlation | None) -> bool:
    return correlation is not None and correlation.injected == 1 and correlation.column <= 1 + 1e-9


def _with_sensitivity(case: Case, sensitivity: float, text: str, cost: float) -> Iterator[Way]:
    """Yield the run with another sensitivity, unamplified and, if the plan samples, amplified."""
    facts = case.first
    if facts.scheme != "poisson" or facts.rate >= 1:
        yield Way(text=text, change=_sensitivity(sensitivity), cost=cost)
        return
    yield Way(
        text=f"{text}, in a run accounted as one release",
        change=_sensitivity(sensitivity),
        cost=cost + 0.3,
    )
    yield Way(
        text=f"{text}, in a run accounted step by step at its sampling probability",
        change=amplify(sensitivity),
        cost=cost + 0.2,
    )


def _sensitivity(value: float) -> Change:
    return lambda account, _: replace(account, known=True, probability=None, sensitivity=value)


def amplify(sensitivity: float) -> Change:
    """Return the change that samples each step at the plan's rate, at σ over ``sensitivity``."""

    def change(account: PhaseAccount, facts: PhaseFacts) -> PhaseAccount:
        return replace(
            account, known=True, probability=facts.rate, sensitivity=sensitivity, pair="add_remove"
        )

    return change


def _independent(account: PhaseAccount, facts: PhaseFacts) -> PhaseAccount:
    sampled = facts.scheme == "poisson" and facts.rate < 1
    return replace(
        account,
        known=True,
        sensitivity=None,
        probability=facts.rate if sampled else None,
        pair="replace_one" if sampled and account.distance > 1 else "add_remove",
    )
