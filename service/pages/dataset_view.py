"""What the pages of data sets show: budgets, what was spent of them, and what is left.

Three numbers stand side by side and are never taken for one another: what the privacy filter
reads, which decides and holds when plans are chosen in view of results; the composition as if
all had been fixed in advance; and the plain sum of ε. The last two decide nothing, and say so.
The second takes accounting, so that it is worked out when it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, select

from affidavit.accountants import decimal_down, decimal_up
from affidavit.accountants.privacy_filter import UNIT
from affidavit.certificate.charts import Axis, Chart, Line, Rule, draw
from affidavit.certificate.policy import Policy
from affidavit.service.ledger import document, rows
from affidavit.service.ledger.ledger_tables import reservations
from affidavit.service.ledger.rows import KeptLedger, Reservation, Scope
from affidavit.service.policies.rulebook import Rulebook
from affidavit.service.runs.run_tables import run_events, runs
from affidavit.service.tables import certificates

LISTED = 50
"""Ledgers, or entries of one, on a page."""
DRAWN = 60
"""Changes of a ledger that its chart shows, the latest."""
DIGITS = 6
FAILED_LOOKED_AT = 2000
"""Failed runs, the latest, among which those are sought whose record does not conform."""
NAMED = 5
NEARLY = 0.8
"""The share of a budget from which on it is said to be at risk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerLine:
    """A ledger in one line; ε and δ are decimals rounded outward, ``share`` is of the budget."""

    dataset: str
    unit: str
    adjacency: str
    epsilon: str
    delta: str
    spent: str
    sum: str
    sum_delta: str
    remaining: str
    share: float
    runs: int
    standing: str
    policy: str

    @property
    def percent(self) -> int:
        """The share in whole per cent, rounded up, for a bar of 100."""
        return min(100, math.ceil(100 * self.share))


@dataclass(frozen=True, kw_only=True, slots=True)
class Datasets:
    """A page of ledgers; ``next`` is the cursor of the following one."""

    lines: tuple[LedgerLine, ...]
    next: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryLine:
    """A reservation in one line, with what it reserved and what it counts for now."""

    id: str
    name: str | None
    certificate: str
    issue: int
    state: str
    steps_certified: int
    steps_run: int | None
    reserved: str
    charged: str
    mu: str | None
    record: str | None
    by: str
    at: Any
    changed_at: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLine:
    """The policy of a data set as far as budgets are concerned; None is no cap."""

    name: str
    version: int
    digest: str
    epsilon_cap: str | None
    delta_cap: str | None
    budget: str
    approvals: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """One data set: its ledgers, and the one that is shown with its entries and chart.

    ``not_conformant`` are the latest runs whose record does not hold, which no charge bounds.
    ``forecast`` is of a run like the latest one. ``composed`` is None until it is asked for.
    ``policy_names_it`` says whether a policy is for this very data set.
    """

    name: str
    policy_names_it: bool
    lines: tuple[LedgerLine, ...]
    shown: LedgerLine | None
    entries: tuple[EntryLine, ...]
    next: str | None
    forecast: str | None
    forecast_of: str | None
    policy: PolicyLine
    not_conformant: tuple[str, ...] = ()
    composed: str | None = None
    composed_by: str | None = None
    asked: str | None = None
    asked_of: str | None = None


def datasets(connection: Connection, rules: Rulebook, cursor: str | None) -> Datasets:
    """The page of ledgers after ``cursor``, by name; raises ``ValueError`` for a strange one."""
    after = None if cursor is None else scope_of(cursor)
    found = rows.ledgers_after(connection, after, LISTED + 1)
    lines = tuple(_line(item, rules) for item in found[:LISTED])
    more = len(found) > LISTED
    return Datasets(lines=lines, next=str(found[LISTED - 1].scope) if more else None)


