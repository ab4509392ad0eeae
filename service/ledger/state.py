"""Ledgers and reservations as values: what events add up to, and what a budget admits next.

Everything here is pure, so that the service and a replay of its rows decide alike.
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
from affidavit.plan import event_document, event_from
from affidavit.service.teams import DEFAULT

Rule = Literal["filter", "alone"]
NONE = Coordinate()


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetVersion:
    """One version of a budget; ε and δ are decimals as they were set."""

    number: int
    epsilon: str
    delta: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerScope:
    """What may be added up: one data set, one privacy unit, one adjacency."""

    dataset: str
    unit: str
    adjacency: str

    def __str__(self) -> str:
        return f"{self.dataset}/{self.unit}/{self.adjacency}"

    def as_dict(self) -> dict[str, str]:
        """The three as JSON data."""
        return {"dataset": self.dataset, "unit": self.unit, "adjacency": self.adjacency}


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerState:
    """A ledger after its event number ``seq``.

    ``spent`` is the sum over all runs that were not released: what was reserved, and of the
    settled ones what they settled on. ``runs`` counts them. ``alone`` is the δ of a run that
    was admitted by its own certificate. ``base`` dominates the steps of the first run, and is None
    where that has other releases.
    """

    seq: int
    budget: BudgetVersion
    spent: Cost
    runs: int = 0
    alone: Coordinate = NONE
    base: Step | None = None

    def within(self, filter_: Filter, run: Cost | None = None) -> Budget:
        """The budget in force, with what a run admitted alone took from it, as ``run`` meets it."""
        return Budget(
            epsilon=float(self.budget.epsilon),
            delta=float(self.budget.delta),
            filter=filter_,
            taken=self.alone.value(DELTA_UNIT),
            base=self.base if run is None else self._base_with(run),
        )

    def _base_with(self, run: Cost) -> Step | None:
        """The base after ``run`` is reserved; the first run decides it, before any release."""
        return self.base if self.runs else run.steps.worst()

    def rule_for(self, filter_: Filter, cost: Cost, *, certain: bool) -> Rule | None:
        """By which rule a run of ``cost`` is admitted now; None if by none.

        ``certain`` tells whether the run's certificate holds without a confidence.
        """
        budget = self.within(filter_, cost)
        if budget.admits(self.spent + cost):
            return "filter"
        if self.runs == 0 and certain and admits_alone(budget, cost):
            return "alone"
        return None

    def exhausted(self, filter_: Filter) -> bool:
        """Whether the budget in force would not admit what was spent already."""
        if self.runs == 0:
            return False
        return not self.within(filter_).admits(self.spent)

    def with_budget(self, epsilon: str, delta: str) -> LedgerState:
        """After another version of the budget."""
        version = BudgetVersion(number=self.budget.number + 1, epsilon=epsilon, delta=delta)
        return replace(self, seq=self.seq + 1, budget=version)

    def reserved(self, cost: Cost, rule: Rule) -> LedgerState:
        """After a run was reserved."""
        return replace(
            self,
            seq=self.seq + 1,
            spent=self.spent + cost,
            runs=self.runs + 1,
            alone=cost.delta if rule == "alone" else self.alone,
            base=self._base_with(cost),
        )

    def committed(self) -> LedgerState:
        """After a run was committed."""
        return replace(self, seq=self.seq + 1)

    def settled(self, reserved: Cost, settled: Cost) -> LedgerState:
        """After a run that had reserved the one cost was settled on the other."""
        return replace(self, seq=self.seq + 1, spent=self.spent - reserved + settled)

    def released(self, cost: Cost, rule: Rule) -> LedgerState:
        """After a run that never began gave back what it had reserved."""
        return replace(
            self,
            seq=self.seq + 1,
            spent=self.spent - cost,
            runs=self.runs - 1,
            alone=NONE if rule == "alone" else self.alone,
            base=self.base if self.runs > 1 else None,
        )

    def written(self) -> str:
        """The state as it stands in a row."""
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
        """After the first version of a budget."""
        return cls(
            seq=1,
            budget=BudgetVersion(number=1, epsilon=epsilon, delta=delta),
            spent=Cost.nothing(len(filter_.orders)),
        )

    @classmethod
    def read(cls, seq: int, text: str) -> Self:
        """The state of a row; raises ``ValueError``, ``KeyError`` or ``TypeError``."""
        document: Mapping[str, Any] = json.loads(text)
        budget = document["budget"]
        base = event_from(document["base"]) if "base" in document else None
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
    """A ledger's row, with the state after its last event."""

    id: int
    scope: LedgerScope
    filter: Filter
    state: LedgerState
    team: str = DEFAULT

    def spent_epsilon(self) -> float:
        """The filter's reading of what was spent, at the budget's δ; infinity where it has none.

        Of a run admitted alone it is the certificate's ε, while that holds at the budget's δ.
        """
        return _spent_epsilon(self.state, self.filter)


@lru_cache(maxsize=1024)
def _spent_epsilon(state: LedgerState, filter_: Filter) -> float:
    """Cached, because each page that shows ledgers needs it again."""
    if state.runs != 1 or not state.alone.units:
        return state.within(filter_).spent(state.spent)
    if state.spent.delta.at_most(float(state.budget.delta), DELTA_UNIT):
        return state.spent.epsilon.value(UNIT)
    # A later budget has a smaller δ, at which the certificate says nothing. The filter does,
    # and may use all of that δ for one run: its certificate is not relied upon.
    return replace(state, alone=NONE).within(filter_).spent(state.spent)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredReservation:
    """A reservation's row and what happened to it.

    ``state`` is reserved, committed, settled or released. ``cost`` is what it reserved and
    ``charged`` what it counts for now; ``steps_run`` is known once it is settled.
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
