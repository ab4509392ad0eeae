"""A service that is killed between any two statements loses nothing and doubles nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import pytest
from sqlalchemy import func, select

from affidavit.service.ledger import repository
from affidavit.service.ledger.store import LedgerStore, LockedReservation
from affidavit.service.tables.ledger import ledger_events, reservations
from affidavit.service.tables.log import log_entries
from tests.service.child_processes import killed, on
from tests.service.ledger.conftest import TOY, Bench, call, claim_of
from tests.service.ledger_replay import replay

RECORD = "sha256:" + "0" * 64
STEPS = ("budget", "reserve", "commit", "settle", "release")
Work = Callable[[LedgerStore], Any]


def contents(bench: Bench) -> Any:
    """How many rows there are of each kind, and what the ledger adds up to."""
    tables = (reservations, ledger_events, log_entries)
    with bench.engine.connect() as connection:
        rows = [
            connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in tables
        ]
    stored = bench.ledger.read(repository.find_ledger, TOY)
    assert not replay(bench.engine)
    bench.engine.dispose()  # a connection must not be shared with the child
    return rows, None if stored is None else stored.state


def prepared(bench: Bench, step: str) -> Work:
    """What leads up to ``step``, and the step itself with an idempotency key."""
    if step == "budget":
        return methodcaller("set_budget", TOY, "8", "0.0001", "", call("k"))
    bench.budget()
    claim = claim_of(bench.certified())
    if step == "reserve":
        return methodcaller("reserve", claim, call("k"))
    created = bench.ledger.reserve(claim, call())[0].id
    if step == "commit":
        return methodcaller("change", created, call("k"), LockedReservation.commit_usable)
    if step == "release":
        return methodcaller("change", created, call("k"), LockedReservation.release, "")
    bench.commit(created)
    settle = LockedReservation.settle_by_hand
    return methodcaller("change", created, call("k"), settle, 10, RECORD)


@pytest.mark.ordinary("postgresql-reserve", "sqlite-settle")
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_any_statement_nothing_is_half_done_and_a_retry_does_it_once(
    bench: Bench, database_url: str, step: str
) -> None:
    work = prepared(bench, step)
    before = contents(bench)
    for statement in range(1, 40):
        if not killed(statement, database_url, partial(on, LedgerStore, work)):
            break
        assert contents(bench) == before, statement
    assert 4 < statement < 40
    after = contents(bench)
    assert after[0][1:] == [before[0][1] + 1, before[0][2] + 1]
    assert after[0][0] == before[0][0] + (step == "reserve")
    work(bench.ledger)
    assert contents(bench) == after