def dataset(
    connection: Connection,
    rules: Rulebook,
    name: str,
    scope: tuple[str, str] | None,
    before: int | None,
) -> tuple[Dataset, KeptLedger | None]:
    """One data set with the ledger of ``scope`` (unit, adjacency), or its first, and its row.

    ``before`` is the number of the event before which entries are listed.
    """
    ledgers = rows.all_ledgers(connection, name)
    chosen = _chosen(ledgers, scope)
    rule = rules.policy_of(name)
    named = rule.datasets != "default"
    policy = _policy(rule, name)
    if chosen is None:
        return _without_budget(name, policy, named), None
    made = rows.reservations_before(connection, chosen.id, before, LISTED + 1)
    entries = [each for _, each in made[:LISTED]]
    latest = entries[0] if entries and before is None else None
    return Dataset(
        name=name,
        policy_names_it=named,
        lines=tuple(_line(ledger, rules) for ledger in ledgers),
        shown=_line(chosen, rules),
        entries=tuple(_entry(entry) for entry in entries),
        next=str(made[LISTED - 1][0]) if len(made) > LISTED else None,
        forecast=None if latest is None else _forecast(chosen, latest),
        forecast_of=None if latest is None else latest.certificate_id,
        policy=policy,
        not_conformant=_not_conformant(connection, chosen),
    ), chosen


def is_known(connection: Connection, rules: Rulebook, name: str) -> bool:
    """Whether a budget, a policy or some certificate is for this very data set."""
    if rules.policy_of(name).datasets != "default" or rows.all_ledgers(connection, name):
        return True
    query = select(certificates.c.id).where(certificates.c.dataset == name).limit(1)
    return connection.execute(query).first() is not None


def with_composed(found: Dataset, composed: dict[str, Any]) -> Dataset:
    """``found`` with the composition that was worked out by now."""
    epsilon = composed["epsilon"]
    if epsilon is None:
        return replace(found, composed="not bounded by any engine", composed_by=None)
    upper = epsilon["upper"]
    text = "not bounded" if upper is None else decimal_up(upper, DIGITS)
    return replace(found, composed=text, composed_by=composed["engine"])


def with_forecast(found: Dataset, forecast: dict[str, Any]) -> Dataset:
    """``found`` with the forecast for a certificate that was asked about."""
    return replace(found, asked=forecast["message"], asked_of=forecast["certificate"])


def scope_of(text: str) -> Scope:
    """The scope that ``str`` wrote; raises ``ValueError``."""
    parts = text.split("/")
    if len(parts) != 3 or not all(part.isascii() and part.isprintable() for part in parts):
        raise ValueError("a ledger is named by data set, unit and adjacency")
    return Scope(dataset=parts[0], unit=parts[1], adjacency=parts[2])


def _chosen(ledgers: Sequence[KeptLedger], scope: tuple[str, str] | None) -> KeptLedger | None:
    if scope is None:
        return ledgers[0] if ledgers else None
    wanted = [ledger for ledger in ledgers if (ledger.scope.unit, ledger.scope.adjacency) == scope]
    return wanted[0] if wanted else None


def _without_budget(name: str, policy: PolicyLine, named: bool) -> Dataset:
    return Dataset(
        name=name,
        policy_names_it=named,
        lines=(),
        shown=None,
        entries=(),
        next=None,
        forecast=None,
        forecast_of=None,
        policy=policy,
    )


def _line(kept: KeptLedger, rules: Rulebook) -> LedgerLine:
    said = document.summary(kept)
    spent = document.spent_epsilon(kept)
    share = spent / float(kept.state.budget.epsilon)
    standing = "within budget"
    if said["exhausted"]:
        standing = "exhausted"
    elif share >= NEARLY:
        standing = "at risk"
    policy = rules.policy_of(kept.scope.dataset)
    return LedgerLine(
        dataset=kept.scope.dataset,
        unit=kept.scope.unit,
        adjacency=kept.scope.adjacency,
        epsilon=kept.state.budget.epsilon,
        delta=kept.state.budget.delta,
        spent=decimal_up(spent, DIGITS),
        sum=decimal_up(float(said["spent"]["sum"]["epsilon"]), DIGITS),
        sum_delta=decimal_up(float(said["spent"]["sum"]["delta"]), DIGITS),
        remaining=decimal_down(float(said["remaining"]["epsilon"]), DIGITS),
        share=share if math.isfinite(share) else 1e9,
        runs=kept.state.runs,
        standing=standing,
        policy=f"{policy.name} v{policy.version}",
    )


