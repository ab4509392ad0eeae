"""The edges of HTTP: bodies that lie, parameters that are garbage, every error a problem."""

from __future__ import annotations

import asyncio
import base64
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import uvicorn
from fastapi import Request
from fastapi.testclient import TestClient
from uvicorn.server import ServerState

from affidavit.service.core.database import (
    InvalidCursor,
    cursor_at,
    read_cursor,
)
from affidavit.service.core.problems import Problem
from affidavit.service.web import serve
from affidavit.service.web.routing import read_body
from affidavit.service.web.serve import HEADER_SECONDS
from tests.support.polling import TIMEOUT_SECONDS

Plan = Callable[..., dict[str, Any]]
Post = Callable[..., Any]
LIMIT = 1024 * 1024
ID = "sha256:" + "0" * 64


def problem(answer: Any, status: int) -> dict[str, Any]:
    """The problem document of an answer that must be one."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert set(document) == {"type", "title", "status", "code", "detail", "reasons"}
    assert document["status"] == status
    assert document["code"]
    assert document["detail"]
    for reason in document["reasons"]:
        assert {"code", "pointer", "message", "remedy"} <= set(reason)
    return document


# ---- body limit, over a real socket ------------------------------------------------


@pytest.fixture(scope="module")
def running(
    migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory, serving: Any
) -> Iterator[Any]:
    """One server process for the tests that need a real socket."""
    home = tmp_path_factory.mktemp("http")
    (home / "affidavit.db").write_bytes(migrated_sqlite.read_bytes())
    with serving(home, forked=True) as server:
        yield server


def chunks(total: int) -> Iterator[bytes]:
    """``total`` bytes in pieces, which httpx sends chunked."""
    piece = b" " * 65536
    for _ in range(total // len(piece)):
        yield piece


@pytest.mark.parametrize("content", [lambda: b" " * 10_000_000, lambda: chunks(10_000_000)])
def test_ten_megabytes_are_413_at_once_announced_or_not(running: Any, content: Any) -> None:
    answer = httpx.post(
        f"{running.url}/v1/certificates",
        content=content(),
        headers={"content-type": "application/json"},
    )
    assert problem(answer, 413)["code"] == "too_large"
    assert httpx.get(f"{running.url}/livez").status_code == 200


def exchange(running: Any, request: bytes, seconds: float = 3) -> bytes:
    """What comes back for raw bytes, until the server closes or ``seconds`` pass."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=seconds) as peer:
        peer.sendall(request)
        received = b""
        try:
            while piece := peer.recv(65536):
                received += piece
        except TimeoutError:
            pass
        return received


HEAD = (
    b"POST /v1/certificates HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\n"
)


def test_an_announced_body_is_refused_before_it_is_sent(running: Any) -> None:
    expect = HEAD + b"Content-Length: 10000000\r\nExpect: 100-continue\r\n\r\n"
    answer = exchange(running, expect)
    assert answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("length", [b"-1", b"1e3", b"99999999999999999999999", b"abc"])
def test_a_length_that_is_no_length_is_refused(running: Any, length: bytes) -> None:
    answer = exchange(running, HEAD + b"Content-Length: " + length + b"\r\n\r\n{}")
    assert answer.split(b" ", 2)[1] in (b"400", b"413"), answer


def test_a_request_of_two_lengths_smuggles_no_other(running: Any) -> None:
    """A proxy that goes by the first would take the rest for the body."""
    hidden = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
    body = b"0\r\n\r\n" + hidden
    lengths = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % len(body)
    kept_open = HEAD.replace(b"Connection: close\r\n", b"")
    answer = exchange(running, kept_open + lengths + body, 30)
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert answer.count(b"HTTP/1.1") == 1, answer


def test_a_length_that_is_too_small_cuts_the_body_and_is_no_plan(running: Any) -> None:
    answer = exchange(running, HEAD + b'Content-Length: 1\r\n\r\n{"version": 1}')
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"syntax"' in answer


