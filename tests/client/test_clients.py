"""Both clients: requests are repeated only where that is safe, and answers are typed."""

from __future__ import annotations

import asyncio
import gzip
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest

import affidavit
from affidavit.client import calls, clients

CERTIFIED = {
    "verdict": "certified",
    "epsilon": {"lower": 1.0, "upper": 1.1},
    "certificate": {"id": "sha256:1", "status": "active", "bundle": {"bundleType": "b"}},
}
DIGEST = "sha256:" + "0" * 64
RESERVATION = {
    "id": "7d5c0000-0000-0000-0000-000000000000",
    "dataset": "toy",
    "unit": "example",
    "adjacency": "add_remove",
    "certificate": DIGEST,
    "issue": 1,
    "plan_digest": DIGEST,
    "name": "quick",
    "state": "reserved",
    "steps": {"certified": 10, "run": None},
    "record": None,
    "admitted_by": "filter",
    "reserved": {"epsilon": None, "delta": 1e-5, "mu": None},
    "charged": {"epsilon": None, "delta": 1e-5, "mu": None},
    "reserved_by": "sam",
    "reserved_at": "2026-01-01T00:00:00Z",
    "changed_at": "2026-01-01T00:00:00Z",
}
BUSY = httpx.Response(503, json={"code": "too_busy", "detail": "later"})
Answer = httpx.Response | Exception
Ask = Callable[[str, tuple[Any, ...], list[Answer]], tuple[Any, list[httpx.Request]]]


