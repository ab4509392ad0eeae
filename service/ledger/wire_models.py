r"""Wire models of ledgers and reservations.

ε, δ and costs are numbers rounded outward, or null if they are not bounded. The first number in
``spent`` decides; the other two are for information, which their fields state.

>>> BudgetRequest.from_data({"adjacency": "add_remove", "epsilon": 8, "delta": 1e-5}).unit
'example'
>>> SettlementRequest.from_data({"steps_run": -1})
Traceback (most recent call last):
affidavit.service.core.errors.MalformedRequest: invalid_value at /steps_run: ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Annotated, Any, Literal

from fastapi import Path as PathParameter
from pydantic import Field

from affidavit.accountants import decimal_down, decimal_up
from affidavit.accountants.privacy_filter import (
    MAX_EPSILON,
    MAX_FORECAST,
    UNIT,
    Cost,
)
from affidavit.client import (
    Adjacency,
    Forecast,
    Unit,
)
from affidavit.plan import Integer, Real
from affidavit.service.core.teams import TeamName
from affidavit.service.core.wire_models import (
    UUID,
    Comment,
    Digest,
    RequestModel,
)
from affidavit.service.ledger.state import (
    StoredLedger,
    StoredReservation,
    charge_of,
)

DatasetName = Annotated[
    str, PathParameter(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="As plans name it.")
]
ReservationId = Annotated[str, PathParameter(pattern=UUID, description="The reservation's `id`.")]


# ---- requests ------------------------------------------------------------------------


class BudgetRequest(RequestModel):
    """A version of the budget of one privacy unit and adjacency of a data set."""

    noun = "a budget"
    unit: Unit = "example"
    adjacency: Adjacency
    epsilon: Annotated[Real, Field(ge=1e-6, le=MAX_EPSILON)]
    delta: Annotated[Real, Field(ge=1e-15, lt=1)]
    reason: Comment = ""
    team: TeamName | None = None

    def decimals(self) -> tuple[str, str]:
        """Return ε and δ as decimals that read back as these doubles."""
        return decimal_down(self.epsilon, 17), decimal_down(self.delta, 17)

    def proposal(self, dataset: str, team: str | None) -> dict[str, str]:
        """Return the content that several administrators agree on: all but the reason."""
        epsilon, delta = self.decimals()
        scope = {"dataset": dataset, "unit": self.unit, "adjacency": self.adjacency}
        owner = {} if team is None else {"team": team}
        return {**scope, "epsilon": epsilon, "delta": delta, **owner}


class GrantRequest(RequestModel):
    """A team's access to another team's data set."""

    noun = "a grant"
    team: TeamName
    may: Literal["reserve", "read", "nothing"]
    reason: Comment = ""


class ReservationRequest(RequestModel):
    """The certificate to reserve a run of."""

    noun = "a reservation"
    certificate: Digest


class CommitRequest(RequestModel):
    """An empty object; the path names the reservation."""

    noun = "a commitment"


class SettlementRequest(RequestModel):
    """The steps that were run (all if omitted), and the digest of the run's record."""

    noun = "a settlement"
    steps_run: Annotated[Integer, Field(ge=0)] | None = None
    record: Digest | None = None


class ReleaseRequest(RequestModel):
    """The reason of a release."""

    noun = "a release"
    reason: Comment = ""


# ---- responses -----------------------------------------------------------------------


def forecast_of(
    ledger: StoredLedger, cost: Cost, certificate_id: str, *, certain: bool
) -> Forecast:
    """Forecast runs of ``cost``; ``certain`` as in ``LedgerState.rule_for``."""
    state = ledger.state
    budget = state.budget_for(ledger.filter, cost)
    runs = budget.forecast(state.spent, cost)
    epsilons = [decimal_up(budget.spent(state.spent + cost.times(runs + n)), 6) for n in (0, 1)]
    sums = f": after them ε ≤ {epsilons[0]} of {state.budget.epsilon}; one more needs {epsilons[1]}"
    if runs == 0 and state.rule_for(ledger.filter, cost, certain=certain) is not None:
        runs, sums = 1, ", by its own certificate"
    at_least = runs == MAX_FORECAST
    count = f"{'at least ' if at_least else ''}{runs} more {'run' if runs == 1 else 'runs'}"
    return Forecast(
        certificate=certificate_id,
        runs=runs,
        at_least=at_least,
        message=f"{count} of this size fit{'' if at_least else sums}."
        if runs
        else f"no run of this size fits: it needs {epsilons[1]} of {state.budget.epsilon}.",
        cost=charge_of(cost),
    )


def position_of(
    ledger: StoredLedger, cost: Cost | None, *, certain: bool, reason: str | None
) -> dict[str, Any]:
    """Build the state of a ledger for the signed statement of a certificate.

    ``cost`` is None if the plan's cost is not bounded; ``reason`` then says why.
    """
    state = ledger.state
    position: dict[str, Any] = {
        **ledger.scope.as_dict(),
        "at": "issue",
        "seq": state.seq,
        "budget": {
            "version": state.budget.number,
            "epsilon": state.budget.epsilon,
            "delta": state.budget.delta,
        },
        "spent": {"epsilon": decimal_up(ledger.spent_epsilon())},
    }
    if cost is None:
        return {**position, "with_this_run": None, "fits": False, "reason": reason}
    rule = state.rule_for(ledger.filter, cost, certain=certain)
    after = state.budget_for(ledger.filter, cost).spent(state.spent + cost)
    if rule == "alone":
        after = cost.epsilon.value(UNIT)
    return {
        **position,
        "with_this_run": {"epsilon": decimal_up(after)},
        "fits": rule is not None,
    }


def amounts_of(ledger: StoredLedger, open_: Mapping[str, Cost]) -> dict[str, Decimal] | None:
    """Split the budget's ε into spent, committed, reserved and free amounts.

    ``open_`` has the costs of reservations by state. Each amount is the increase, rounded up, of
    the filter's ε by its runs. Returns None if that ε is not bounded.
    """
    state, budget = ledger.state, Decimal(ledger.state.budget.epsilon)
    total = state.spent - open_["reserved"] - open_["committed"]
    result, before = {}, Decimal(0)
    for name in ("spent", "committed", "reserved"):
        total = total if name == "spent" else total + open_[name]
        is_nonzero = total != Cost.zero(len(total.renyi))
        spent = replace(ledger, state=replace(state, spent=total)).spent_epsilon()
        if not math.isfinite(spent):
            return None
        after = Decimal(decimal_up(spent, 5)) if is_nonzero else before
        # Rounding up must not exhaust a budget that is not exceeded.
        after = min(after, budget) if spent <= float(budget) else after
        result[name], before = after - before, after
    return {**result, "free": max(Decimal(0), budget - before)}


def marginal_epsilon(ledger: StoredLedger, *runs: StoredReservation) -> float | None:
    """Return by how much the filter's ε would fall without ``runs``, or None if it is not bounded.

    The filter composes all runs and converts to ε once, so these do not sum to the ε in use.
    """
    charged = [run for run in runs if run.state != "released"]
    if not charged:
        return 0.0
    without = ledger.state
    for run in charged:
        without = without.with_release(run.current_cost, run.admitted_by)
    before = 0.0
    if without.spent != Cost.zero(len(without.spent.renyi)):
        before = replace(ledger, state=without).spent_epsilon()
    spent = ledger.spent_epsilon()
    return max(0.0, spent - before) if math.isfinite(spent) else None