def _policy(policy: Policy, name: str) -> PolicyLine:
    caps = policy.cap(name)
    return PolicyLine(
        name=policy.name,
        version=policy.version,
        digest=policy.digest(),
        epsilon_cap=None if caps.epsilon is None else decimal_down(caps.epsilon, DIGITS),
        delta_cap=None if caps.delta is None else decimal_down(caps.delta, DIGITS),
        budget=policy.budget,
        approvals=policy.approvals,
    )


def _entry(found: Reservation) -> EntryLine:
    reserved = document.cost_document(found.cost)
    return EntryLine(
        id=found.id,
        name=found.name,
        certificate=found.certificate_id,
        issue=found.issue,
        state=found.state,
        steps_certified=found.certified_steps,
        steps_run=found.steps_run,
        reserved=_shorter(reserved["epsilon"]),
        charged=_shorter(document.cost_document(found.charged)["epsilon"]),
        mu=None if reserved["mu"] is None else _shorter(reserved["mu"]),
        record=found.record,
        by=found.reserved_by,
        at=found.reserved_at,
        changed_at=found.changed_at,
    )


def _not_conformant(connection: Connection, kept: KeptLedger) -> tuple[str, ...]:
    """The latest runs on this ledger whose record does not conform, of the latest that failed."""
    failed = (
        select(run_events.c.run_id, run_events.c.at, run_events.c.body)
        .where(run_events.c.kind == "failed")
        .order_by(run_events.c.at.desc())
        .limit(FAILED_LOOKED_AT)
        .subquery()
    )
    query = (
        select(failed.c.run_id)
        .join(runs, runs.c.id == failed.c.run_id)
        .join(reservations, reservations.c.id == runs.c.reservation_id)
        .where(reservations.c.ledger_id == kept.id, failed.c.body.contains("not_conformant"))
        .order_by(failed.c.at.desc())
        .limit(NAMED)
    )
    return tuple(connection.execute(query).scalars())


def _forecast(kept: KeptLedger, latest: Reservation) -> str:
    # Whether it could be admitted alone matters only in an empty ledger; the filter decides.
    said = document.forecast_document(kept, latest.cost, latest.certificate_id, certain=False)
    message: str = said["message"]
    return message


def spent_chart(connection: Connection, kept: KeptLedger) -> str:
    """What was spent after each of the last changes, beside the budget; empty without any."""
    states = rows.states_of(connection, kept.id, DRAWN)
    if len(states) < 2:
        return ""
    after = [(float(state.seq), replace(kept, state=state)) for _, state in states]
    spent = tuple((seq, document.spent_epsilon(each)) for seq, each in after)
    plain = tuple((seq, each.state.spent.epsilon.value(UNIT)) for seq, each in after)
    chart = Chart(
        title=f"ε spent of {kept.scope.dataset}",
        description=f"After {kept.state.seq} changes {decimal_up(spent[-1][1], DIGITS)} of "
        f"{kept.state.budget.epsilon} is spent, by the filter that decides.",
        x=Axis(label="change of the ledger, by number"),
        y=Axis(label="ε (nats)", low=0.0),
        marks=(
            Line(name="spent, by the filter (decides)", points=spent),
            Line(name="plain sum of ε (decides nothing)", points=plain),
            Rule(name="budget", at=float(kept.state.budget.epsilon), axis="y"),
        ),
    )
    return draw(chart, width=640, height=300)


def _shorter(decimal: str) -> str:
    value = float(decimal)
    return decimal_up(value, DIGITS) if math.isfinite(value) else "not bounded"
