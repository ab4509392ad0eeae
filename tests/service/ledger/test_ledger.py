"""The ledger on SQLite and on PostgreSQL: what it admits, charges, frees and refuses."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import Engine, func, select, text
from sqlalchemy.exc import DatabaseError, IntegrityError

from affidavit.accountants.privacy_filter import Cost
from affidavit.client import LedgerSummary
from affidavit.service.core.database import open_engine
from affidavit.service.core.errors import IdempotencyKeyReused, WrongState
from affidavit.service.core.wire_models import Status
from affidavit.service.ledger import repository
from affidavit.service.ledger.service import LedgerService, RunCost, compose_events, cost_of_bundle
from affidavit.service.ledger.state import LedgerScope
from affidavit.service.ledger.store import (
    CertificateNotUsable,
    CostedRun,
    LedgerStore,
    NoBudget,
    OverBudget,
    RecordRequired,
    StepsAboveCertificate,
    UnknownReservation,
    require_usable,
)
from affidavit.service.ledger.wire_models import position_of
from affidavit.service.tables.ledger import (
    ledger_events,
    ledgers,
    reservations,
)
from affidavit.service.tables.log import log_entries
from affidavit.service.web.pages.datasets import spent_chart
from affidavit.trust import development_key
from tests.service import child_processes
from tests.service.ledger.conftest import TOY, Bench, call, claim_of
from tests.service.ledger_replay import replay
from tests.support.polling import TIMEOUT_SECONDS, wait_until

TABLES = (ledgers, reservations, ledger_events)
RECORD = "sha256:" + "0" * 64


def state(bench: Bench, scope: LedgerScope = TOY) -> Any:
    stored = bench.ledger.read(repository.find_ledger, scope)
    assert stored is not None
    return stored.state


def cost_of(bundle: bytes, steps: int | None = None) -> Cost:
    result = cost_of_bundle(bundle, steps)
    assert isinstance(result, RunCost), result
    return result.cost


def fill(bench: Bench, claim: CostedRun) -> int:
    """Reserve until the budget is full; how many were admitted."""
    admitted = 0
    while True:
        try:
            bench.ledger.reserve(claim, call())
        except OverBudget:
            return admitted
        admitted += 1


# ---- what is admitted --------------------------------------------------------------


@pytest.mark.ordinary("sqlite")
def test_reservations_add_up_until_the_budget_is_full_and_the_forecast_said_so(
    bench: Bench,
) -> None:
    bench.budget()
    claim = bench.claim()
    stored = bench.ledger.read(repository.find_ledger, TOY)
    assert stored is not None
    fits = stored.state.budget_for(stored.filter, claim.cost).forecast(
        stored.state.spent, claim.cost
    )
    assert fits > 3
    assert fill(bench, claim) == fits
    assert state(bench).spent == claim.cost.times(fits)
    assert not replay(bench.engine)


def sampled(bench: Bench, sigma: float, expected: int = 10, steps: int = 20) -> CostedRun:
    """A claim for Poisson-sampled steps of 1000 records."""
    return bench.claim(
        sampling={"scheme": "poisson", "lot_size": expected},
        steps=steps,
        releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": sigma}],
    )


@pytest.mark.ordinary("postgresql")
def test_steps_of_the_first_runs_kind_fill_a_budget_to_their_composition(bench: Bench) -> None:
    """Rényi divergences alone admit less; steps that the first run does not cover are theirs."""
    bench.budget("3", "0.00001")
    claim, better = sampled(bench, 0.8), sampled(bench, 0.9, expected=8)
    bench.ledger.reserve(better, call())
    base = state(bench).base
    assert (base.sampling_probability, base.noise_multiplier) == (0.008, 0.9)
    fits = fill(bench, better)
    stored = bench.ledger.read(repository.find_ledger, TOY)
    assert stored is not None
    together = compose_events([(better.event, fits + 1)], 1e-5)["epsilon"]
    assert float(together["upper"]) <= stored.spent_epsilon() <= 3
    assert float(together["lower"]) > 0.9 * 3
    with pytest.raises(OverBudget):
        bench.ledger.reserve(claim, call())
    assert not replay(bench.engine)


def test_the_first_run_decides_the_kind_again_once_all_are_released(bench: Bench) -> None:
    bench.budget()
    quiet, loud = sampled(bench, 3.0), sampled(bench, 0.8)
    one, _ = bench.ledger.reserve(quiet, call())
    other, _ = bench.ledger.reserve(loud, call())
    for reserved in (one, other):
        assert state(bench).base.noise_multiplier == 3.0
        bench.release(reserved.id, "")
    assert state(bench).base is None
    bench.ledger.reserve(loud, call())
    assert state(bench).base.noise_multiplier == 0.8
    assert not replay(bench.engine)


def test_a_replay_finds_steps_that_a_cost_leaves_out(bench: Bench) -> None:
    bench.budget()
    claim = sampled(bench, 0.8)
    fewer = replace(claim.cost, steps=sampled(bench, 0.8, steps=1).cost.steps)
    bench.ledger.reserve(replace(claim, cost=fewer), call())
    assert [item.code for item in replay(bench.engine)] == ["understated"]


def test_without_a_budget_nothing_is_reserved(bench: Bench) -> None:
    with pytest.raises(NoBudget):
        bench.ledger.reserve(bench.claim(), call())


def test_another_unit_or_adjacency_is_another_ledger(bench: Bench) -> None:
    bench.budget()
    other = bench.claim(adjacency="zero_out")
    with pytest.raises(NoBudget, match="toy/example/zero_out"):
        bench.ledger.reserve(other, call())
    bench.budget(scope=replace(TOY, adjacency="zero_out"))
    bench.ledger.reserve(other, call())
    assert state(bench).runs == 0
    assert [str(ledger.scope) for ledger in bench.ledger.ledgers("toy")] == [
        "toy/example/add_remove",
        "toy/example/zero_out",
    ]


def test_a_run_that_needs_the_whole_budget_is_admitted_alone(bench: Bench) -> None:
    """Its own certificate says that it fits; nothing else fits beside it."""
    claim = bench.claim()
    epsilon = claim.cost.as_document()["epsilon"]
    bench.budget(epsilon, "0.00001")
    result, _ = bench.ledger.reserve(claim, call())
    assert result.admitted_by == "alone"
    tiny = bench.claim(steps=1, releases=[{"name": "a", "clip_norm": 1, "noise_multiplier": 900}])
    with pytest.raises(OverBudget):
        bench.ledger.reserve(tiny, call())
    bench.release(result.id, "")
    assert bench.ledger.reserve(tiny, call())[0].admitted_by == "filter"
    with pytest.raises(OverBudget):
        bench.ledger.reserve(claim, call())
    assert not replay(bench.engine)


@pytest.mark.parametrize("delta", ["0.000000001", "0.00001", "0.0001"])
def test_what_a_run_alone_spent_is_a_bound_at_the_budgets_delta(bench: Bench, delta: str) -> None:
    """Its certificate's ε holds at the certificate's δ, which a later budget may not have."""
    claim = bench.claim()
    epsilon = claim.cost.as_document()["epsilon"]
    bench.budget(epsilon, "0.00001")
    bench.ledger.reserve(claim, call())
    stored = bench.ledger.read(repository.find_ledger, TOY)
    assert stored is not None
    assert stored.spent_epsilon() == pytest.approx(float(epsilon), rel=1e-12)
    more = str(float(epsilon) * 1.01)
    bench.budget(more, delta)
    stored = bench.ledger.read(repository.find_ledger, TOY)
    assert stored is not None
    stated = LedgerSummary.model_validate(stored).model_dump()
    spent = stated["spent"]["filter"]["epsilon"]
    fixed = compose_events([(claim.event, 1)], float(delta))["epsilon"]
    assert stated["spent"]["filter"]["delta"] == float(delta)
    assert fixed["lower"] <= spent < 2 * fixed["upper"] + float(epsilon)
    left = stated["remaining"]["epsilon"]
    assert left == pytest.approx(max(0.0, float(more) - spent), abs=1e-9)
    position = position_of(stored, None, certain=True, reason="none")
    assert float(position["spent"]["epsilon"]) == stated["spent"]["filter"]["epsilon"]


def test_what_no_filter_reads_any_more_is_said_to_be_unbounded(bench: Bench) -> None:
    """A run beside one that was admitted alone, and then a δ below what that one took."""
    claim = bench.claim()
    bench.budget(claim.cost.as_document()["epsilon"], "0.00001")
    bench.ledger.reserve(claim, call())
    bench.budget("20", "0.0001")
    bench.ledger.reserve(claim, call())
    bench.budget("20", "0.000001")
    stored = bench.ledger.read(repository.find_ledger, TOY)
    assert stored is not None
    stated = LedgerSummary.model_validate(stored).model_dump()
    assert stated["spent"]["filter"]["epsilon"] is None
    assert stated["remaining"]["epsilon"] == 0
    with bench.engine.connect() as connection:
        assert "<svg" in spent_chart(connection, stored)


def test_a_budget_below_what_was_spent_leaves_the_ledger_exhausted(bench: Bench) -> None:
    bench.budget()
    claim = bench.claim()
    bench.ledger.reserve(claim, call())
    bench.budget("0.1")
    stored = bench.ledger.read(repository.find_ledger, TOY)
    assert stored is not None
    assert stored.state.exhausted(stored.filter)
    assert stored.state.budget.number == 2
    with pytest.raises(OverBudget):
        bench.ledger.reserve(claim, call())
    bench.budget("8")
    bench.ledger.reserve(claim, call())
    assert not replay(bench.engine)


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (Status.AWAITING_APPROVAL, "POST /v1/certificates/{id}/approvals"),
        (Status.EXPIRED, "POST the plan again"),
        (Status.KEY_REVOKED, "POST the plan again"),
        (Status.REJECTED, "POST /v1/certificates/{id}/issues"),
        (Status.REVOKED, "POST /v1/certificates/{id}/issues"),
        (Status.SUPERSEDED, "Send the request again"),
    ],
)
def test_each_status_that_is_not_usable_has_the_remedy_that_works(
    bench: Bench, status: Status, remedy: str
) -> None:
    certificate = replace(bench.certified(), status=status)
    with pytest.raises(CertificateNotUsable) as refused:
        require_usable(certificate, "toy", allow_untrusted=False)
    assert status.value.replace("_", " ") in refused.value.message
    assert remedy.format(id=certificate.id) in refused.value.remedy


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"target": {"epsilon": 0.1, "delta": 1e-5}}, "under_noised"),
        ({"dataset": {"name": "other", "size": 1000}}, "about other"),
        ({"dataset": {"size": 1000}}, "about a data set without a name"),
    ],
)
def test_a_certificate_that_is_not_for_this_is_refused(
    bench: Bench, changes: dict[str, Any], why: str
) -> None:
    bench.budget()
    good = bench.claim()
    with pytest.raises(CertificateNotUsable, match=why):
        bench.ledger.reserve(replace(good, certificate=bench.certified(**changes)), call())


def test_a_development_keys_certificate_needs_an_embedded_service(bench: Bench) -> None:
    bench.budget()
    claim = claim_of(bench.certified(key=development_key()))
    with pytest.raises(CertificateNotUsable, match="development key"):
        bench.ledger.reserve(claim, call())
    bench.ledger.reserve(replace(claim, allow_untrusted=True), call())


# ---- the way of a reservation ------------------------------------------------------


def test_settling_fewer_steps_frees_exactly_what_they_would_have_cost(bench: Bench) -> None:
    bench.budget()
    claim = bench.claim()
    result, _ = bench.ledger.reserve(claim, call())
    bench.commit(result.id)
    four = cost_of(claim.certificate.bundle, 4)
    settled = bench.settled_by_record(result.id, 4, RECORD, four)
    assert (settled.state, settled.steps.run, settled.record) == ("settled", 4, RECORD)
    assert settled.current_cost == four == state(bench).spent
    assert four.within(claim.cost)
    assert four != claim.cost
    assert four == cost_of(bench.certified(steps=4).bundle)
    assert not replay(bench.engine)


def test_a_run_without_a_record_is_charged_in_full(bench: Bench) -> None:
    bench.budget()
    claim = bench.claim()
    result, _ = bench.ledger.reserve(claim, call())
    bench.commit(result.id)
    for record in (None, RECORD):
        for steps in (0, 4, 9):
            with pytest.raises(RecordRequired):
                bench.settle(result.id, steps, record)
    assert state(bench).spent == claim.cost
    settled, _ = bench.settle(result.id, 10, None)
    assert settled.current_cost == claim.cost


def test_no_run_is_charged_for_more_than_was_certified(bench: Bench) -> None:
    bench.budget()
    claim = bench.claim()
    result, _ = bench.ledger.reserve(claim, call())
    bench.commit(result.id)
    with pytest.raises(StepsAboveCertificate):
        bench.settle(result.id, 11, RECORD)
    settled = bench.settled_by_record(result.id, 9, RECORD, claim.cost.times(5))
    assert settled.current_cost == claim.cost


def test_a_release_gives_back_exactly_what_was_reserved(bench: Bench) -> None:
    bench.budget()
    before = state(bench).spent
    result, _ = bench.ledger.reserve(bench.claim(), call())
    released, now = bench.release(result.id, "not needed")
    assert now
    assert released.state == "released"
    assert state(bench).spent == before
    assert state(bench).runs == 0
    assert not replay(bench.engine)


def test_steps_come_in_their_order_and_once(bench: Bench) -> None:
    bench.budget()
    claim = bench.claim()
    one, _ = bench.ledger.reserve(claim, call())
    with pytest.raises(WrongState, match="Commit it first"):
        bench.settle(one.id, 10, None)
    assert bench.commit(one.id)[1]
    assert not bench.commit(one.id)[1]
    with pytest.raises(WrongState):
        bench.release(one.id, "")
    assert bench.settle(one.id, 10, None)[1]
    assert not bench.settle(one.id, 10, None)[1]
    with pytest.raises(WrongState, match="settled only once"):
        bench.settle(one.id, 3, RECORD)
    two, _ = bench.ledger.reserve(claim, call())
    assert bench.release(two.id, "")[1]
    assert not bench.release(two.id, "")[1]
    with pytest.raises(WrongState):
        bench.commit(two.id)
    with pytest.raises(UnknownReservation):
        bench.commit("00000000-0000-0000-0000-000000000000")
    assert state(bench).spent == claim.cost


def test_an_idempotency_key_does_it_once(bench: Bench) -> None:
    bench.budget()
    claim = bench.claim()
    one, created = bench.ledger.reserve(claim, call("k"))
    again, repeated = bench.ledger.reserve(claim, call("k"))
    assert (created, repeated, one.id) == (True, False, again.id)
    bench.ledger.reserve(claim, call("k", actor="bea"))
    with pytest.raises(IdempotencyKeyReused):
        bench.ledger.reserve(claim, call("k", digest="another"))
    bench.ledger.set_budget(TOY, "9", "0.0001", "", call("b"))
    bench.ledger.set_budget(TOY, "9", "0.0001", "", call("b"))
    assert state(bench).budget.number == 2
    assert state(bench).runs == 2


def test_everything_that_happens_is_in_the_log(bench: Bench) -> None:
    bench.budget()
    one, _ = bench.ledger.reserve(bench.claim(), call())
    bench.commit(one.id)
    bench.settle(one.id, 10, None)
    two, _ = bench.ledger.reserve(bench.claim(), call())
    bench.release(two.id, "")
    with bench.engine.connect() as connection:
        kinds = connection.execute(select(log_entries.c.kind).order_by(log_entries.c.id)).scalars()
        assert [kind for kind in kinds if kind != "certificate"] == [
            *("budget", "reservation", "commitment", "settlement", "reservation", "release")
        ]


# ---- races -------------------------------------------------------------------------


def reserve_all(ledger: LedgerStore, claim: CostedRun, tries: int) -> int:
    """Reserve at once from as many threads; how many were admitted."""
    barrier = Barrier(tries)

    def attempt(_: int) -> bool:
        barrier.wait()
        try:
            ledger.reserve(claim, call())
        except OverBudget:
            return False
        return True

    with ThreadPoolExecutor(tries) as threads:
        return sum(threads.map(attempt, range(tries)))


@pytest.mark.in_both
def test_64_reservations_at_once_never_overspend(bench: Bench, database_url: str) -> None:
    claim = bench.claim()
    bench.budget("2.5")
    engine = open_engine(database_url)
    admitted = reserve_all(LedgerStore(engine), claim, 64)
    engine.dispose()
    stored = bench.ledger.read(repository.find_ledger, TOY)
    assert stored is not None
    assert 0 < admitted < 64
    assert stored.state.spent == claim.cost.times(admitted)
    assert stored.state.budget_for(stored.filter).admits(stored.state.spent)
    assert not stored.state.budget_for(stored.filter).admits(stored.state.spent + claim.cost)
    assert not replay(bench.engine)


def reserve_in_a_process(url: str, claim: CostedRun, start: Path, admitted: Path) -> None:
    """Reserve sixteen times, from threads of a process of its own; says how many were admitted."""
    engine = open_engine(url)
    wait_until(start.exists)
    admitted.write_text(str(reserve_all(LedgerStore(engine), claim, 16)))
    engine.dispose()


@pytest.mark.in_both
def test_four_processes_at_once_never_overspend(
    bench: Bench, database_url: str, tmp_path: Path
) -> None:
    claim = bench.claim()
    bench.budget("2.5")
    start, counts = tmp_path / "start", [tmp_path / str(number) for number in range(4)]
    processes = [
        child_processes.start(partial(reserve_in_a_process, database_url, claim, start, path))
        for path in counts
    ]
    start.touch()
    assert [process.wait(TIMEOUT_SECONDS) for process in processes] == [0] * 4
    admitted = sum(int(path.read_text()) for path in counts)
    assert 0 < admitted < 64
    stored = bench.ledger.read(repository.find_ledger, TOY)
    assert stored is not None
    assert stored.state.runs == admitted
    assert stored.state.spent == claim.cost.times(admitted)
    assert stored.state.budget_for(stored.filter).admits(stored.state.spent)
    assert not stored.state.budget_for(stored.filter).admits(stored.state.spent + claim.cost)
    assert not replay(bench.engine)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)  # SQLite has one writer
def test_without_its_lock_the_numbers_of_events_still_let_one_in(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock spares the losers an error; the primary key is what keeps the sum."""
    claim = bench.claim()
    bench.budget("2.5")
    for check in ("lock_ledger", "require_unaltered"):
        monkeypatch.setattr(f"affidavit.service.ledger.repository.{check}", lambda *_: None)
    monkeypatch.setattr("affidavit.service.ledger.store.hold_certificate", lambda *_: None)
    barrier = Barrier(16)

    def attempt(_: int) -> str:
        barrier.wait()
        try:
            bench.ledger.reserve(claim, call())
        except OverBudget:
            return "refused"
        except IntegrityError:
            return "lost the race"
        return "reserved"

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(attempt, range(16)))
    admitted = answers.count("reserved")
    assert "lost the race" in answers
    assert state(bench).spent == claim.cost.times(admitted)
    assert not replay(bench.engine)


