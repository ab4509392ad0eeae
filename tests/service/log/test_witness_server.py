"""A witness beside a log: what it cosigns is kept and served, and it cosigns no second history."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from affidavit.certificate import SigningKey, encode_base64
from affidavit.certificate.log import (
    WitnessKey,
    cosign,
    note_key,
    parse_note,
    timestamp_line,
)
from affidavit.service.database import open_engine
from affidavit.service.errors import OperatorError
from affidavit.service.log import checkpoint_publisher, reader, witness_server
from affidavit.service.log.checkpoint_publisher import (
    CheckpointPublisher,
    Cosignatures,
    PublishError,
    WitnessDestination,
    destinations,
)
from affidavit.service.log.reader import find_cosigned_before
from affidavit.service.log.witness_server import FolderWitness, witness_app
from tests.service.log.conftest import KEY, ORIGIN, Log

NAME = "witness.example.org"
LOGS = (note_key(ORIGIN, KEY.public),)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[FolderWitness]:
    result = FolderWitness(tmp_path / "witness", NAME, LOGS)
    yield result
    result.close()


@pytest.fixture
def client(folder: FolderWitness) -> TestClient:
    return TestClient(witness_app(folder))


@pytest.fixture
def publisher(
    log: Log, folder: FolderWitness, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> CheckpointPublisher:
    """The log's publisher, to the witness without a network between them."""

    def post(_: str, content: bytes, media: str) -> httpx.Response:
        return client.post("/add-checkpoint", content=content, headers={"Content-Type": media})

    monkeypatch.setattr(checkpoint_publisher, "post", post)
    key = WitnessKey.of(NAME, folder.key)
    setting = f"witness+https://w.example/add-checkpoint#{key}"
    places = destinations(setting, log.reader, Cosignatures(log.engine))
    return CheckpointPublisher(places, log.sequence)


def addition(log: Log, old: int) -> bytes:
    stored = log.sequence()
    hashes = log.reader.consistency(old, stored.checkpoint.size).hashes if old else ()
    lines = "".join(f"{encode_base64(hash_)}\n" for hash_ in hashes)
    return f"old {old}\n{lines}\n{stored.note}".encode()


def test_cosignatures_are_kept_and_served(
    log: Log, folder: FolderWitness, publisher: CheckpointPublisher
) -> None:
    key = WitnessKey.of(NAME, folder.key)
    for count in (3, 5):
        stored = log.grow(count)
        assert log.reader.published().checkpoint.size in (3, stored.checkpoint.size)
        assert publisher.publish() is True
        shown = log.reader.published()
        assert shown.checkpoint == stored.checkpoint
        at = key.cosigned(parse_note(shown.note))
        assert at is not None
        assert abs(datetime.now(UTC) - at) < timedelta(minutes=1)
    assert folder.last(ORIGIN) == stored.checkpoint
    # A newer one that nobody cosigned yet does not hide it, and a second delivery adds nothing.
    log.grow(1)
    assert log.reader.published().note == shown.note
    Cosignatures(log.engine).store(stored.note, cosign(stored.note, NAME, folder.key, at), key)
    assert log.reader.published().note == shown.note


