"""Asked to stop, it finishes what it began, enters it into the log, and has failed at nothing."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import httpx
import pytest

from affidavit.service.web.middleware import RequestMiddleware
from affidavit.service.web.telemetry import Metrics
from tests.support.polling import TIMEOUT_SECONDS
from tests.support.processes import gone, processes_of


def test_a_request_in_flight_is_answered_kept_and_logged_and_leaves_no_process(
    server: Any, plan: Callable[..., dict[str, Any]], post: Callable[..., Any]
) -> None:
    server.start()
    assert post(httpx, plan(steps=3), url=server.url).status_code == 201
    body = json.dumps(plan()).encode()
    with closing(
        http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_SECONDS)
    ) as line:
        line.putrequest("POST", "/v1/certificates")
        line.putheader("content-type", "application/json")
        line.putheader("content-length", str(len(body)))
        line.endheaders(body[:20])
        _wait_for_the_request(server)
        workers = processes_of(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        _refuses_new_ones(server)
        line.send(body[20:])
        answer = line.getresponse()
        assert answer.status == 201
        identity = json.loads(answer.read())["certificate"]["id"]
    assert server.process.wait(TIMEOUT_SECONDS) == 0
    assert workers
    gone(workers)
    with closing(sqlite3.connect(server.home / "affidavit.db")) as connection:
        stored = {row[0] for row in connection.execute("SELECT id FROM certificates")}
        assert identity in stored
        waiting = connection.execute("SELECT count(*) FROM log_pending").fetchone()
        logged = connection.execute("SELECT count(*) FROM log_leaves").fetchone()
        entered = connection.execute("SELECT count(*) FROM log_entries").fetchone()
        signed = connection.execute("SELECT max(tree_size) FROM log_checkpoints").fetchone()
    assert waiting == (0,)
    assert logged == entered == signed


@pytest.mark.soak
def test_stopped_while_idle_it_leaves_no_process_and_lines_that_are_json(
    server: Any, plan: Any, post: Any
) -> None:
    server.start()
    assert post(httpx, plan(), url=server.url).status_code == 201
    httpx.get(f"{server.url}/none")
    process = server.process
    workers = processes_of(process.pid)
    assert workers
    server.stop(signal.SIGINT)
    assert process.returncode == 0
    gone(workers)
    lines = [json.loads(line) for line in server.log]
    assert all({"at", "level", "logger", "message"} <= line.keys() for line in lines)
    assert not any(line["level"] == "ERROR" for line in lines)
    assert [line["route"] for line in lines if line["message"] == "request"] == [
        "/v1/certificates",
        "unrouted",
    ]


def _wait_for_the_request(server: Any) -> None:
    """Until the half of a request that was sent before this one has arrived."""
    assert httpx.get(f"{server.url}/livez").status_code == 200


def _refuses_new_ones(server: Any) -> None:
    for _ in range(200):
        try:
            httpx.get(f"{server.url}/livez", timeout=5)
        except httpx.TransportError:
            return
    raise AssertionError("it went on taking requests")


def test_a_request_that_the_stop_cuts_off_is_told_to_come_again() -> None:
    """The server cancels what it waited for long enough; that is no fault of the request's."""
    sent: list[Any] = []

    async def endless(*_: Any) -> None:
        await asyncio.sleep(600)

    async def cut_off() -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/certificates", "headers": []}
        app = RequestMiddleware(endless, Metrics())
        task = asyncio.create_task(app(scope, sleep_forever, send))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await task

    async def sleep_forever() -> Any:
        await asyncio.sleep(600)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(cut_off())
    assert sent[0]["status"] == 503
    assert dict(sent[0]["headers"])[b"retry-after"] == b"5"
    assert json.loads(sent[1]["body"])["code"] == "stopping"
