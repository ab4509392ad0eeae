"""A run's events as server-sent events: all of them, once, in order, and to their end."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from affidavit.service.core.database import open_engine
from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import TokenRepository
from affidavit.service.runs import events
from tests.service.conftest import Server
from tests.service.runs.conftest import ON_SQLITE, Yard
from tests.support.polling import TIMEOUT_SECONDS, wait_until

Event = dict[str, Any]


def events_of(text: str) -> list[Event]:
    """The events of a stream as it was sent; a block without an id is none."""
    result = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if line.strip())
        if "id" in lines:
            result.append({**lines, "data": json.loads(lines["data"])})
    return result


def ended(yard: Yard, steps: int = 7) -> str:
    """A run that was stopped by its worker after it had reported steps."""
    run = yard.request(yard.certify()).json()["id"]
    job = yard.claim()
    yard.start(job)
    yard.say(job, "heartbeat", steps=steps)
    yard.complete(job, 10)
    return str(run)


def ask(yard: Yard, run: str, seen: str | None = None) -> Any:
    more = {} if seen is None else {"last_event_id": seen}
    return yard.ask("GET", f"/v1/runs/{run}/events", "audit", **more)


@ON_SQLITE
def test_the_events_of_a_run_that_ended_are_told_once_from_any_place(
    yard: Yard,
) -> None:
    run = ended(yard)
    answer = ask(yard, run)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.text.startswith("retry: ")
    events = events_of(answer.text)
    told = [(event["id"], event["event"], event["data"].get("state")) for event in events]
    assert told == [
        ("1-0", "state", "queued"),
        ("2-0", "state", "claimed"),
        ("3-0", "state", "running"),
        ("3-7", "progress", None),
        ("4-7", "state", "settled"),
    ]
    assert events[-1]["data"]["code"] == "conformant"
    assert events[-1]["data"]["steps_charged"] == 10
    for number, item in enumerate(events[:-1]):
        rest = events_of(ask(yard, run, item["id"]).text)
        assert rest == events[number + 1 :], item["id"]
    assert ask(yard, run, events[-1]["id"]).status_code == 204


@ON_SQLITE
def test_what_is_spent_bounds_the_steps_and_is_below_the_whole_run(
    yard: Yard,
) -> None:
    result = {}
    for steps in (1, 7, 10):
        run = ended(yard, steps)
        (progress,) = (
            item["data"] for item in events_of(ask(yard, run).text) if item["event"] == "progress"
        )
        assert (progress["steps"], progress["certified"]) == (steps, 10)
        assert progress["spent"]["steps"] >= steps
        result[steps] = progress["spent"]["epsilon"]
    assert 0 < result[1] < result[7] < result[10]
    reservation = yard.ask("GET", f"/v1/runs/{run}", "audit").json()["reservation"]
    whole = yard.ask("GET", f"/v1/reservations/{reservation}", "audit").json()["reserved"]
    assert result[10] == whole["epsilon"]


@ON_SQLITE
def test_what_cannot_be_asked_is_refused(yard: Yard) -> None:
    run = yard.request(yard.certify()).json()["id"]
    nobody = "0" * 8 + "-0000-0000-0000-" + "0" * 12
    assert ask(yard, nobody).status_code == 404
    assert ask(yard, "x").status_code == 422
    for seen in ("", "1", "-1-0", "01-0", "1-2-3", "99999999999-0", "1-0 "):
        answer = ask(yard, run, seen)
        assert answer.status_code == 422, seen
        assert answer.json()["reasons"][0]["pointer"] == "/header/last-event-id"


@ON_SQLITE
def test_a_stream_ends_in_time_and_no_more_are_served_than_there_may_be(
    yard: Yard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever comes back is asked again who they are."""
    run = yard.request(yard.certify()).json()["id"]
    monkeypatch.setattr(events, "MAX_STREAM_SECONDS", 1.0)
    (event,) = events_of(ask(yard, run).text)
    assert event["id"] == "1-0"
    assert events_of(ask(yard, run, event["id"]).text) == []
    monkeypatch.setattr(events, "MAX_WATCHERS", 0)
    answer = ask(yard, run)
    assert (answer.status_code, answer.json()["code"]) == (503, "too_many_watchers")
    assert answer.headers["retry-after"]


