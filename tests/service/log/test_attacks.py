"""The owner of the database tampers with it, after dropping every trigger.

For each attack, the sequencer signs nothing on top of it where it can see it, and the audit
reports it. An owner who also has the signing key and rewrites everything is detected by an
external checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from affidavit.service.core.database import writer
from affidavit.service.core.errors import LogDamaged
from affidavit.service.log.checkpoint_publisher import FileDestination, published_checkpoints
from affidavit.service.log.sequencer import Sequencer
from affidavit.service.log.stored_tree import StoredCheckpoint
from affidavit.trust import SigningKey
from affidavit.trust.log import (
    leaf_content,
    merkle_tree,
    read_checkpoint,
    sign_checkpoint,
)
from tests.service.log.conftest import KEY, NOON, ORIGIN, Log

Tamper = Callable[..., None]


def refused(log: Log, sequencer: Sequencer | None = None) -> None:
    """The sequencer refuses to sign the log, although an entry is pending."""
    log.enter()
    signed = log.value("SELECT COUNT(*) FROM log_checkpoints")
    with pytest.raises(LogDamaged):
        (sequencer or log.sequencer()).step()
    assert log.value("SELECT COUNT(*) FROM log_checkpoints") == signed


@pytest.fixture
def seen(log: Log) -> StoredCheckpoint:
    """A log of 13 entries, in three batches: subtrees of 8, 4 and 1 leaves stand at its edge."""
    return log.grow(4, 6, 3)


# ---- the tree's own tables ------------------------------------------------------------


def test_a_gap_is_inserted(log: Log, seen: StoredCheckpoint, tamper: Tamper) -> None:
    assert seen.checkpoint.size == 13
    log.enter()
    tamper(
        "INSERT INTO log_leaves (leaf_index, entry_id, leaf_hash) VALUES (14, 14, :hash)",
        hash=bytes(32),
    )
    refused(log)
    assert {"leaf_missing"} <= log.codes()


def test_a_leaf_is_appended_without_a_checkpoint(
    log: Log, seen: StoredCheckpoint, tamper: Tamper
) -> None:
    assert seen.checkpoint.size == 13
    log.enter()
    tamper(
        "DELETE FROM log_pending",
        "INSERT INTO log_leaves (leaf_index, entry_id, leaf_hash) VALUES (13, 14, :hash)",
        hash=bytes(32),
    )
    refused(log)
    assert {"leaf_changed", "checkpoint_missing"} <= log.codes()


def test_an_entry_is_inserted_that_never_waits(
    log: Log, seen: StoredCheckpoint, tamper: Tamper
) -> None:
    assert seen.checkpoint.size == 13
    tamper(
        "INSERT INTO log_entries (id, kind, subject, at, content) "
        "VALUES (99, 'run', 'x', :at, '{}')",
        at=NOON.isoformat(sep=" ") if "sqlite" in log.url else NOON,
    )
    assert log.codes() == {"entry_not_sequenced"}


def test_an_entry_does_not_leave_the_queue_before_it_has_a_place(
    log: Log, seen: StoredCheckpoint
) -> None:
    """Until then it counts as logged, and nobody outside has seen it."""
    assert seen.checkpoint.size == 13
    log.enter()
    for statement in ("DELETE FROM log_pending", "UPDATE log_pending SET entry_id = 1"):
        with (
            pytest.raises(IntegrityError, match="has no place in the tree"),
            writer(log.engine).begin() as connection,
        ):
            connection.execute(text(statement))
    assert log.sequence().checkpoint.size == 14


def test_a_row_in_the_middle_is_dropped(log: Log, seen: StoredCheckpoint, tamper: Tamper) -> None:
    tamper("DELETE FROM log_leaves WHERE leaf_index = 5")
    assert "leaf_missing" in log.codes(seen.checkpoint)


@pytest.mark.parametrize("index", [0, 5, 12])
@pytest.mark.usefixtures("seen")
def test_a_leaf_is_changed(log: Log, tamper: Tamper, index: int) -> None:
    tamper(f"UPDATE log_leaves SET leaf_hash = :hash WHERE leaf_index = {index}", hash=bytes(32))
    assert log.codes() == {"leaf_changed"}
    with pytest.raises(LogDamaged):
        log.reader.inclusion(index, None, None)
    if index == 12:  # it is on the edge, where the next leaf goes
        refused(log)


@pytest.mark.parametrize("column", ["subject", "content"])
def test_an_entry_is_changed(log: Log, seen: StoredCheckpoint, tamper: Tamper, column: str) -> None:
    value = "'run 77'" if column == "subject" else "REPLACE(content, 'run 3', 'run 9')"
    tamper(f"UPDATE log_entries SET {column} = {value} WHERE subject = 'run 3'")
    result = log.codes(seen.checkpoint)
    assert "entry_changed" in result
    if column == "content":
        # The bytes that are hashed: every root since then is another.
        assert {"leaf_changed", "checkpoint_mismatch", "rewritten"} <= result


def test_an_entry_is_changed_with_its_hash_and_every_node_above(
    log: Log, seen: StoredCheckpoint, tamper: Tamper
) -> None:
    """The tables agree with each other; the signed root does not."""
    _rewrite_tree(log, tamper, changed=3)
    assert log.codes() == {"checkpoint_mismatch"}
    assert "rewritten" in log.codes(seen.checkpoint)
    refused(log)


@pytest.mark.usefixtures("seen")
def test_nodes_are_swapped(log: Log, tamper: Tamper) -> None:
    _swap(log, tamper, "level = 1", 0, 1)
    assert log.codes() == {"node_changed"}
    with pytest.raises(LogDamaged):
        log.reader.inclusion(2, None, None)


@pytest.mark.usefixtures("seen")
def test_nodes_on_the_edge_are_changed_or_gone(log: Log, tamper: Tamper) -> None:
    tamper("DELETE FROM log_nodes WHERE level = 2 AND position = 2")
    refused(log)
    assert "node_missing" in log.codes()


@pytest.mark.usefixtures("seen")
def test_a_node_of_no_subtree_is_added(log: Log, tamper: Tamper) -> None:
    tamper("INSERT INTO log_nodes (level, position, hash) VALUES (3, 1, :hash)", hash=bytes(32))
    assert log.codes() == {"node_changed"}


# ---- checkpoints ------------------------------------------------------------------------


@pytest.mark.usefixtures("seen")
def test_a_checkpoint_is_of_a_fork(log: Log, tamper: Tamper) -> None:
    """A note for other leaves, signed by the log's true key, as the newest."""
    fork = sign_checkpoint(KEY, origin=ORIGIN, size=13, root_hash=bytes(32), at=datetime.now(UTC))
    tamper("UPDATE log_checkpoints SET note = :note WHERE tree_size = 13", note=fork)
    refused(log)
    assert "checkpoint_mismatch" in log.codes()


