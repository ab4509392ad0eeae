"""Ledgers and reservations as the API answers them.

ε, δ and costs are decimal strings rounded up, as in a certificate. Of the three numbers in
``spent`` the first decides; the other two are for reading and say so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from fractions import Fraction
from typing import Any

from affidavit.accountants import decimal_down, decimal_up
from affidavit.accountants.privacy_filter import DELTA_UNIT, MOST_FORECAST, UNIT, Cost
from affidavit.service.ledger.rows import KeptLedger, Reservation
from affidavit.service.ledger.state import NONE

MOST_ENTRIES = 200
"""Reservations that a ledger's document lists, the latest first; ``entries_total`` counts all."""

FILTER_MEANING = (
    "The least ε at which the filter that decides would have admitted what was spent; valid "
    "when later plans are chosen in view of earlier results. A run whose record does not conform "
    "is counted as certified, and may have spent more."
)
COMPOSED_MEANING = (
    "What the same runs cost had all of them been fixed in advance; no bound for plans that "
    "were chosen in view of results, and it decides nothing."
)
SUM_MEANING = "The certificates' ε and δ added up; it decides nothing."


def ledger_document(
    kept: KeptLedger,
    entries: Sequence[Reservation],
    composed: dict[str, Any],
    forecast: dict[str, Any] | None,
) -> dict[str, Any]:
    """One ledger with its entries; ``forecast`` stands where a certificate was asked about."""
    found = summary(kept)
    found["spent"]["composed"] = {
        **composed,
        "delta": kept.state.budget.delta,
        "decides": False,
        "meaning": COMPOSED_MEANING,
    }
    found |= {
        "entries": [reservation_document(entry) for entry in entries[:MOST_ENTRIES]],
        "entries_total": len(entries),
    }
    return found if forecast is None else {**found, "forecast": forecast}


def summary(kept: KeptLedger) -> dict[str, Any]:
    """One ledger without its entries and without what takes time to compute."""
    state = kept.state
    spent = spent_epsilon(kept)
    budget = float(state.budget.epsilon)
    return {
        **kept.scope.as_dict(),
        "budget": {
            "version": state.budget.number,
            "epsilon": state.budget.epsilon,
            "delta": state.budget.delta,
        },
        "runs": state.runs,
        "exhausted": state.exhausted(kept.filter),
        "spent": {
            "filter": {
                "epsilon": _up(spent),
                "delta": state.budget.delta,
                "decides": True,
                "meaning": FILTER_MEANING,
            },
            "sum": {
                "epsilon": _up(state.spent.epsilon.value(UNIT)),
                "delta": decimal_up(state.spent.delta.value(DELTA_UNIT)),
                "decides": False,
                "meaning": SUM_MEANING,
            },
        },
        "remaining": {"epsilon": decimal_down(_left(budget, spent))},
    }


def _left(budget: float, spent: float) -> float:
    """What ``spent`` leaves of ``budget``, rounded down; all of it where nothing was spent."""
    if spent >= budget:
        return 0.0
    nearest = budget - spent
    exact = Fraction(budget) - Fraction(spent)
    return nearest if nearest <= exact else math.nextafter(nearest, 0.0)


def spent_epsilon(kept: KeptLedger) -> float:
    """The filter's reading of what was spent, at the budget's δ; infinity where it has none.

    Of a run admitted alone it is the certificate's ε, as long as that holds at the budget's δ.
    """
    state = kept.state
    if state.runs != 1 or not state.alone.units:
        return state.within(kept.filter).spent(state.spent)
    if state.spent.delta.at_most(float(state.budget.delta), DELTA_UNIT):
        return state.spent.epsilon.value(UNIT)
    # A later budget has a smaller δ, at which the certificate says nothing. The filter does, and
    # may use all of that δ for one run: its certificate is not relied upon, and so takes none.
    return replace(state, alone=NONE).within(kept.filter).spent(state.spent)


def reservation_document(found: Reservation) -> dict[str, Any]:
    """One reservation as it stands."""
    return {
        "id": found.id,
        **found.scope.as_dict(),
        "certificate": found.certificate_id,
        "issue": found.issue,
        "plan_digest": found.plan_digest,
        "name": found.name,
        "state": found.state,
        "steps": {"certified": found.certified_steps, "run": found.steps_run},
        "record": found.record,
        "admitted_by": found.rule,
        "reserved": cost_document(found.cost),
        "charged": cost_document(found.charged),
        "reserved_by": found.reserved_by,
        "reserved_at": _instant(found.reserved_at),
        "changed_at": _instant(found.changed_at),
    }


def cost_document(cost: Cost) -> dict[str, Any]:
    """A cost in the two forms that people compare: ε with δ, and μ where it is one Gaussian."""
    mu_squared = cost.mu_squared.value(UNIT)
    return {
        "epsilon": _up(cost.epsilon.value(UNIT)),
        "delta": decimal_up(cost.delta.value(DELTA_UNIT)),
        "mu": decimal_up(math.sqrt(mu_squared) * (1 + 1e-15))
        if math.isfinite(mu_squared)
        else None,
    }


def forecast_document(
    kept: KeptLedger, cost: Cost, certificate_id: str, *, certain: bool
) -> dict[str, Any]:
    """How many more runs of ``cost`` fit, by the filter that decides."""
    state = kept.state
    runs = state.within(kept.filter).forecast(state.spent, cost)
    if runs == 0 and state.rule_for(kept.filter, cost, certain=certain) is not None:
        runs = 1
    more = "at least " if runs == MOST_FORECAST else ""
    what = "run" if runs == 1 else "runs"
    return {
        "certificate": certificate_id,
        "runs": runs,
        "at_least": runs == MOST_FORECAST,
        "message": f"{more}{runs} more {what} of this size fit."
        if runs
        else "no run of this size fits.",
        "cost": cost_document(cost),
    }


def position_document(
    kept: KeptLedger, cost: Cost | None, *, certain: bool, why: str | None
) -> dict[str, Any]:
    """Where a ledger stood when a certificate was issued, as its statement says it.

    ``cost`` is None, and ``why`` the reason, where the plan's cost is not bounded.
    """
    state = kept.state
    found: dict[str, Any] = {
        **kept.scope.as_dict(),
        "at": "issue",
        "seq": state.seq,
        "budget": {
            "version": state.budget.number,
            "epsilon": state.budget.epsilon,
            "delta": state.budget.delta,
        },
        "spent": {"epsilon": _up(spent_epsilon(kept))},
    }
    if cost is None:
        return {**found, "with_this_run": None, "fits": False, "reason": why}
    rule = state.rule_for(kept.filter, cost, certain=certain)
    after = state.within(kept.filter).spent(state.spent + cost)
    if rule == "alone":
        after = cost.epsilon.value(UNIT)
    return {**found, "with_this_run": {"epsilon": _up(after)}, "fits": rule is not None}


def _up(value: float) -> str:
    return decimal_up(value)


def _instant(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")
