r"""Wire models of ledgers and reservations.

ε, δ and costs are numbers rounded outward, null where they are not bounded. Of the numbers in
``spent`` the first decides; the other two are for reading and say so.

>>> BudgetRequest.from_json(b'{"adjacency": "add_remove", "epsilon": 8, "delta": 1e-5}').unit
'example'
>>> SettlementRequest.from_json(b'{"steps_run": -1}')
Traceback (most recent call last):
affidavit.service.errors.MalformedRequest: invalid_value at /steps_run: ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from fastapi import Path as PathParameter
from pydantic import Field

from affidavit.accountants import decimal_down, decimal_up
from affidavit.accountants.privacy_filter import (
    DELTA_UNIT,
    LARGEST_EPSILON,
    MOST_FORECAST,
    UNIT,
    Cost,
)
from affidavit.plan import Integer, Real
from affidavit.service.ledger.state import Rule, StoredLedger, StoredReservation
from affidavit.service.models import (
    DIGEST,
    UUID,
    Bound,
    Comment,
    Digest,
    Interval,
    RequestModel,
    ResponseModel,
    is_none,
)

MOST_ENTRIES = 200
"""Reservations that a ledger lists, the latest first; ``entries_total`` counts all."""

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

DatasetName = Annotated[
    str, PathParameter(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="As plans name it.")
]
ReservationId = Annotated[str, PathParameter(pattern=UUID, description="The reservation's `id`.")]
Unit = Literal["example", "user"]
Adjacency = Literal["add_remove", "replace_one", "zero_out"]
Count = Annotated[int, Field(ge=0)]
CertificateId = Annotated[str, Field(pattern=DIGEST)]


# ---- requests ------------------------------------------------------------------------


class LedgerRequest(RequestModel):
    """Base of what clients send to a ledger."""

    guide = "docs/ledger.md"


class BudgetRequest(LedgerRequest):
    """A version of the budget of one privacy unit and adjacency of a data set."""

    noun = "a budget"
    unit: Unit = "example"
    adjacency: Adjacency
    epsilon: Annotated[Real, Field(ge=1e-6, le=LARGEST_EPSILON)]
    delta: Annotated[Real, Field(ge=1e-15, lt=1)]
    reason: Comment = ""

    def decimals(self) -> tuple[str, str]:
        """ε and δ as decimals that read back as these doubles."""
        return decimal_down(self.epsilon, 17), decimal_down(self.delta, 17)


class ReservationRequest(LedgerRequest):
    """The certificate whose run is to be reserved for."""

    noun = "a reservation"
    certificate: Digest


class CommitRequest(LedgerRequest):
    """An empty object; the path names the reservation."""

    noun = "a commitment"


class SettlementRequest(LedgerRequest):
    """The steps that were run, all of them if left out, and the digest of the run's record."""

    noun = "a settlement"
    steps_run: Annotated[Integer, Field(ge=0)] | None = None
    record: Digest | None = None


class ReleaseRequest(LedgerRequest):
    """Why the reservation is released before the run began."""

    noun = "a release"
    reason: Comment = ""


# ---- responses -----------------------------------------------------------------------


class ScopedModel(ResponseModel):
    """What belongs to one data set, privacy unit and adjacency."""

    dataset: str
    unit: Unit
    adjacency: Adjacency


class Budget(ResponseModel):
    """The budget in force."""

    version: Count
    epsilon: Bound
    delta: Bound

    @classmethod
    def of(cls, ledger: StoredLedger) -> Self:
        """The budget of ``ledger``."""
        budget = ledger.state.budget
        return cls(version=budget.number, epsilon=float(budget.epsilon), delta=float(budget.delta))


class Reading(ResponseModel):
    """What was spent by one way of counting; ``decides`` tells whether it admits runs."""

    epsilon: Bound
    delta: Bound
    decides: bool
    meaning: str


class Composition(ResponseModel):
    """ε of all runs, composed as if fixed in advance; null where no engine bounds it."""

    engine: str | None
    epsilon: Interval | None
    delta: Bound
    decides: bool = False
    meaning: str = COMPOSED_MEANING


class Spent(ResponseModel):
    """What was spent, counted in two or three ways."""

    filter: Reading
    sum: Reading
    composed: Annotated[Composition | None, Field(exclude_if=is_none)] = None


class Remaining(ResponseModel):
    """What is left by the filter, rounded down."""

    epsilon: Bound


class RunCharge(ResponseModel):
    """A cost in the two forms that people compare: ε with δ, and μ where it is one Gaussian."""

    epsilon: Bound
    delta: Bound
    mu: float | None

    @classmethod
    def of(cls, cost: Cost) -> Self:
        """``cost``, rounded up."""
        mu_squared = cost.mu_squared.value(UNIT)
        is_gaussian = math.isfinite(mu_squared)
        return cls(
            epsilon=_up(cost.epsilon.value(UNIT)),
            delta=_up(cost.delta.value(DELTA_UNIT)),
            mu=_up(math.sqrt(mu_squared) * (1 + 1e-15)) if is_gaussian else None,
        )


