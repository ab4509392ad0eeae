"""Publish checkpoints outside the database: to files, URLs and witnesses, with timestamps."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from affidavit.client import NoTimestamp, request_timestamp
from affidavit.client.calls import MAX_POST_BYTES
from affidavit.service.__main__ import main
from affidavit.service.core.errors import LogDamaged, SettingsError
from affidavit.service.log.checkpoint_publisher import (
    CheckpointPublisher,
    FileDestination,
    PublishError,
    UrlDestination,
    WitnessDestination,
    destinations,
    published_checkpoints,
)
from affidavit.service.log.stored_tree import StoredCheckpoint
from affidavit.service.settings import Settings
from affidavit.trust.log import NoteKey, note_key
from tests.service.log.conftest import KEY, ORIGIN, Answer, Log
from tests.support.polling import TIMEOUT_SECONDS, wait_until
from tests.support.witness import Witness

NAME = "witness.example.com"


# ---- files and URLs -----------------------------------------------------------------------


def test_a_file_holds_the_newest_checkpoint(log: Log, tmp_path: Path) -> None:
    destination = FileDestination(tmp_path / "checkpoint")
    assert destination.last() is None
    for count in (2, 3):
        stored = log.grow(count)
        destination.send(stored)
        assert (tmp_path / "checkpoint").read_text() == stored.note
        assert destination.last() == stored.checkpoint
    assert [item.name for item in tmp_path.iterdir() if "checkpoint" in item.name] == ["checkpoint"]


def test_an_unusable_file_is_an_error(log: Log, tmp_path: Path) -> None:
    stored = log.grow(1)
    with pytest.raises(PublishError, match="none"):
        FileDestination(tmp_path / "none" / "checkpoint").send(stored)
    (tmp_path / "other").write_text("a letter")
    with pytest.raises(LogDamaged, match="other"):
        published_checkpoints([FileDestination(tmp_path / "other")])


def test_a_url_gets_each_checkpoint_and_its_secret_is_not_repeated(
    log: Log, listening: Any
) -> None:
    got = []

    def answer(body: bytes, headers: Any) -> Answer:
        got.append((body.decode(), headers["content-type"]))
        return (503 if len(got) == 1 else 204), "text/plain", b""

    destination = UrlDestination(listening(answer))
    stored = log.grow(1)
    with pytest.raises(PublishError, match=r"^127\.0\.0\.1 answered 503$"):
        destination.send(stored)
    destination.send(stored)
    assert got == [(stored.note, "text/plain; charset=utf-8")] * 2
    with pytest.raises(PublishError, match=r"127\.0\.0\.1") as caught:
        UrlDestination("http://127.0.0.1:1/secret").send(stored)
    assert "secret" not in str(caught.value)


def test_the_publisher_tries_again_and_sends_nothing_twice(log: Log, tmp_path: Path) -> None:
    stored: list[StoredCheckpoint | None] = [None]
    place = tmp_path / "later" / "checkpoint"
    publisher = CheckpointPublisher(
        [FileDestination(tmp_path / "first"), FileDestination(place)], lambda: stored[0]
    )
    assert publisher.publish() is True
    stored[0] = log.grow(2)
    assert publisher.publish() is False
    place.parent.mkdir()
    (tmp_path / "first").unlink()
    assert publisher.publish() is True
    assert place.read_text() == stored[0].note
    assert not (tmp_path / "first").exists()
    stored[0] = log.grow(1)
    publisher.start()
    publisher.stop()
    assert place.read_text() == (tmp_path / "first").read_text() == stored[0].note


def test_one_that_does_not_end_its_answer_delays_no_other(
    log: Log, tmp_path: Path, listening: Any
) -> None:
    """Nor does one that answers too much fill the memory."""
    much, ended = b"x" * (MAX_POST_BYTES + 1), threading.Event()

    def late(_body: bytes, _headers: Any) -> Answer:
        ended.wait(TIMEOUT_SECONDS)
        return 204, "text/plain", b""

    stored, place = log.grow(1), tmp_path / "checkpoint"
    with pytest.raises(PublishError, match="RemoteProtocolError"):
        UrlDestination(listening(lambda *_: (200, "text/plain", much))).send(stored)
    hanging = UrlDestination(listening(late))
    publisher = CheckpointPublisher([hanging, FileDestination(place)], lambda: stored)
    publisher.start()
    wait_until(place.exists)
    ended.set()
    publisher.stop()


def test_destinations_in_the_setting(log: Log) -> None:
    result = destinations("/a/b, https://x.example/y,,witness+https://w.example/add", log.reader)
    assert [type(item) for item in result] == [FileDestination, UrlDestination, WitnessDestination]
    assert [entry.name for entry in result] == ["/a/b", "x.example", "w.example"]
    assert destinations("", log.reader) == ()


# ---- witnesses ------------------------------------------------------------------------------


def test_a_witness_is_found_where_it_is_and_brought_up_to_date(
    log: Log, listening: Any, tamper: Any
) -> None:
    """Over the wire: the export asks for nothing first, and is told how far the witness is.

    A log that was rolled back since cannot hide it from its own operator, whom only most of the
    witnesses can stop.
    """

    url = listening(Witness(NAME, note_key(ORIGIN, KEY.public)).answer)
    first = WitnessDestination(url, log.reader)
    for count in (2, 4, 1):
        older = log.grow(count)
        first.send(older)
    again = WitnessDestination(url, log.reader)
    again.send(log.grow(3))
    publisher = CheckpointPublisher([first], lambda: older)
    assert publisher.publish() is True  # another replica had more of it cosigned
    tamper("DELETE FROM log_checkpoints WHERE tree_size > 7")
    silent = WitnessDestination("http://127.0.0.1:1", log.reader)
    forked = WitnessDestination(listening(lambda *_: (422, "text/plain", b"")), log.reader)
    for places, stops in (
        ([first], True),
        ([again, first], True),
        ([first, silent], False),
        ([first, silent, forked], True),
    ):
        publisher = CheckpointPublisher(places, lambda: older)
        assert publisher.publish() is False
        assert (publisher.problem is not None) is stops
    with pytest.raises(PublishError, match="10 entries"):
        first.send(older)


def test_the_logs_name_is_one_of_a_key(tmp_path: Path) -> None:
    home = {"AFFIDAVIT_HOME": str(tmp_path)}
    with pytest.raises(SettingsError, match="AFFIDAVIT_LOG_ORIGIN"):
        Settings.from_environment(home | {"AFFIDAVIT_LOG_ORIGIN": "a+b"})


# ---- the command line, with an authority of our own -------------------------------------------


def test_a_checkpoint_is_stamped_and_the_stamp_verified(
    log: Log,
    authority: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path))
    monkeypatch.setenv("DATABASE_URL", log.url)
    url, root = authority
    stored = log.grow(4)
    path = tmp_path / "checkpoint"
    assert main(["audit", "export-checkpoint", str(path), "--stamp", url]) == 0
    assert path.read_text() == stored.note
    verify = ["audit", "verify", f"--checkpoint={path}", f"--stamp-roots={root}"]
    assert main(verify) == 0
    assert str(path) in capsys.readouterr().err
    # As openssl reads it.
    check = ["openssl", "ts", "-verify", "-in", f"{path}.tsr", "-data", path, "-CAfile", root]
    assert subprocess.run(check, capture_output=True, check=False).returncode == 0
    # Of another checkpoint, by another authority, or none at all.
    other = tmp_path / "other"
    other.write_text(log.grow(1).note)
    shutil.copy(f"{path}.tsr", f"{other}.tsr")
    assert main(["audit", "verify", f"--checkpoint={other}", f"--stamp-roots={root}"]) == 2
    assert str(other) in capsys.readouterr().err
    Path(f"{path}.tsr").write_bytes(b"not a stamp")
    assert main(verify) == 2
    Path(f"{path}.tsr").unlink()
    assert main(verify) == 2


GRANTED = b"\x02\x01\x00"


@pytest.mark.ordinary("None", "2")
@pytest.mark.parametrize("status", [1, 2, 77, None], ids=str)
def test_a_stamp_that_no_verifier_would_accept_is_not_stored(
    listening: Any, authority: tuple[str, Path], status: int | None
) -> None:
    """Granted with changes, refused, of no status there is, or of something else."""
    content = b"a checkpoint"
    digest = hashlib.sha512(content).digest()

    def altered(body: bytes, _headers: Any) -> tuple[int, str, bytes]:
        provided = body if status is not None else body.replace(digest, bytes(len(digest)))
        reply = httpx.post(authority[0], content=provided).content
        if status is not None:
            reply = reply.replace(GRANTED, GRANTED[:2] + bytes([status]), 1)
        return 200, "application/timestamp-reply", reply

    assert request_timestamp(content, authority[0])
    with pytest.raises(NoTimestamp):
        request_timestamp(content, listening(altered))


@pytest.mark.parametrize("reply", [b"", b"no", b"<html>"])
def test_an_authority_that_fails_leaves_everything_as_it_was(
    log: Log,
    listening: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reply: bytes,
) -> None:
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path))
    monkeypatch.setenv("DATABASE_URL", log.url)
    log.grow(1)
    url = listening(lambda _body, _headers: (200 if reply else 500, "text/html", reply))
    assert main(["audit", "export-checkpoint", str(tmp_path / "new"), "--stamp", url]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_the_verifier_key_is_the_logs(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path))
    monkeypatch.setenv("DATABASE_URL", log.url)
    assert main(["audit", "verifier-key"]) == 2
    log.grow(1)
    assert main(["audit", "verifier-key"]) == 0
    assert NoteKey.parse(capsys.readouterr().out.strip()) == note_key(ORIGIN, KEY.public)
