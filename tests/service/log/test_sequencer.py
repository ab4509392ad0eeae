"""The sequencer: entries are sequenced in order, without gaps, once each, even if killed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from typing import Any

import pytest
from sqlalchemy import insert, select, text
from sqlalchemy.exc import DatabaseError, OperationalError

from affidavit.service.core.database import open_engine, writer
from affidavit.service.log.entries import append
from affidavit.service.log.sequencer import SEQUENCER_LOCK, Sequencer, sequence
from affidavit.service.tables.log import (
    log_checkpoints,
    log_entries,
    log_leaves,
)
from affidavit.trust import (
    KeyFailure,
    PublicKey,
    SigningKey,
)
from affidavit.trust.log import (
    leaf_content,
    merkle_tree,
    read_checkpoint,
)
from tests.service import child_processes
from tests.service.child_processes import killed
from tests.service.log.conftest import KEY, NOON, ORIGIN, Log
from tests.support.polling import wait_until

SEVERAL_WRITERS = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
"""For what cannot come about on SQLite, whose writers wait for one another."""


def order(log: Log) -> list[int]:
    """The numbers that were entered, in the order of the leaves; these are without a gap."""
    query = (
        select(log_leaves.c.leaf_index, log_entries.c.subject)
        .join(log_entries)
        .order_by(log_leaves.c.leaf_index)
    )
    with log.engine.connect() as connection:
        rows = connection.execute(query).all()
    assert [index for index, _ in rows] == list(range(len(rows)))
    return [int(subject.removeprefix("run ")) for _, subject in rows]


def test_entries_get_their_places_in_order_and_are_signed(log: Log) -> None:
    stored = log.grow(1, 6, 130)
    assert order(log) == list(range(137))
    tree = merkle_tree.Frontier()
    with log.engine.connect() as connection:
        entries = select(log_entries.c.content, log_entries.c.salt).order_by(log_entries.c.id)
        for content, salt in connection.execute(entries):
            tree.append(merkle_tree.leaf_hash(leaf_content(content, salt)))
        sizes = connection.execute(select(log_checkpoints.c.tree_size).order_by("id")).scalars()
        assert list(sizes) == [1, 7, 137]
    assert stored.checkpoint.root_hash == tree.root()
    assert stored.checkpoint.origin == ORIGIN
    assert log.value("SELECT COUNT(*) FROM log_pending") == 0
    assert log.audit(stored.checkpoint) == []


def test_without_work_nothing_is_signed(log: Log) -> None:
    assert log.sequencer().step() is False
    assert log.value("SELECT COUNT(*) FROM log_checkpoints") == 0
    log.grow(3)
    sequencer = log.sequencer()
    for _ in range(3):
        assert sequencer.step() is False
    assert log.value("SELECT COUNT(*) FROM log_checkpoints") == 1


def test_batches_are_bounded_and_leave_no_entry_behind(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = partial(sequence, limit=10)
    monkeypatch.setattr("affidavit.service.log.sequencer.sequence", small)
    log.enter(35)
    sequencer = log.sequencer()
    assert [sequencer.step() for _ in range(4)] == [True, True, True, False]
    assert order(log) == list(range(35))


@SEVERAL_WRITERS
def test_a_rolled_back_transaction_leaves_no_gap_and_a_late_one_comes_later(log: Log) -> None:
    """Row ids are given out before a commit: a smaller id may appear after a larger one."""
    early = log.engine.connect()
    transaction = early.begin()
    append(early, "exercise", "run 1000", {}, actor="tests", at=NOON)
    lost = log.engine.connect()
    append(lost, "exercise", "run 2000", {}, actor="tests", at=NOON)
    lost.rollback()
    lost.close()
    log.grow(3)
    assert order(log) == [0, 1, 2]
    transaction.commit()
    early.close()
    log.grow(2)
    assert order(log) == [0, 1, 2, 1000, 3, 4]
    assert log.audit() == []


@pytest.mark.in_both
def test_many_sequencers_and_writers_at_once(log: Log) -> None:
    done = threading.Event()
    engines = [open_engine(log.url) for _ in range(3)]
    numbers = count()
    lock = threading.Lock()

    def write(_: int) -> None:
        for _each in range(40):
            with lock:
                number = next(numbers)
            with writer(log.engine).begin() as connection:
                append(connection, "exercise", f"run {number}", {}, actor="tests", at=NOON)

    def run(engine: Any) -> None:
        sequencer = Sequencer(engine, lambda: KEY, origin=ORIGIN)
        while not done.is_set():
            sequencer.step()
        while sequencer.step():
            pass

    with ThreadPoolExecutor(6) as threads:
        runs = [threads.submit(run, engine) for engine in engines]
        for item in [threads.submit(write, number) for number in range(3)]:
            item.result()
        done.set()
        for entry in runs:
            entry.result()
    for engine in engines:
        engine.dispose()
    log.sequence()
    assert sorted(order(log)) == list(range(120))
    assert log.audit() == []


@SEVERAL_WRITERS
def test_a_second_sequencer_waits_for_no_lock(log: Log) -> None:
    """While another process is at it there is nothing to do."""
    log.enter(2)
    with log.engine.begin() as connection:
        connection.execute(text(f"SELECT pg_advisory_xact_lock({SEQUENCER_LOCK})"))
        assert log.sequencer().step() is False
        assert log.value("SELECT COUNT(*) FROM log_leaves") == 0
    log.sequence()
    assert order(log) == [0, 1]


# ---- kill -9 ----------------------------------------------------------------------------


@pytest.mark.ordinary("sqlite")
def test_killed_before_any_of_its_statements_it_loses_and_doubles_nothing(log: Log) -> None:
    log.grow(5)
    log.engine.dispose()
    for statements in range(1, 40):
        log.enter(3)
        before = log.value("SELECT MAX(leaf_index) FROM log_leaves") + 1
        log.engine.dispose()
        was_killed = killed(statements, log.url, partial(child_processes.sequence, KEY, ORIGIN))
        after = log.value("SELECT MAX(leaf_index) FROM log_leaves") + 1
        assert after == (before if was_killed else log.entered)
        assert log.audit() == []
        if not was_killed:
            break
    assert 6 <= statements < 40
    log.sequence()
    assert order(log) == list(range(log.entered))


def test_an_entry_is_lost_with_the_transaction_that_it_tells_of(log: Log) -> None:
    with writer(log.engine).connect() as connection:
        append(connection, "exercise", "run 0", {}, actor="tests", at=NOON)
        connection.rollback()
    assert log.value("SELECT COUNT(*) FROM log_entries") == 0
    assert log.value("SELECT COUNT(*) FROM log_pending") == 0


# ---- the tables refuse ---------------------------------------------------------------------

FORBIDDEN = [
    "UPDATE log_leaves SET leaf_hash = leaf_hash",
    "DELETE FROM log_leaves",
    "UPDATE log_nodes SET position = position + 100",
    "DELETE FROM log_nodes",
    "UPDATE log_checkpoints SET tree_size = 1",
    "DELETE FROM log_checkpoints",
    "UPDATE log_entries SET subject = 'x'",
    "DELETE FROM log_entries",
]


@pytest.mark.in_both
@pytest.mark.parametrize("statement", FORBIDDEN)
def test_rows_of_the_log_cannot_be_changed_or_removed(log: Log, statement: str) -> None:
    log.grow(4)
    with pytest.raises(DatabaseError, match="append-only"), log.engine.begin() as connection:
        connection.execute(text(statement))
    assert log.audit() == []


@pytest.mark.in_both
def test_rows_of_the_log_cannot_be_replaced_or_truncated(log: Log) -> None:
    log.grow(4)
    if log.engine.dialect.name == "sqlite":
        statements = [
            "INSERT OR REPLACE INTO log_leaves SELECT leaf_index, entry_id, x'00' FROM log_leaves",
            "INSERT OR REPLACE INTO log_nodes SELECT level, position, x'00' FROM log_nodes",
            "INSERT OR REPLACE INTO log_checkpoints SELECT * FROM log_checkpoints",
        ]
    else:
        statements = [
            f"TRUNCATE {name} CASCADE"
            for name in ("log_leaves", "log_nodes", "log_checkpoints", "log_entries")
        ]
    for statement in statements:
        with pytest.raises(DatabaseError), log.engine.begin() as connection:
            connection.execute(text(statement))
    assert log.audit() == []


def test_an_entry_has_one_place_and_a_place_one_entry(log: Log) -> None:
    log.grow(2)
    for row in (
        {"leaf_index": 2, "entry_id": 1, "leaf_hash": bytes(32)},
        {"leaf_index": 1, "entry_id": 2, "leaf_hash": bytes(32)},
        {"leaf_index": 2, "entry_id": 999, "leaf_hash": bytes(32)},
        {"leaf_index": -1, "entry_id": 999, "leaf_hash": bytes(32)},
    ):
        with pytest.raises(DatabaseError), log.engine.begin() as connection:
            connection.execute(insert(log_leaves).values(**row))


# ---- keys and origins ---------------------------------------------------------------------


def test_a_checkpoint_whose_key_no_longer_counts_is_signed_anew(log: Log) -> None:
    log.key = SigningKey.generate(development=True)
    first = log.grow(3)
    log.key = SigningKey.generate("real")
    second = log.sequence()
    assert second.key.key_id == log.key.key_id
    assert second.checkpoint.root_hash == first.checkpoint.root_hash
    assert log.sequencer().step() is False
    # A development key, or a newer good one, is no reason to sign again.
    for key in (SigningKey.generate(development=True), SigningKey.generate("newer")):
        log.key = key
        assert log.sequence().note == second.note
    assert log.audit(first.checkpoint) == []


def test_the_end_of_a_keys_window_is_a_reason_to_sign_again(log: Log) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    old = SigningKey.generate("old")
    log.key = SigningKey(
        private=old.private,
        public=PublicKey(
            key=old.public.key,
            not_before=now - timedelta(days=2),
            not_after=now - timedelta(days=1),
        ),
    )
    log.grow(2)
    log.key = SigningKey.generate("new")
    assert log.sequence().key.key_id == log.key.key_id


def test_a_log_names_itself_once_and_keeps_its_name(log: Log) -> None:
    log.enter()
    named = log.sequence(origin=None).checkpoint.origin
    assert named.startswith("affidavit.invalid/")
    log.enter()
    assert log.sequence(origin=None).checkpoint.origin == named
    sequencer = log.sequencer(origin="example.com/another")
    log.enter()
    sequencer.start()
    wait_until(lambda: sequencer.problem is not None)
    sequencer.stop()
    assert sequencer.problem is not None
    assert "AFFIDAVIT_LOG_ORIGIN" in sequencer.problem.message


# ---- the thread ----------------------------------------------------------------------------


def test_the_thread_signs_while_entries_come_and_takes_up_what_waits_when_it_ends(log: Log) -> None:
    sequencer = log.sequencer()
    sequencer.start()
    for _ in range(3):
        log.enter(2)
        wait_until(lambda: log.value("SELECT COUNT(*) FROM log_pending") == 0)
    log.enter(5)
    sequencer.stop()
    assert log.value("SELECT COUNT(*) FROM log_pending") == 0
    assert sequencer.problem is None
    assert read_checkpoint(str(log.reader.latest().note)).size == 11


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OperationalError("SELECT", {}, Exception("gone")), "cannot use the database"),
        (KeyFailure("the key is gone"), "cannot be signed: the key is gone"),
        (RuntimeError("a fault"), "failed unexpectedly"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failures_are_retried(
    log: Log,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    message: str,
) -> None:
    sequencer = log.sequencer()

    def gone(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("affidavit.service.log.sequencer.has_work", gone)
        log.enter()
        sequencer.start()
        wait_until(lambda: message in caplog.text)
        assert sequencer.problem is None
    wait_until(lambda: log.value("SELECT COUNT(*) FROM log_pending") == 0)
    sequencer.stop()