@pytest.mark.parametrize("change", ["signature", "size", "key", "text", "origin"])
def test_a_checkpoint_is_changed(
    log: Log, seen: StoredCheckpoint, tamper: Tamper, change: str
) -> None:
    note = seen.note
    if change == "size":
        tamper("UPDATE log_checkpoints SET tree_size = 12 WHERE tree_size = 13")
        refused(log)
        return
    forged = {
        "signature": note[:-6] + ("A" if note[-6] != "A" else "B") + note[-5:],
        "key": sign_checkpoint(
            SigningKey.generate(),
            origin=ORIGIN,
            size=13,
            root_hash=seen.checkpoint.root_hash,
            at=NOON,
        ),
        "text": note.replace("\n13\n", "\n12\n"),
        "origin": note.replace(ORIGIN, "example.com/other"),
    }[change]
    tamper("UPDATE log_checkpoints SET note = :note WHERE tree_size = 13", note=forged)
    refused(log)
    assert "checkpoint_changed" in log.codes()


@pytest.mark.usefixtures("seen")
def test_all_checkpoints_are_dropped(log: Log, tamper: Tamper) -> None:
    tamper("DELETE FROM log_checkpoints")
    refused(log)
    assert "checkpoint_missing" in log.codes()


@pytest.mark.usefixtures("seen")
def test_the_newest_checkpoint_is_dropped(log: Log, tamper: Tamper) -> None:
    tamper("DELETE FROM log_checkpoints WHERE tree_size = 13")
    refused(log)
    assert log.codes() == {"checkpoint_missing"}


# ---- the last rows are dropped and others appended ------------------------------------------


def _drop_last(tamper: Tamper, size: int) -> None:
    """Take the log back to an earlier checkpoint, with every row of every table that is younger."""
    tamper(
        f"DELETE FROM log_checkpoints WHERE tree_size > {size}",
        f"DELETE FROM log_leaves WHERE leaf_index >= {size}",
        f"DELETE FROM log_nodes WHERE (position + 1) * (1 << level) > {size}",
        f"DELETE FROM log_entries WHERE id > {size}",
    )


def test_the_last_rows_are_dropped(log: Log, seen: StoredCheckpoint, tamper: Tamper) -> None:
    _drop_last(tamper, 10)
    # Nothing that is left tells of it ...
    assert log.audit() == []
    # ... but what was kept elsewhere.
    assert log.codes(seen.checkpoint) == {"rolled_back"}