@pytest.fixture(params=["blocking", "asynchronous"])
def ask(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Call a method of a client whose service gives ``answers`` in turn."""
    monkeypatch.setattr(calls, "FIRST_RETRY_SECONDS", 0)
    monkeypatch.setattr(calls, "MAX_RETRY_SECONDS", 0)
    monkeypatch.setattr(calls, "POLL_SECONDS", 0)

    def call(method: str, arguments: tuple[Any, ...], answers: list[Answer]) -> Any:
        sent: list[httpx.Request] = []

        def handle(message: httpx.Request) -> httpx.Response:
            sent.append(message)
            answer = answers[min(len(sent), len(answers)) - 1]
            if isinstance(answer, Exception):
                raise answer
            return httpx.Response(answer.status_code, content=answer.content)

        transport = httpx.MockTransport(handle)
        if request.param == "blocking":
            with affidavit.Client("http://service.example/", "token") as client:
                client._http = httpx.Client(transport=transport)
                return getattr(client, method)(*arguments), sent

        async def run() -> Any:
            async with affidavit.AsyncClient("http://service.example/", "token") as client:
                client._http = httpx.AsyncClient(transport=transport)
                return await getattr(client, method)(*arguments)

        return asyncio.run(run()), sent

    return call


def test_a_plan_is_submitted_until_the_service_has_time(ask: Ask) -> None:
    answers: list[Answer] = [httpx.ConnectError("no"), BUSY, httpx.Response(201, json=CERTIFIED)]
    answer, sent = ask("submit", ({"version": 1},), answers)
    assert len(sent) == 3
    assert (answer.id, answer.verdict, answer.status) == ("sha256:1", "certified", "active")
    assert answer.epsilon == 1.1
    assert answer.bundle == b'{"bundleType": "b"}'
    assert sent[0].headers["authorization"] == "Bearer token"
    assert str(sent[0].url) == "http://service.example/v1/certificates"


def test_what_waits_for_other_people_is_told_apart_from_what_took_effect(ask: Ask) -> None:
    waiting = {"code": "second_person_needed", "detail": "1 of 2", "agreed": 1, "required": 2}
    recorded = httpx.Response(202, json={**waiting, "expires_at": "2026-01-08T00:00:00Z"})
    with pytest.raises(calls.Recorded) as caught:
        ask("publish_keyset", ({"payload": ""},), [recorded])
    assert (caught.value.status, caught.value.code) == (202, "second_person_needed")


def certification(state: str, **fields: Any) -> dict[str, Any]:
    requested = {"id": "1", "requested_at": "2026-01-01T00:00:00Z"}
    return {**requested, "state": state, "certificate": None, "problem": None, **fields}


def test_a_plan_that_takes_long_is_waited_for(ask: Ask) -> None:
    answers: list[Answer] = [
        httpx.Response(202, json=certification("running")),
        BUSY,
        httpx.Response(200, json=certification("running")),
        httpx.Response(200, json=certification("done", certificate=DIGEST)),
        httpx.Response(200, json=CERTIFIED),
    ]
    answer, sent = ask("submit", ({"version": 1},), answers)
    assert answer.verdict == "certified"
    assert sent[0].headers["prefer"] == "wait=15"  # half of the timeout
    assert [request.url.path for request in sent[1:]] == [
        *["/v1/certifications/1"] * 3,
        f"/v1/certificates/{DIGEST}",
    ]


def test_a_plan_whose_certification_fails_is_a_problem(ask: Ask) -> None:
    why = {"status": 503, "code": "accounting_timeout", "detail": "too long"}
    failed = certification("failed", problem=why)
    answers: list[Answer] = [httpx.Response(202, json=failed)]
    with pytest.raises(affidavit.Problem) as problem:
        ask("submit", ({"version": 1},), answers)
    assert (problem.value.status, problem.value.code) == (503, "accounting_timeout")


def test_a_reservation_is_repeated_with_one_key(ask: Ask) -> None:
    reserved = httpx.Response(201, json=RESERVATION)
    answer, sent = ask("reserve", ("data/set", "sha256:1"), [BUSY, reserved])
    assert (answer.state, answer.charged.epsilon) == ("reserved", math.inf)
    assert sent[0].headers["idempotency-key"] == sent[1].headers["idempotency-key"]
    assert sent[0].url.raw_path == b"/v1/ledgers/data%2Fset/reservations"
    _, other = ask("reserve", ("data", "sha256:1"), [reserved])
    assert other[0].headers["idempotency-key"] != sent[0].headers["idempotency-key"]


def test_a_decision_is_never_repeated(ask: Ask) -> None:
    with pytest.raises(affidavit.Problem) as problem:
        ask("approve", ("sha256:1", {"decision": "approve"}), [BUSY])
    assert (problem.value.status, problem.value.code) == (503, "too_busy")


@pytest.mark.parametrize(
    ("answer", "times"),
    [
        (httpx.ConnectError("refused"), 3),
        (httpx.Response(502, text="<html>"), 3),
        (httpx.Response(200, text="<html>"), 1),
        (httpx.Response(200, json={"verdict": "certified"}), 1),
        (httpx.Response(200, json=[]), 1),
    ],
)
def test_what_is_no_answer_is_unreachable(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, answer: Answer, times: int
) -> None:
    attempts = []
    delay = calls.Call.retry_delay
    monkeypatch.setattr(
        calls.Call, "retry_delay", lambda *given: attempts.append(1) or delay(*given)
    )
    with pytest.raises(affidavit.Unreachable):
        ask("certificate", ("sha256:1",), [answer])
    assert len(attempts) == (times if times > 1 else 0)


def test_a_refusal_is_a_problem_and_not_repeated(ask: Ask) -> None:
    refusal = httpx.Response(409, json={"code": "revoked", "detail": "it is revoked."})
    with pytest.raises(affidavit.Problem) as problem:
        ask("submit", ({},), [refusal, httpx.Response(200, json=CERTIFIED)])
    assert problem.value.code == "revoked"


def test_a_stream_goes_on_after_the_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RECONNECT_SECONDS", 0)
    last: list[str | None] = []

    def handle(message: httpx.Request) -> httpx.Response:
        last.append(message.headers.get("last-event-id"))
        if len(last) == 3:
            return httpx.Response(204)
        number = len(last)
        data = f'{{"steps": {number}, "certified": 9, "spent": null}}'
        text = f"id: {number}\nevent: progress\ndata: {data}\n\nid: 9\ndata: {{"
        return httpx.Response(200, text=text)

    async def run() -> list[int]:
        async with affidavit.AsyncClient("http://service.example") as client:
            client._http = httpx.AsyncClient(transport=httpx.MockTransport(handle))
            return [event.steps async for event in client.run_events("run")]

    assert asyncio.run(run()) == [1, 2]
    assert last == [None, "1", "2"]


@pytest.mark.parametrize(("most", "seconds"), [(10**6, 60.0), (10**8, -1.0)])
def test_an_answer_is_read_up_to_a_size_and_a_time(most: int, seconds: float) -> None:
    """The size is that of what is decompressed."""
    packed = {"headers": {"content-encoding": "gzip"}, "content": gzip.compress(bytes(10**7))}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, **packed))
    with (
        httpx.Client(transport=transport) as client,
        client.stream("GET", "http://log") as response,
        pytest.raises(httpx.HTTPError, match="longer"),
    ):
        calls.read_bounded(response, most, seconds)


def test_neither_an_answer_nor_a_line_of_events_is_without_end(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "MAX_RESPONSE_BYTES", 99)
    monkeypatch.setattr(calls, "MAX_LINE_LENGTH", 99)
    with pytest.raises(affidavit.Unreachable, match="longer than 99 bytes"):
        ask("content", ("/v1/status",), [httpx.Response(200, content=bytes(100))])
    with pytest.raises(ValueError, match="longer than 99 characters"):
        list(clients.EventStream("", "", {}).read("data: " + 94 * "x"))