def test_a_client_that_goes_away_or_never_ends_leaves_the_service_well(running: Any) -> None:
    with socket.create_connection(("127.0.0.1", running.port)) as peer:
        peer.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
    assert httpx.get(f"{running.url}/readyz").status_code == 200
    assert "Traceback" not in "".join(running.log)


@pytest.mark.soak
def test_heads_that_never_end_are_closed_and_delay_nobody(running: Any) -> None:
    peers = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(900)]
    try:
        for peer in peers:
            peer.sendall(b"POST /v1/certificates HTTP/1.1\r\nHost: x\r\n")
        begun = time.monotonic()
        with selectors.DefaultSelector() as waiting:
            for peer in peers:
                waiting.register(peer, selectors.EVENT_READ)
            while waiting.get_map():
                assert time.monotonic() < begun + HEADER_SECONDS + TIMEOUT_SECONDS
                answer = httpx.get(f"{running.url}/livez", timeout=TIMEOUT_SECONDS)
                assert answer.status_code == 200
                for key, _ in waiting.select(0.5):
                    assert key.fileobj.recv(1) == b""  # type: ignore[union-attr]
                    waiting.unregister(key.fileobj)
    finally:
        for peer in peers:
            peer.close()


def test_an_answer_that_nobody_reads_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "WRITE_SECONDS", 0.2)

    async def large(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b" " * 2**26})

    async def received() -> int:
        config = uvicorn.Config(large, http=serve._Protocol, log_config=None)
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: serve._Protocol(config, state, {}), "127.0.0.1", 0
        )
        async with server:
            reading, writing = await asyncio.open_connection(*server.sockets[0].getsockname())
            writing.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            while not state.connections:
                await asyncio.sleep(0.01)
            while state.connections:
                await asyncio.sleep(0.05)
            size = 0
            with suppress(ConnectionError):
                while piece := await reading.read(2**20):
                    size += len(piece)
            writing.close()
        return size

    assert asyncio.run(asyncio.wait_for(received(), TIMEOUT_SECONDS)) < 2**26


def test_a_body_that_does_not_come_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("affidavit.service.web.routing.READ_SECONDS", 0.05)

    async def silence() -> Any:
        await asyncio.sleep(60)

    with pytest.raises(Problem) as caught:
        asyncio.run(read_body(Request({"type": "http", "headers": []}, silence)))
    assert (caught.value.status, caught.value.code) == (408, "body_incomplete")
    assert caught.value.headers["Connection"] == "close"