def test_the_last_rows_are_dropped_and_others_appended(
    log: Log, seen: StoredCheckpoint, tamper: Tamper, tmp_path: Path
) -> None:
    """The service itself, started anew, signs the fork: it has nothing to compare with."""
    export = FileDestination(tmp_path / "checkpoint")
    export.send(seen)
    _drop_last(tamper, 10)
    log.entered = 500
    fork = log.grow(7)
    assert fork.checkpoint.size == 17
    assert log.audit() == []
    assert log.codes(seen.checkpoint) == {"rewritten"}
    # Its own proofs show it to whoever remembers the checkpoint.
    proof = log.reader.consistency(13, 17)
    with pytest.raises(merkle_tree.ProofError):
        merkle_tree.verify_consistency(
            first=13,
            second=17,
            first_root=seen.checkpoint.root_hash,
            second_root=fork.checkpoint.root_hash,
            proof=proof.hashes,
        )
    # A service that is told where a checkpoint lies signs nothing.
    told = log.sequencer(published=lambda: published_checkpoints([export]))
    refused(log, told)


@pytest.mark.usefixtures("seen")
def test_a_running_service_notices_that_its_log_was_rolled_back(log: Log, tamper: Tamper) -> None:
    running = log.sequencer()
    assert running.step() is False
    assert running.newest() is not None
    _drop_last(tamper, 10)
    refused(log, running)
    log.entered = 500
    log.grow(7)  # by another process
    refused(log, running)


def test_a_service_that_is_told_of_a_larger_log_signs_nothing(
    log: Log,
    seen: StoredCheckpoint,
    tamper: Tamper,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    export = FileDestination(tmp_path / "checkpoint")
    export.send(seen)
    _drop_last(tamper, 10)
    told = log.sequencer(published=lambda: published_checkpoints([export]))
    with caplog.at_level(logging.CRITICAL):
        log.enter()
        told.start()
        told.stop()
    assert "THE LOG IS DAMAGED" in caplog.text
    assert told.problem is not None
    assert told.problem.code == "log_damaged"
    assert log.value("SELECT MAX(tree_size) FROM log_checkpoints") == 10


def test_a_kept_checkpoint_of_another_log(log: Log, seen: StoredCheckpoint) -> None:
    other = sign_checkpoint(
        KEY,
        origin="example.com/other",
        size=13,
        root_hash=seen.checkpoint.root_hash,
        at=datetime.now(UTC),
    )
    assert log.codes(read_checkpoint(other)) == {"other_log"}


def test_the_log_that_was_repaired_grows_again(
    log: Log, seen: StoredCheckpoint, tamper: Tamper
) -> None:
    stored = log.value("SELECT leaf_hash FROM log_leaves WHERE leaf_index = 12")
    tamper("UPDATE log_leaves SET leaf_hash = :hash WHERE leaf_index = 12", hash=bytes(32))
    sequencer = log.sequencer()
    refused(log, sequencer)
    tamper("UPDATE log_leaves SET leaf_hash = :hash WHERE leaf_index = 12", hash=bytes(stored))
    assert sequencer.step() is False
    assert log.codes(seen.checkpoint) == set()
    assert log.value("SELECT MAX(tree_size) FROM log_checkpoints") == 14


# ---- the owner's tools ------------------------------------------------------------------


def _swap(log: Log, tamper: Tamper, where: str, first: int, second: int) -> None:
    read = f"SELECT hash FROM log_nodes WHERE {where} AND position = "
    one, two = (bytes(log.value(read + str(item))) for item in (first, second))
    write = f"UPDATE log_nodes SET hash = :hash WHERE {where} AND position = "
    tamper(write + str(first), hash=two)
    tamper(write + str(second), hash=one)


def _rewrite_tree(log: Log, tamper: Tamper, changed: int) -> None:
    """Change an entry and write every hash above it anew."""
    tamper(
        f"UPDATE log_entries SET content = REPLACE(content, '\"run {changed}\"', '\"run 999\"'), "
        f"subject = 'run 999' WHERE subject = 'run {changed}'"
    )
    tree = merkle_tree.Frontier()
    with log.as_owner() as connection:
        query = text("SELECT content, salt FROM log_entries ORDER BY id")
        rows: Any = connection.execute(query).all()
        for content, salt in rows:
            for place, value in tree.append(merkle_tree.leaf_hash(leaf_content(content, salt))):
                table = "log_nodes" if place.level else "log_leaves"
                if place.level:
                    statement = (
                        f"UPDATE {table} SET hash = :hash WHERE level = {place.level} "
                        f"AND position = {place.position}"
                    )
                else:
                    statement = (
                        f"UPDATE {table} SET leaf_hash = :hash WHERE leaf_index = {place.position}"
                    )
                connection.execute(text(statement), {"hash": value})
