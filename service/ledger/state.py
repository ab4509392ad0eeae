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
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, Self

from pydantic import InstanceOf

from affidavit.accountants import decimal_down, decimal_up
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
from affidavit.client import Budget as SetBudget
from affidavit.client import Reading, Remaining, Reservation, RunCharge, Spent
from affidavit.plan import events
from affidavit.service.core.teams import DEFAULT
from affidavit.service.core.wire_models import Internal

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
        base = {} if self.base is None else {"base": events.event_document(self.base)}
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
        base = events.parse_event(document["base"]) if "base" in document else None
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


FILTER_MEANING = (
    "The least ε at which the filter that decides would have admitted what was spent; valid "
    "when later plans are chosen in view of earlier results. A run whose record does not conform "
    "is counted as certified, and may have spent more."
)
SUM_MEANING = "The certificates' ε and δ added up; it decides nothing."
NEARLY_SPENT_SHARE = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredLedger:
    """A ledger's row with the state after its last event.

    Its properties are the fields of ``LedgerSummary``, which the API shows.
    """

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

    @property
    def dataset(self) -> str:
        """The data set of its scope."""
        return self.scope.dataset

    @property
    def unit(self) -> str:
        """The privacy unit of its scope."""
        return self.scope.unit

    @property
    def adjacency(self) -> str:
        """The adjacency of its scope."""
        return self.scope.adjacency

    @property
    def runs(self) -> int:
        """The runs that are reserved, committed or settled."""
        return self.state.runs

    @property
    def exhausted(self) -> bool:
        """Whether the budget in force does not admit the spent cost."""
        return self.state.exhausted(self.filter)

    @property
    def budget(self) -> SetBudget:
        """The budget in force, as numbers."""
        budget = self.state.budget
        epsilon, delta = float(budget.epsilon), float(budget.delta)
        return SetBudget(version=budget.number, epsilon=epsilon, delta=delta)

    @property
    def spent(self) -> Spent:
        """The spending by the filter, which decides, and by the plain sum, rounded up."""
        plain = charge_of(self.state.spent)
        filtered = as_upper_bound(self.spent_epsilon())
        return Spent(
            filter=Reading(
                epsilon=filtered, delta=self.budget.delta, decides=True, meaning=FILTER_MEANING
            ),
            sum=Reading(
                epsilon=plain.epsilon, delta=plain.delta, decides=False, meaning=SUM_MEANING
            ),
        )

    @property
    def remaining(self) -> Remaining:
        """The budget that remains by the filter, rounded down."""
        left = _subtract_down(self.budget.epsilon, self.spent_epsilon())
        return Remaining(epsilon=float(decimal_down(left)))

    @property
    def share(self) -> float:
        """The share of the budget's ε that is spent, or infinity."""
        return self.spent_epsilon() / self.budget.epsilon

    @property
    def is_nearly_spent(self) -> bool:
        """Whether the budget is exhausted or nearly spent."""
        return self.exhausted or self.share >= NEARLY_SPENT_SHARE


def _subtract_down(budget: float, spent: float) -> float:
    """Return ``budget`` minus ``spent``, rounded down and at least 0."""
    if spent >= budget:
        return 0.0
    nearest = budget - spent
    exact = Fraction(budget) - Fraction(spent)
    return nearest if nearest <= exact else math.nextafter(nearest, 0.0)


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


class StoredReservation(Reservation):
    """A reservation, as the API shows it, with what only the service reads of its row.

    ``cost`` is the reserved cost and ``current_cost`` what it is charged now; ``run`` is the id of
    its run, and ``model`` what that trains.
    """

    ledger_id: Internal[int]
    untrusted: Internal[bool]
    cost: Internal[InstanceOf[Cost]]
    current_cost: Internal[InstanceOf[Cost]]
    event: Internal[dict[str, Any]]
    run: Internal[str | None]
    model: Internal[str | None]
    team: Internal[str]

    @property
    def scope(self) -> LedgerScope:
        """The scope of its ledger."""
        return LedgerScope.of(self)

    @property
    def has_ended(self) -> bool:
        """Whether its charge is final."""
        return self.state in ("settled", "released")

    def facts(self) -> dict[str, Any]:
        """Return what the log says of a reservation, but its cost."""
        return {
            "certificate_id": self.certificate,
            "issue": self.issue,
            "untrusted": self.untrusted,
            "plan_digest": self.plan_digest,
            "certified_steps": self.steps.certified,
            "rule": self.admitted_by,
        }


def charge_of(cost: Cost) -> RunCharge:
    """Return ``cost`` as the API shows it, rounded up."""
    mu_squared = cost.mu_squared.value(UNIT)
    is_gaussian = math.isfinite(mu_squared)
    return RunCharge(
        epsilon=as_upper_bound(cost.epsilon.value(UNIT)),
        delta=as_upper_bound(cost.delta.value(DELTA_UNIT)),
        mu=as_upper_bound(math.sqrt(mu_squared) * (1 + 1e-15)) if is_gaussian else None,
    )


def as_upper_bound(value: float) -> float:
    """Round ``value`` up to the digits of a certificate."""
    return float(decimal_up(value))