def test_the_largest_body_is_read(running: Any) -> None:
    body = b" " * LIMIT
    for content, status in ((body, 400), (body + b" ", 413)):
        answer = httpx.post(
            f"{running.url}/v1/certificates",
            content=content,
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == status


# ---- paths and methods -------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v2", "/v1", "/v1/certificates/", "/docs/", "/v1/%00", "/%ff"])
def test_an_unknown_path_is_a_404_problem(reader: TestClient, path: str) -> None:
    assert problem(reader.get(path), 404)["code"] == "not_found"


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH"])
def test_another_method_is_a_405_problem_that_says_which_are_allowed(
    reader: TestClient, method: str
) -> None:
    answer = reader.request(method, "/v1/keys")
    assert problem(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "GET"


ODD_IDS = ["1", "sha256:", ID[:-1], ID + "0", ID.upper(), "%00", "%ED%A0%80", "'--", "a" * 5000]


@pytest.mark.parametrize("identity", ODD_IDS)
@pytest.mark.parametrize("path", ["/v1/certificates/{}", "/v1/certificates/{}/bundle"])
def test_an_odd_id_is_422_and_an_unknown_one_404(
    reader: TestClient, path: str, identity: str
) -> None:
    document = problem(reader.get(path.format(identity)), 422)
    assert document["reasons"][0]["pointer"] == "/path/certificate_id"
    assert problem(reader.get(path.format(ID)), 404)["code"] == "not_found"


# ---- lists -------------------------------------------------------------------------


GARBAGE = [
    "limit=0",
    "limit=201",
    "limit=-1",
    "limit=" + "9" * 5000,
    "limit=1e2",
    "limit=true",
    "limit=%00",
    "verdict=",
    "verdict=sure",
    "verdict=%ED%A0%80",
    "plan_digest=1",
    "name=%00",
    "name=a%20b",
    "name=" + "a" * 65,
    "name=%F0%9F%92%A5",
    "created_after=yesterday",
    "created_after=2027",
    "created_after=-5",
    "created_before=1700000000.5",
    "created_after=2025-01-01T00:00:00",
    "created_after=0001-01-01T00:00:00%2B14:00",
    "created_before=9999-12-31T23:59:59-14:00",
    "created_before=" + "9" * 400,
    "created_before=NaN",
    "cursor=",
    "cursor=%00",
    "cursor=!",
    "cursor=" + "A" * 513,
    "cursor=" + "W1tb" * 100,
    "verdit=certified",
    "%00=1",
    "%ED%A0%80=%ED%A0%80",
]


@pytest.mark.parametrize("query", GARBAGE)
def test_a_garbage_parameter_is_a_422_that_names_it(reader: TestClient, query: str) -> None:
    (reason,) = problem(reader.get(f"/v1/certificates?{query}"), 422)["reasons"]
    assert reason["pointer"].startswith("/query/")


def test_a_number_is_no_time_and_is_told_so_like_other_text(reader: TestClient) -> None:
    stated = [
        problem(reader.get(f"/v1/certificates?created_after={text}"), 422)["reasons"][0]["message"]
        for text in ("2027", "20270101T000000Z")
    ]
    assert stated[0] == stated[1].replace("20270101T000000Z", "2027")


@pytest.mark.parametrize(
    "value",
    [
        [1, ID],
        [1, ID, 1],
        ["1", ID, True],
        [1e400, ID, True],
        [10**30, ID, True],
        [1, 5, True],
        [1, "\x00", True],
        [1, "\ud800", True],
        [[1], ID, True],
        {"a": 1},
        None,
    ],
)
def test_a_cursor_of_another_hand_is_refused(value: Any) -> None:
    cursor = base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")
    with pytest.raises(InvalidCursor):
        read_cursor(cursor, str, bool)


def test_pages_follow_their_links_and_filters(client: TestClient, plan: Plan, post: Post) -> None:
    created = [post(client, plan(steps=steps)).json() for steps in range(1, 6)]
    post(client, plan(name="other"))
    seen: list[Any] = []
    path: str | None = "/v1/certificates?limit=2&name=quick"
    while path is not None:
        page = client.get(path)
        assert page.status_code == 200
        seen += page.json()["items"]
        path = page.json()["next"]
        assert ("link" in page.headers) == (path is not None)
    assert [row["id"] for row in seen] == [item["certificate"]["id"] for item in created][::-1]
    assert all(row["name"] == "quick" and not row["untrusted"] for row in seen)

    newest = seen[0]
    after = client.get(f"/v1/certificates?name=quick&created_after={quote(seen[1]['created_at'])}")
    assert [row["id"] for row in after.json()["items"]] == [newest["id"]]
    digest = client.get(f"/v1/certificates?plan_digest={newest['plan_digest']}&verdict=certified")
    assert [row["id"] for row in digest.json()["items"]] == [newest["id"]]
    assert client.get("/v1/certificates?verdict=refused").json() == {"items": [], "next": None}


def test_a_cursor_marks_its_row_to_the_microsecond() -> None:
    place = (datetime(2025, 1, 1, 0, 0, 0, 1, tzinfo=UTC), ID, True)
    assert read_cursor(cursor_at(*place), str, bool) == place