class LedgerSummary(ScopedModel):
    """A ledger without its entries and without what takes accounting."""

    budget: Budget
    runs: Count
    exhausted: bool
    spent: Spent
    remaining: Remaining

    @classmethod
    def of(cls, ledger: StoredLedger) -> LedgerSummary:
        """The summary of ``ledger``."""
        return cls(**cls._fields_of(ledger))

    @staticmethod
    def _fields_of(ledger: StoredLedger, composed: Composition | None = None) -> dict[str, Any]:
        state, spent = ledger.state, ledger.spent_epsilon()
        budget = Budget.of(ledger)
        return {
            **ledger.scope.as_dict(),
            "budget": budget,
            "runs": state.runs,
            "exhausted": state.exhausted(ledger.filter),
            "spent": Spent(
                filter=Reading(
                    epsilon=_up(spent),
                    delta=budget.delta,
                    decides=True,
                    meaning=FILTER_MEANING,
                ),
                sum=Reading(
                    epsilon=_up(state.spent.epsilon.value(UNIT)),
                    delta=_up(state.spent.delta.value(DELTA_UNIT)),
                    decides=False,
                    meaning=SUM_MEANING,
                ),
                composed=composed,
            ),
            "remaining": Remaining(epsilon=float(decimal_down(_left(budget.epsilon, spent)))),
        }


class StepCounts(ResponseModel):
    """Steps of a reservation's run; ``run`` is null until it is settled."""

    certified: Count
    run: int | None


class Reservation(ScopedModel):
    """A reservation as it stands: what it reserved, and what it counts for now."""

    id: str
    certificate: CertificateId
    issue: Count
    plan_digest: CertificateId
    name: str | None
    state: Literal["reserved", "committed", "settled", "released"]
    steps: StepCounts
    record: str | None
    admitted_by: Rule
    reserved: RunCharge
    charged: RunCharge
    reserved_by: str
    reserved_at: datetime
    changed_at: datetime

    @classmethod
    def of(cls, stored: StoredReservation) -> Self:
        """The response for ``stored``."""
        return cls.model_validate(
            {
                "id": stored.id,
                **stored.scope.as_dict(),
                "certificate": stored.certificate_id,
                "issue": stored.issue,
                "plan_digest": stored.plan_digest,
                "name": stored.name,
                "state": stored.state,
                "steps": {"certified": stored.certified_steps, "run": stored.steps_run},
                "record": stored.record,
                "admitted_by": stored.rule,
                "reserved": RunCharge.of(stored.cost),
                "charged": RunCharge.of(stored.charged),
                "reserved_by": stored.reserved_by,
                "reserved_at": stored.reserved_at,
                "changed_at": stored.changed_at,
            }
        )


class Forecast(ResponseModel):
    """How many more runs of a certificate fit, by the filter that decides."""

    certificate: CertificateId
    runs: Count
    at_least: bool
    message: str
    cost: RunCharge

    @classmethod
    def of(cls, ledger: StoredLedger, cost: Cost, certificate_id: str, *, certain: bool) -> Self:
        """The forecast of runs of ``cost``; ``certain`` as in ``LedgerState.rule_for``."""
        state = ledger.state
        runs = state.within(ledger.filter).forecast(state.spent, cost)
        if runs == 0 and state.rule_for(ledger.filter, cost, certain=certain) is not None:
            runs = 1
        at_least = runs == MOST_FORECAST
        count = f"{'at least ' if at_least else ''}{runs} more {'run' if runs == 1 else 'runs'}"
        return cls(
            certificate=certificate_id,
            runs=runs,
            at_least=at_least,
            message=f"{count} of this size fit." if runs else "no run of this size fits.",
            cost=RunCharge.of(cost),
        )


class Ledger(LedgerSummary):
    """A ledger with its entries, latest first; ``forecast`` stands where it was asked for."""

    entries: list[Reservation]
    entries_total: Count
    forecast: Annotated[Forecast | None, Field(exclude_if=is_none)] = None

    @classmethod
    def with_entries(
        cls,
        ledger: StoredLedger,
        reservations: Sequence[StoredReservation],
        composed: Composition,
        forecast: Forecast | None,
    ) -> Self:
        """The response for ``ledger`` and all its ``reservations``, latest first."""
        return cls(
            **cls._fields_of(ledger, composed),
            entries=[Reservation.of(stored) for stored in reservations[:MOST_ENTRIES]],
            entries_total=len(reservations),
            forecast=forecast,
        )


def position_of(
    ledger: StoredLedger, cost: Cost | None, *, certain: bool, reason: str | None
) -> dict[str, Any]:
    """Where a ledger stood when a certificate was issued, as its signed statement says it.

    ``cost`` is None, and ``reason`` says why, where the plan's cost is not bounded.
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
    after = state.within(ledger.filter).spent(state.spent + cost)
    if rule == "alone":
        after = cost.epsilon.value(UNIT)
    return {
        **position,
        "with_this_run": {"epsilon": decimal_up(after)},
        "fits": rule is not None,
    }


def _up(value: float) -> float:
    """``value`` rounded up to the digits that a certificate shows."""
    return float(decimal_up(value))


def _left(budget: float, spent: float) -> float:
    """What ``spent`` leaves of ``budget``, rounded down; all of it where nothing was spent."""
    if spent >= budget:
        return 0.0
    nearest = budget - spent
    exact = Fraction(budget) - Fraction(spent)
    return nearest if nearest <= exact else math.nextafter(nearest, 0.0)
