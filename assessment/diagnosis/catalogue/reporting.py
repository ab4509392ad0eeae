"""Mistakes in the reported result."""

from __future__ import annotations

from collections.abc import Iterator

from affidavit.assessment.diagnosis.mistake import (
    Case,
    Way,
    metrics,
    mistake,
)

USUAL_DELTAS = (1e-5, 1e-6, 1e-4, 1e-3, 1e-7, 1e-2)


@mistake(
    wrong="The central limit describes what many steps tend to, and lies below the truth at "
    "any number of steps; it bounds nothing.",
    source="Opacus' GDP accountant, below the truth on 12 of 13 subsampled plans, by up to "
    "73 %; Gopi et al., arXiv:2106.02848",
    fix="Use an accountant that proves a bound.",
    field=("target",),
)
def gdp_clt(_case: Case) -> Iterator[Way]:
    """Report the central-limit approximation as a bound."""
    yield Way(text="the central-limit approximation was reported", central_limit=True, cost=0.9)


@mistake(
    wrong="ε falls as δ grows, and a guarantee is the pair of both; with δ of 1/N or more "
    "publishing a whole record is allowed.",
    source="Dwork and Roth (2014), section 2.3",
    fix="Report ε at the δ that is stated, which is well below 1/N.",
    field=("target", "delta"),
)
def loose_delta(case: Case) -> Iterator[Way]:
    """Report ε at a larger δ."""
    tried = set()
    for delta, words, cost in _deltas(case):
        if case.account.delta < delta < 1 and delta not in tried:
            tried.add(delta)
            yield Way(
                text=f"ε was taken at δ = {words} instead of {case.account.delta:g}",
                delta=delta,
                cost=cost,
            )


@mistake(
    wrong="Whatever is computed from the data and released counts, whether or not it trains the "
    "model: metrics, quantiles, statistics for normalisation.",
    source="Dwork and Roth (2014), section 3.5 (composition)",
    fix="Account for all releases together, or compute metrics on public data.",
    field=("extra",),
)
def uncounted_release(case: Case) -> Iterator[Way]:
    """Account training without the other releases."""
    if case.extras.selection is None and (
        case.extras.released_once or case.extras.released_per_repetition
    ):
        yield Way(text="the releases beside training were left out", extra=(), cost=0.8)


@mistake(
    wrong="Choosing the best of several runs on the data releases more than one of them does: "
    "which one was chosen depends on all.",
    source="Papernot and Steinke, arXiv:2110.03620",
    fix="Account for the selection, or tune on public data.",
    field=("extra",),
)
def uncounted_selection(case: Case) -> Iterator[Way]:
    """Account the chosen run without the selection."""
    extras = case.extras
    if extras.selection is None:
        return
    beside = metrics(extras)
    if beside is not None:
        yield Way(
            text="the chosen run was accounted as if there were no others", extra=beside, cost=0.6
        )
    if beside != ():
        yield Way(
            text="the training of the chosen run was accounted, and nothing else that is released",
            extra=(),
            cost=1.4,
        )


def beyond_one_record(delta: float, size: int | None) -> Way:
    """Return the way of a correct claim at a δ of 1/N or more."""
    return Way(
        code="loose_delta",
        text=f"ε was taken at δ = {delta:g}, which is not below 1/N"
        + ("" if size is None else f" = {1 / size:.4g}"),
    )


def _deltas(case: Case) -> Iterator[tuple[float, str, float]]:
    size = case.plan.dataset.size
    for place, delta in enumerate(USUAL_DELTAS):
        yield delta, f"{delta:g}", 1.4 + 0.3 * place
    for factor in (10, 2, 100, 5):
        yield factor * case.account.delta, f"{factor * case.account.delta:.4g}", 2.6
    if size is not None:
        yield 1 / size, f"1/N = {1 / size:.4g}", 1.5
        yield 1 / (2 * size), f"1/(2N) = {1 / (2 * size):.4g}", 1.9
        yield size**-1.1, f"N^-1.1 = {size**-1.1:.4g}", 2.0
        yield 1 / (10 * size), f"1/(10N) = {1 / (10 * size):.4g}", 2.4
