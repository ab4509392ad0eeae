"""The service as a process: it refuses to start, it is killed, it is stopped."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from affidavit.certificate import certificate_id, verify
from affidavit.plan import digest, plan_from
from affidavit.service.__main__ import main
from affidavit.service.web.serve import listen
from affidavit.trust import KeyStore, PublicKey
from tests.support.polling import TIMEOUT_SECONDS
from tests.support.processes import gone, processes_of
from tests.support.trust import trusting

Plan = Callable[..., dict[str, Any]]
Post = Callable[..., Any]

MOMENTS = (0.0, 0.02, 0.3)
"""Seconds into a stream of POSTs at which the process is killed."""


@pytest.mark.soak
def test_killed_during_posts_it_keeps_whole_certificates_and_a_retry_succeeds(
    server: Any, plan: Plan, post: Post
) -> None:
    steps = iter(range(1, 100_000))
    answered: dict[str, bytes] = {}
    requested: list[dict[str, Any]] = []
    for moment in MOMENTS:
        server.start()
        _post_until_killed(server, plan, post, steps, moment, requested, answered)
        _check_whole(server.home / "affidavit.db")
    server.start()
    assert len(requested) > len(answered) > 0
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_SECONDS) as client:
        keys = [PublicKey.from_record(item) for item in client.get("/v1/keys").json()["keys"]]
        for document in requested[-30:]:
            expected = plan_from(document)
            identity = certificate_id(digest(expected))
            answer = post(client, document)
            # What was answered before the kill is still there, byte for byte.
            assert answer.status_code in ((200,) if identity in answered else (200, 201))
            assert answer.json()["certificate"]["id"] == identity
            assert answered.get(identity, answer.content) == answer.content
            verify(
                client.get(f"/v1/certificates/{identity}/bundle").content,
                trusting(keys),
                plan=expected,
            )
            assert post(client, document).status_code == 200
    for identity in answered:
        assert httpx.get(f"{server.url}/v1/certificates/{identity}").status_code == 200
    # Every certificate has its entry, and the log is whole, after each of the kills.
    audited = server.run("audit", "verify", "--json")
    assert (audited.returncode, json.loads(audited.stdout)["findings"]) == (0, [])


def _post_until_killed(
    server: Any,
    plan: Plan,
    post: Post,
    steps: Any,
    moment: float,
    asked: list[dict[str, Any]],
    answered: dict[str, bytes],
) -> None:
    """Post new plans from two threads, kill the process after ``moment`` seconds."""
    begun = threading.Barrier(3)

    def work() -> None:
        with httpx.Client(base_url=server.url, timeout=TIMEOUT_SECONDS) as client:
            for number in count():
                if number == 1:
                    begun.wait()
                document = plan(steps=next(steps))
                asked.append(document)
                answer = post(client, document)
                assert answer.status_code == 201
                answered[answer.json()["certificate"]["id"]] = answer.content

    def caller() -> None:
        with suppress(httpx.TransportError):
            work()

    callers = [threading.Thread(target=caller) for _ in range(2)]
    for item in callers:
        item.start()
    begun.wait()
    time.sleep(moment)  # whatever the service is then doing
    below = processes_of(server.process.pid)
    server.stop(signal.SIGKILL)
    for entry in callers:
        entry.join()
    assert below
    gone(below)


def _check_whole(path: Path) -> None:
    """The database opens, and every certificate has its request and bundle."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        rows = connection.execute("SELECT id, bundle, result FROM certificates").fetchall()
        for identity, bundle, result in rows:
            assert json.loads(result)["certificate"]["id"] == identity
            assert json.loads(result)["certificate"]["bundle"] == json.loads(bundle)
        outcome = connection.execute("SELECT DISTINCT certificate_id FROM requests").fetchall()
        assert {key for (key,) in outcome} == {identity for identity, *_ in rows}


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str]]:
    """Run a command in this process: its exit code and what it said on stderr."""
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path))
    monkeypatch.delenv("DATABASE_URL", raising=False)

    def run(*arguments: str) -> tuple[int, str]:
        code = main(arguments)
        stated = capsys.readouterr().err
        assert len(stated.splitlines()) == (code != 0), stated
        return code, stated

    return run


def test_without_a_schema_it_refuses_to_start_and_says_what_to_run(
    forked_server: Any, tmp_path: Path, command: Any
) -> None:
    (tmp_path / "affidavit.db").unlink()
    code, stated = command("serve", "--port", "0")
    assert code == 2
    assert "affidavit migrate" in stated
    assert not (tmp_path / "affidavit.db").exists()

    for _ in range(2):
        assert command("migrate") == (0, "")
    forked_server.start()
    ready = httpx.get(f"{forked_server.url}/readyz").json()
    assert ready["status"] == "ready"
    assert ready["signer"]["development"] is False

    code, stated = command("serve", "--port", str(forked_server.port))
    assert code == 2
    assert "in use" in stated


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("mysql://x/y", 2, "DATABASE_URL"),
        ("what", 2, "DATABASE_URL"),
        ("sqlite://", 2, "DATABASE_URL"),
        ("postgresql://u@one:5432,two:5432/db", 2, "DATABASE_URL"),
        ("postgresql://nobody@127.0.0.1:1/none", 3, "DATABASE_URL"),
    ],
)
@pytest.mark.parametrize("verb", ["migrate", "serve"])
def test_a_database_that_cannot_be_used_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, command: Any, url: str, code: int, said: str, verb: str
) -> None:
    monkeypatch.setenv("DATABASE_URL", url)
    result = command(verb)
    assert result[0] == code
    assert said in result[1]


def test_a_file_that_is_no_database_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, command: Any, tmp_path: Path
) -> None:
    (tmp_path / "text.db").write_text("This is not a database, but it is long enough.\n" * 99)
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{tmp_path / 'text.db'}")
    for verb in ("serve", "migrate"):
        assert command(verb)[0] == 3
    monkeypatch.setenv("DATABASE_URL", "sqlite:////proc/none/x.db")
    assert command("migrate")[0] == 2


def test_a_key_that_others_can_read_is_refused_at_start(
    sqlite_url: str, tmp_path: Path, command: Any
) -> None:
    assert sqlite_url
    KeyStore(tmp_path / "keys").new("test")
    (private,) = (tmp_path / "keys").glob("*.pem")
    private.chmod(0o644)
    code, stated = command("serve", "--port", "0")
    assert code == 2
    assert "chmod 600" in stated


@pytest.mark.parametrize("name", ["AFFIDAVIT_WORKERS", "AFFIDAVIT_TIME_LIMIT"])
@pytest.mark.parametrize("value", ["0", "-1", "many", "1e3", "9" * 40])
def test_a_setting_that_is_no_number_is_named(
    monkeypatch: pytest.MonkeyPatch, command: Any, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    code, stated = command("serve")
    assert code == 2
    assert name in stated


def test_an_answer_is_sent_at_once_and_waits_for_no_acknowledgement() -> None:
    """Nagle's algorithm would hold every answer after a connection's first back for 40 ms."""

    async def accepted() -> int:
        result: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def seen(_reader: Any, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            result.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listen("127.0.0.1", 0) as listening:
            async with await asyncio.start_server(seen, sock=listening):
                _, writer = await asyncio.open_connection(*listening.getsockname()[:2])
                nodelay = await asyncio.wait_for(result, TIMEOUT_SECONDS)
                writer.close()
                return nodelay

    assert asyncio.run(accepted()) != 0