@pytest.mark.in_both
def test_one_key_sent_by_many_at_once_reserves_once(bench: Bench) -> None:
    bench.budget()
    claim, barrier = bench.claim(), Barrier(8)

    def attempt(_: int) -> str:
        barrier.wait()
        return bench.ledger.reserve(claim, call("k"))[0].id

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(attempt, range(8)))) == 1
    assert state(bench).runs == 1


# ---- what the database refuses, and what a replay finds -----------------------------


@pytest.mark.in_both
@pytest.mark.parametrize("table", TABLES, ids=lambda table: str(table.name))
def test_no_row_is_changed_or_removed(bench: Bench, table: Any) -> None:
    bench.budget()
    bench.ledger.reserve(bench.claim(), call())
    for statement in (f"DELETE FROM {table.name}", f"UPDATE {table.name} SET id = id"):
        sent = statement.replace("SET id = id", "SET ledger_id = ledger_id")
        if table is ledgers:
            sent = sent.replace("ledger_id", "id")
        with pytest.raises(DatabaseError), bench.engine.begin() as connection:
            connection.execute(text(sent))


def copy_of(engine: Engine, like: str, **changes: Any) -> None:
    """Insert the last event ``like`` that once more, changed, by raw SQL."""
    with engine.begin() as connection:
        query = select(ledger_events).where(ledger_events.c.kind == like)
        rows = connection.execute(query.order_by(ledger_events.c.seq)).mappings()
        row = dict(rows.all()[-1])
        top = connection.execute(select(func.max(ledger_events.c.seq))).scalar_one()
        row |= {"seq": top + 1} | changes
        connection.execute(ledger_events.insert().values(**row))


