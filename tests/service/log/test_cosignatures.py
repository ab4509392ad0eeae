"""What witnesses cosign is verified, kept and served."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from affidavit.service.log import checkpoint_publisher, reader
from affidavit.service.log.checkpoint_publisher import (
    CheckpointPublisher,
    Cosignatures,
    PublishError,
    WitnessDestination,
    destinations,
)
from affidavit.service.log.reader import find_cosigned_before
from affidavit.trust import SigningKey
from affidavit.trust.log import (
    WitnessKey,
    note_key,
    parse_note,
    timestamp_line,
)
from tests.service.log.conftest import KEY, ORIGIN, Log
from tests.support.witness import Witness, cosign

NAME = "witness.example.org"


@pytest.fixture
def witness() -> Witness:
    return Witness(NAME, note_key(ORIGIN, KEY.public))


@pytest.fixture
def publisher(log: Log, witness: Witness, listening: Any) -> CheckpointPublisher:
    """The log's publisher to the witness."""
    setting = f"witness+{listening(witness.answer)}#{witness.verifier_key}"
    places = destinations(setting, log.reader, Cosignatures(log.engine))
    return CheckpointPublisher(places, log.sequence)


def test_cosignatures_are_kept_and_served(
    log: Log, witness: Witness, publisher: CheckpointPublisher
) -> None:
    key = witness.verifier_key
    for count in (3, 5):
        stored = log.grow(count)
        assert log.reader.published().checkpoint.size in (3, stored.checkpoint.size)
        assert publisher.publish() is True
        shown = log.reader.published()
        assert shown.checkpoint == stored.checkpoint
        at = key.cosigned(parse_note(shown.note))
        assert at is not None
        assert abs(datetime.now(UTC) - at) < timedelta(minutes=1)
    assert witness.last == stored.checkpoint
    # A newer one that nobody cosigned yet does not hide it, and a second delivery adds nothing.
    log.grow(1)
    assert log.reader.published().note == shown.note
    Cosignatures(log.engine).store(stored.note, cosign(stored.note, NAME, witness.key, at), key)
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
