"""Ledgers and reservations as values: the sums of events, and what a budget admits next.

The decisions are pure functions, so that the service and a replay of its rows decide alike.

The tables have append-only rows:

``ledgers``
    One row per data set, privacy unit and adjacency, the scope within which costs are added. The
    orders, weights and Gaussian share of its filter never change.
``reservations``
    A reserved run: the certificate, its steps, its cost at the filter's orders (decimals rounded
    up) and its events.
``ledger_events``
    The events of a ledger, numbered from 1 without gaps: a budget was set; a run was reserved,
    committed, settled or released. Each row carries the state after it, so that the next decision
    reads one row, and a replay finds wrong rows.
``dataset_grants``
    A team's access to another team's data set: reserve, read or nothing. The last row applies.

The constraints exclude:

* two events with one number (primary key), which also ends a race if the lock fails;
* a reservation reserved, committed, settled or released twice (``step`` is 1 for reserve, 2 for
  commit **or** release, 3 for settle, and unique in a reservation);
* a settlement without a commitment, or a commitment or release without a reservation (``follows``
  refers to the event before);
* a settlement of more steps than certified (``certified_steps`` refers to the reservation).

No constraint can enforce the budget; ``integrity.check_ledgers`` finds a row that exceeds it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal, Self

from affidavit.accountants.privacy_filter import (
    DELTA_UNIT,
    UNIT,
    Budget,
    Coordinate,
    Cost,
    Filter,
    Step,
    admits_alone,
)
from affidavit.plan import event_document, parse_event
from affidavit.service.core.teams import DEFAULT

Rule = Literal["filter", "alone"]
ZERO = Coordinate()


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetVersion:
    """A version of a budget; ε and δ are decimals as they were set."""

    number: int
    epsilon: str
    delta: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerScope:
    """The scope of a ledger: one data set, one privacy unit, one adjacency."""

    dataset: str
    unit: str
    adjacency: str

    @classmethod
    def of(cls, row: Any) -> Self:
        """Return the scope that a row names."""
        return cls(dataset=row.dataset, unit=row.unit, adjacency=row.adjacency)

    def __str__(self) -> str:
        return f"{self.dataset}/{self.unit}/{self.adjacency}"

    def as_dict(self) -> dict[str, str]:
        """Return the scope as JSON data."""
        return {"dataset": self.dataset, "unit": self.unit, "adjacency": self.adjacency}


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerState:
    """A ledger after its event number ``seq``.

    ``spent`` is the sum of the charges of settled runs and the costs of reserved and committed
    runs; ``runs`` counts all of these. ``alone`` is the δ of a run that was admitted by its own
    certificate. ``base`` dominates the steps of the first run, or is None if the run has other
    releases.
    """

    seq: int
    budget: BudgetVersion
    spent: Cost
    runs: int = 0
    alone: Coordinate = ZERO
    base: Step | None = None

    def budget_for(self, filter_: Filter, run: Cost | None = None) -> Budget:
        """Return the budget in force for ``run``, without the δ of a run admitted alone."""
        return Budget(
            epsilon=float(self.budget.epsilon),
            delta=float(self.budget.delta),
            filter=filter_,
            delta_taken=self.alone.value(DELTA_UNIT),
            base=self.base if run is None else self._base_with(run),
        )

    def _base_with(self, run: Cost) -> Step | None:
        """Return the base after ``run`` is reserved, which the first run determines."""
        return self.base if self.runs else run.steps.worst()

    def rule_for(self, filter_: Filter, cost: Cost, *, certain: bool) -> Rule | None:
        """Return the rule that admits a run of ``cost`` now, if any.

        ``certain`` tells whether the run's certificate holds without a confidence.
        """
        budget = self.budget_for(filter_, cost)
        if budget.admits(self.spent + cost):
            return "filter"
        if self.runs == 0 and certain and admits_alone(budget, cost):
            return "alone"
        return None

    def exhausted(self, filter_: Filter) -> bool:
        """Return whether the budget in force does not admit the spent cost."""
        if self.runs == 0:
            return False
        return not self.budget_for(filter_).admits(self.spent)

    def with_budget(self, epsilon: str, delta: str) -> LedgerState:
        """Return the state after another version of the budget."""
        version = BudgetVersion(number=self.budget.number + 1, epsilon=epsilon, delta=delta)
        return replace(self, seq=self.seq + 1, budget=version)

    def with_reservation(self, cost: Cost, rule: Rule) -> LedgerState:
        """Return the state after a run was reserved."""
        return replace(
            self,
            seq=self.seq + 1,
            spent=self.spent + cost,
            runs=self.runs + 1,
            alone=cost.delta if rule == "alone" else self.alone,
            base=self._base_with(cost),
        )

    def with_commitment(self) -> LedgerState:
        """Return the state after a run was committed."""
        return replace(self, seq=self.seq + 1)

    def with_settlement(self, reserved: Cost, settled: Cost) -> LedgerState:
        """Return the state after a run with a reserved cost was charged the settled cost."""
        return replace(self, seq=self.seq + 1, spent=self.spent - reserved + settled)

    def with_release(self, cost: Cost, rule: Rule) -> LedgerState:
        """Return the state after the reservation of a run that never began was released."""
        return replace(
            self,
            seq=self.seq + 1,
            spent=self.spent - cost,
            runs=self.runs - 1,
            alone=ZERO if rule == "alone" else self.alone,
            base=self.base if self.runs > 1 else None,
        )

    def to_text(self) -> str:
        """Return the state as the text of a row."""
        base = {} if self.base is None else {"base": event_document(self.base)}
        return json.dumps(
            base
            | {
                "budget": {
                    "version": self.budget.number,
                    "epsilon": self.budget.epsilon,
                    "delta": self.budget.delta,
                },
                "spent": self.spent.as_document(),
                "runs": self.runs,
                "alone": self.alone.written(DELTA_UNIT),
            },
            sort_keys=True,
        )

    @classmethod
    def first(cls, epsilon: str, delta: str, filter_: Filter) -> Self:
        """Return the state after the first version of a budget."""
        return cls(
            seq=1,
            budget=BudgetVersion(number=1, epsilon=epsilon, delta=delta),
            spent=Cost.zero(len(filter_.orders)),
        )

    @classmethod
    def from_text(cls, seq: int, text: str) -> Self:
        """Read the state of a row; raises ``ValueError``, ``KeyError`` or ``TypeError``."""
        document: Mapping[str, Any] = json.loads(text)
        budget = document["budget"]
        base = parse_event(document["base"]) if "base" in document else None
        if not isinstance(base, Step | None):
            raise ValueError("the base of a ledger is a step on a fresh lot")
        return cls(
            seq=seq,
            budget=BudgetVersion(
                number=budget["version"], epsilon=budget["epsilon"], delta=budget["delta"]
            ),
            spent=Cost.read(document["spent"]),
            runs=document["runs"],
            alone=Coordinate.read(document["alone"], DELTA_UNIT),
            base=base,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredLedger:
    """A ledger's row with the state after its last event."""

    id: int
    scope: LedgerScope
    filter: Filter
    state: LedgerState
    team: str = DEFAULT

    def spent_epsilon(self) -> float:
        """Return the ε that the filter assigns to the spent cost at the budget's δ, or infinity.

        For a run admitted alone it is the certificate's ε, if that holds at the budget's δ.
        """
        return _spent_epsilon(self.state, self.filter)


@lru_cache(maxsize=1024)
def _spent_epsilon(state: LedgerState, filter_: Filter) -> float:
    # Cached for the pages that show many ledgers.
    if state.runs != 1 or not state.alone.units:
        return state.budget_for(filter_).spent(state.spent)
    if state.spent.delta.at_most(float(state.budget.delta), DELTA_UNIT):
        return state.spent.epsilon.value(UNIT)
    # A later budget has a smaller δ, for which the certificate gives no ε. The filter does, and may
    # use all of that δ, because it does not rely on the certificate.
    return replace(state, alone=ZERO).budget_for(filter_).spent(state.spent)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredReservation:
    """A reservation's row with its later events.

    ``state`` is reserved, committed, settled or released. ``cost`` is the reserved cost and
    ``charged`` the current charge. ``steps_run`` is known after settlement.
    """

    id: str
    ledger_id: int
    scope: LedgerScope
    certificate_id: str
    issue: int
    untrusted: bool
    plan_digest: str
    name: str | None
    certified_steps: int
    rule: Rule
    cost: Cost
    event: dict[str, Any]
    state: str
    charged: Cost
    steps_run: int | None
    record: str | None
    reserved_by: str
    reserved_at: datetime
    changed_at: datetime
    team: str = DEFAULT