@pytest.mark.in_both
def test_the_database_itself_lets_no_step_be_taken_twice_or_without_the_one_before(
    bench: Bench,
) -> None:
    bench.budget()
    claim = bench.claim()
    one, _ = bench.ledger.reserve(claim, call())
    two, _ = bench.ledger.reserve(claim, call())
    three, _ = bench.ledger.reserve(claim, call())
    bench.commit(one.id)
    bench.settle(one.id, 10, None)
    bench.release(two.id, "")
    forged: list[tuple[str, dict[str, Any]]] = [
        ("settle", {}),
        ("commit", {}),
        ("release", {}),
        ("reserve", {}),
        ("commit", {"reservation_id": two.id}),
        ("release", {"reservation_id": one.id}),
        ("settle", {"reservation_id": three.id}),
        ("settle", {"reservation_id": two.id}),
        ("settle", {"reservation_id": three.id, "follows": "reserve"}),
        ("settle", {"reservation_id": three.id, "step": 2, "follows": "reserve"}),
        ("settle", {"reservation_id": three.id, "follows": None}),
        ("commit", {"reservation_id": three.id, "certified_steps": 11}),
        ("commit", {"reservation_id": None}),
        ("commit", {"reservation_id": three.id, "seq": 1}),
    ]
    for kind, changes in forged:
        with pytest.raises(DatabaseError):
            copy_of(bench.engine, kind, **changes)
    copy_of(bench.engine, "commit", reservation_id=three.id)
    for steps_run in (11, -1, None):
        with pytest.raises(DatabaseError):
            copy_of(bench.engine, "settle", reservation_id=three.id, steps_run=steps_run)