def test_an_answer_without_the_witnesss_cosignature_is_not_kept(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another's line, one of another text, or a page: nothing of it is served."""
    witness, other = SigningKey.generate(), SigningKey.generate()
    stored = log.grow(2)
    answers = [
        cosign(stored.note, NAME, other, datetime.now(UTC)),
        cosign(stored.note.replace("\n2\n", "\n1\n"), NAME, witness, datetime.now(UTC)),
        "<html>",
        "",
    ]
    place = WitnessDestination(
        "https://w.example/x", log.reader, WitnessKey.of(NAME, witness), Cosignatures(log.engine)
    )
    for answer in answers:
        monkeypatch.setattr(
            checkpoint_publisher,
            "post",
            lambda *_, answer=answer: httpx.Response(200, text=answer),
        )
        with pytest.raises(PublishError):
            place.send(stored)
    assert log.reader.published().note == stored.note


def test_of_each_witness_the_first_cosignature_alone_is_kept(log: Log) -> None:
    """So many that no reader takes the checkpoint would hide it, and all certificates in it."""
    stored, now = log.grow(2), datetime.now(UTC).replace(microsecond=0)
    for name in ("w0", "w1"):
        key = SigningKey.generate()
        witness, times = WitnessKey.of(name, key), [now + timedelta(n) for n in (2, 0, *range(60))]
        answer = "".join(cosign(stored.note, name, key, at) for at in times)
        Cosignatures(log.engine).store(stored.note, answer, witness)
        shown = parse_note(log.reader.published().note)
        assert witness.cosigned(shown) == now
    assert len(shown.signatures) == 3


def test_one_with_more_witnesses_stands_for_a_newer_one_for_a_while(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [SigningKey.generate() for _ in range(2)]
    store, now = Cosignatures(log.engine), datetime.now(UTC)

    def cosigned(note: str, *names: int) -> None:
        for name in names:
            witness = WitnessKey.of(f"w{name}", keys[name])
            store.store(note, cosign(note, f"w{name}", keys[name], now), witness)

    both = log.grow(2)
    cosigned(both.note, 0, 1)
    one = log.grow(1)
    cosigned(one.note, 0)
    assert log.reader.published().checkpoint == both.checkpoint
    monkeypatch.setattr(reader, "COSIGNING_TIME", timedelta(seconds=-5))
    assert log.reader.published().checkpoint == one.checkpoint
    newest = log.grow(1)
    assert log.reader.published().checkpoint == one.checkpoint
    monkeypatch.setattr(reader, "MAX_COSIGNED_AGE", timedelta(seconds=-5))
    assert log.reader.published().checkpoint == newest.checkpoint


def test_neither_timestamps_nor_a_witness_alone_hide_what_more_witnesses_saw(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, now = [SigningKey.generate() for _ in range(2)], datetime.now(UTC)
    store = Cosignatures(log.engine)
    monkeypatch.setattr(reader, "COSIGNING_TIME", timedelta(seconds=-5))

    def cosigned(note: str, *names: int) -> str:
        for name in names:
            witness = WitnessKey.of(f"w{name}", keys[name])
            store.store(note, cosign(note, f"w{name}", keys[name], now), witness)
        return note

    alone = [cosigned(log.grow(1).note, 0) for _ in range(3)]
    both = cosigned(log.grow(1).note, 0, 1)
    stamped = log.grow(1).note
    for note in (alone[0], stamped):
        for number in range(3):  # as store_timestamp stores them
            store._insert(
                note, f"{reader.TIMESTAMP_PREFIX}{number}", timestamp_line(b"%d" % number), now
            )
    assert log.reader.published().note.startswith(both)
    with log.engine.connect() as connection:
        before = find_cosigned_before(connection, 0, now + timedelta(hours=1))
    assert before is not None
    assert before.note.startswith(both)


def test_evidence_of_before_a_revocation_is_the_oldest_that_has_the_leaf(log: Log) -> None:
    witness = SigningKey.generate()
    key, store, noon = WitnessKey.of(NAME, witness), Cosignatures(log.engine), datetime.now(UTC)
    notes = []
    for hours in range(3):
        notes.append(log.grow(2).note)
        at = noon + timedelta(hours=hours)
        store.store(notes[-1], cosign(notes[-1], NAME, witness, at), key)
    with log.engine.connect() as connection:
        for leaf, since, expected in ((0, 9, 0), (2, 9, 1), (2, 1, None), (1, 1, 0), (6, 9, None)):
            found = find_cosigned_before(
                connection, leaf, noon + timedelta(hours=since, seconds=-1)
            )
            assert (found and found.note.startswith(notes[expected or 0])) == (
                None if expected is None else True
            )


# ---- The operator of the log, with its key: two histories


def test_a_second_history_is_not_cosigned(
    log: Log, client: TestClient, migrated_sqlite: Path, tmp_path: Path
) -> None:
    """Whoever has the log's key shows another log to somebody: without the witness's line."""
    log.grow(4)
    assert client.post("/add-checkpoint", content=addition(log, 0)).status_code == 200
    forked = tmp_path / "fork.db"
    forked.write_bytes(migrated_sqlite.read_bytes())
    engine = open_engine(f"sqlite:///{forked}")
    fork = Log(str(engine.url), engine, entered=100)
    fork.grow(4)
    same_size = fork.sequence().note
    proofless = client.post("/add-checkpoint", content=f"old 4\n\n{same_size}".encode())
    assert (proofless.status_code, proofless.text) == (409, "4\n")
    fork.grow(3)
    assert client.post("/add-checkpoint", content=addition(fork, 4)).status_code == 422
    restart = client.post("/add-checkpoint", content=addition(fork, 0))
    assert (restart.status_code, restart.headers["content-type"]) == (409, "text/x.tlog.size")
    log.grow(2)
    assert client.post("/add-checkpoint", content=addition(log, 4)).status_code == 200
    engine.dispose()


def test_what_it_does_not_know_is_refused(log: Log, client: TestClient) -> None:
    log.grow(1)
    body = addition(log, 0)
    other = replace(log, key=SigningKey.generate(), sequencers=[])
    assert client.post("/add-checkpoint", content=b"nonsense").status_code == 400
    assert client.post("/add-checkpoint", content=b"x" * 70_000).status_code == 413
    unknown = body.replace(ORIGIN.encode(), b"example.com/unknown")
    assert client.post("/add-checkpoint", content=unknown).status_code == 404
    strange = body.decode().rpartition("\n\n")[0].partition("\n\n")[2] + "\n"
    signed = note_by(other.key, strange)
    response = client.post("/add-checkpoint", content=f"old 0\n\n{signed}".encode())
    assert response.status_code == 403
    assert client.get("/add-checkpoint").status_code == 405


def note_by(key: SigningKey, body: str) -> str:
    from affidavit.certificate.log.note import sign_note

    return str(sign_note(body, note_key(ORIGIN, key.public), key.sign))


# ---- What it remembers


def test_it_remembers_before_it_answers(
    log: Log, client: TestClient, folder: FolderWitness, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.grow(2)
    body = addition(log, 0)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(witness_server, "write_atomically", full)
        assert client.post("/add-checkpoint", content=body).status_code == 503
    assert folder.last(ORIGIN) is None
    assert client.post("/add-checkpoint", content=body).status_code == 200


def test_it_goes_on_after_a_restart_with_its_key_and_its_memory(
    log: Log, client: TestClient, folder: FolderWitness, tmp_path: Path
) -> None:
    log.grow(2)
    client.post("/add-checkpoint", content=addition(log, 0))
    with pytest.raises(OperatorError, match="another witness"):
        FolderWitness(tmp_path / "witness", NAME, LOGS)
    folder.close()
    again = FolderWitness(tmp_path / "witness", NAME, LOGS)
    assert again.key.key_id == folder.key.key_id
    assert again.last(ORIGIN) == log.sequence().checkpoint
    again.close()
    for damaged in ("{}", "", '{"version": 1, "checkpoints": {"a": "b"}}'):
        (tmp_path / "witness" / "checkpoints.json").write_text(damaged)
        with pytest.raises(OperatorError, match="cannot be read"):
            FolderWitness(tmp_path / "witness", NAME, LOGS)