@ON_SQLITE
def test_one_caller_leaves_streams_for_others(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    run = yard.request(yard.certify()).json()["id"]
    watched = yard.client.app.state.services.run_events
    monkeypatch.setattr(events, "MAX_WATCHERS_EACH", 2)

    async def flood() -> None:
        streams = [watched.stream(run, events.EventId(), "ada") for _ in range(2)]
        for stream in streams:
            assert not watched.is_full_for("ada")
            await anext(stream)
        assert watched.is_full_for("ada")
        assert not watched.is_full_for("bob")
        for stream in streams:
            await stream.aclose()
        assert not watched.is_full_for("ada")

    asyncio.run(flood())
    monkeypatch.setattr(events, "MAX_WATCHERS_EACH", 0)
    answer = ask(yard, run)
    assert (answer.status_code, answer.json()["code"]) == (503, "too_many_watchers")


# ---- a process -----------------------------------------------------------------------


class Reader(threading.Thread):
    """Reads a stream until it ends."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self._url, self._headers = url, headers
        self.text, self.cut = "", False
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream(
                "GET", self._url, headers=self._headers, timeout=TIMEOUT_SECONDS
            ) as answer:
                for part in answer.iter_text():
                    self.text += part
        except httpx.HTTPError:
            self.cut = True

    def wait(self, *ids: str) -> None:
        wait_until(
            lambda: [item["id"] for item in events_of(self.text)] == list(ids),
            said=lambda: self.text,
        )


@contextmanager
def serving(server: Server, document: Any, **environment: str) -> Iterator[tuple[Any, str]]:
    """A served run that waits, and how to ask."""
    engine = open_engine(f"sqlite:///{server.home / 'affidavit.db'}")
    kinds = (Scope.SUBMIT, Scope.ADMIN, Scope.WORK)
    _, token = TokenRepository(engine).new("t", kinds, 1, by="test", at=datetime.now(UTC))
    engine.dispose()
    plain = server._environment
    server._environment = lambda: {**plain(), **environment}  # type: ignore[method-assign]
    server.start()
    headers = {"authorization": f"Bearer {token.text}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=TIMEOUT_SECONDS) as client:
        budget = {"adjacency": "add_remove", "epsilon": 50, "delta": 1e-3}
        assert client.post("/v1/ledgers/toy/budget", json=budget).is_success
        certificate = client.post("/v1/certificates", json=document()).json()["certificate"]["id"]
        body = {"certificate": certificate, "data": "digits", "model": "mlp:8", "output": "o"}
        yield client, client.post("/v1/runs", json=body).json()["id"]


def test_watchers_see_each_change_within_their_limit_until_the_service_stops(
    forked_server: Server, document: Any
) -> None:
    """Streams count as requests in progress; a service that stops ends them whole, at once."""
    with serving(forked_server, document, AFFIDAVIT_CONCURRENCY="3") as (client, run):
        url = f"{forked_server.url}/v1/runs/{run}/events"
        readers = [Reader(url, dict(client.headers)) for _ in range(2)]
        for reader in readers:
            reader.wait("1-0")
        with client.stream("GET", url) as leaving:
            assert leaving.status_code == 200
            answer = client.get(url)
            assert (answer.status_code, answer.json()["code"]) == (429, "too_many_at_once")
        # Who has gone makes room again.
        end = time.monotonic() + TIMEOUT_SECONDS
        while (answer := client.post("/v1/queues/default/claims", json={"worker": "w"})).is_error:
            assert time.monotonic() < end, answer.text
            time.sleep(0.1)
        job = answer.json()
        stated = {"fence": job["fence"], "secret": job["secret"]}
        client.post(f"/v1/runs/{run}/start", json={**stated, "plan_digest": job["plan_digest"]})
        client.post(f"/v1/runs/{run}/heartbeat", json={**stated, "steps": 4})
        for reader in readers:
            reader.wait("1-0", "2-0", "3-0", "3-4")
        forked_server.stop(signal.SIGTERM)  # what is not ended within 20 s is cut
        for reader in readers:
            reader.join(TIMEOUT_SECONDS)
            assert not reader.cut
            assert reader.text.endswith("\n\n")