def test_a_replay_finds_what_raw_sql_overspent(bench: Bench) -> None:
    """The rows are well-formed and say themselves that they add up."""
    bench.budget("1", "0.00001")
    claim = bench.claim()
    forged = bench.ledger.read(repository.find_ledger, TOY)
    assert forged is not None
    many = replace(claim, cost=claim.cost.times(3))
    with pytest.raises(OverBudget):
        bench.ledger.reserve(many, call())
    generous = LedgerStore(bench.engine)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(forged.state), "rule_for", lambda *_, **__: "filter")
        generous.reserve(many, call())
    result = replay(bench.engine)
    assert [item.code for item in result] == ["overspent"]
    assert "toy/example/add_remove" in result[0].message


def test_a_replay_finds_a_cost_below_what_is_released(bench: Bench) -> None:
    bench.budget()
    cheap = bench.claim(steps=1)
    bench.ledger.reserve(replace(bench.claim(), cost=cheap.cost), call())
    assert [item.code for item in replay(bench.engine)] == ["understated"]


def test_a_replay_finds_a_state_that_does_not_add_up(bench: Bench) -> None:
    bench.budget()
    one, _ = bench.ledger.reserve(bench.claim(), call())
    with bench.engine.connect() as connection:
        first = connection.execute(
            select(ledger_events.c.state).where(ledger_events.c.seq == 1)
        ).scalar_one()
    bench.ledger.reserve(bench.claim(), call())
    copy_of(bench.engine, "reserve", kind="release", reservation_id=one.id, step=2,
            follows="reserve", state=first, body='{"reason": ""}')  # fmt: skip
    codes = {item.code for item in replay(bench.engine)}
    assert codes == {"state_differs", "not_logged"}


def test_the_cost_of_a_certificate_that_is_not_stored_is_refused(bench: Bench) -> None:
    bench.budget()
    reservation, _ = bench.ledger.reserve(bench.claim(), call())
    unused: Any = None
    service = LedgerService(bench.ledger, bench.store, unused, unused, loopback=True)
    with pytest.raises(CertificateNotUsable, match="not stored"):
        asyncio.run(service.cost_of_steps(reservation.model_copy(update={"issue": 9}), 1))
