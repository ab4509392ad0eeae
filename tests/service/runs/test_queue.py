"""The queue over HTTP with workers that only say what they did: leases, fencing, charges."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DatabaseError

from affidavit.certificate.conformance import Conformance, Finding
from affidavit.certificate.keys import KeyStore, SigningKey
from affidavit.service.database import open_engine
from affidavit.service.identity.actor import Scope
from affidavit.service.identity.tokens_kept import TokenStore
from affidavit.service.ledger.replay import replay
from affidavit.service.runs.queue import MOST_CLAIMS, RunQueue
from affidavit.service.settings import Settings
from affidavit.worker.provenance import provenance
from affidavit.worker.queue import Job, Wanting

HEAD = "sha256:" + "1" * 64


@dataclass
class Yard:
    """A running service, a token for each scope, and a worker's key that it trusts."""

    client: Any
    tokens: dict[str, str]
    engine: Engine
    key: SigningKey
    document: Callable[..., dict[str, Any]]

    def ask(self, method: str, path: str, who: str, body: Any = None, **headers: str) -> Any:
        sent = {"authorization": f"Bearer {self.tokens[who]}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.request(method, path, headers=sent, json=body)

    def certify(self) -> str:
        found = self.ask("POST", "/v1/certificates", "submit", self.document()).json()
        return str(found["certificate"]["id"])

    def request(self, certificate: str, **more: Any) -> Any:
        body = {"certificate": certificate, "data": "digits", "model": "mlp:8", "output": "o"}
        return self.ask("POST", "/v1/runs", "submit", {**body, **more})

    def claim(self, **more: Any) -> Any:
        answer = self.ask("POST", "/v1/queues/default/claims", "work", {"worker": "w", **more})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def say(self, job: Any, what: str, **body: Any) -> Any:
        path = f"/v1/runs/{job['run']}/{what}"
        return self.ask("POST", path, "work", {"fence": job["fence"], **body})

    def start(self, job: Any) -> Any:
        return self.say(job, "start", plan_digest=job["plan_digest"])

    def complete(self, job: Any, steps: int, *codes: str, key: SigningKey | None = None) -> Any:
        found = Conformance(
            certificate_id=job["certificate"],
            plan_digest=job["plan_digest"],
            run="r",
            head=HEAD,
            steps_certified=10,
            steps_charged=steps,
            steps_released=steps,
            steps_to_charge=steps,
            findings=tuple(Finding(code=code, line=1, message="") for code in codes),
        )
        envelope = provenance(
            Job.read(job),
            found,
            key or self.key,
            worker="w",
            weights="2" * 64,
            header=None,
            began=datetime.now(UTC),
        )
        return self.say(job, "complete", provenance=envelope)

    def charged(self, run: Any) -> tuple[str, int | None]:
        found = self.ask("GET", f"/v1/reservations/{run['reservation']}", "audit").json()
        return found["state"], found["steps"]["run"]

    def run(self, run: Any) -> Any:
        return self.ask("GET", f"/v1/runs/{run['id']}", "audit").json()

    def later(self, seconds: int) -> int:
        """The reaper, so many seconds from now."""
        return RunQueue(self.engine).reap(datetime.now(UTC) + timedelta(seconds=seconds))


@pytest.fixture
def yard(
    database_url: str, tmp_path: Path, client_of: Any, document: Callable[..., dict[str, Any]]
) -> Iterator[Yard]:
    KeyStore(tmp_path / "keys").new("test")
    key = SigningKey.generate("worker")
    KeyStore(tmp_path / "worker-keys").keep(key.public)
    settings = Settings(
        database_url=database_url, key_directory=tmp_path / "keys", workers=1, loopback=True
    )
    engine = open_engine(database_url)
    store, now = TokenStore(engine), datetime.now(UTC)
    tokens = {
        each.value: store.new(each.value, [each], 1, by="test", at=now)[1].text for each in Scope
    }
    with client_of(settings) as client:
        found = Yard(client, tokens, engine, key, document)
        budget = {"adjacency": "add_remove", "epsilon": 500, "delta": 1e-3}
        assert found.ask("POST", "/v1/ledgers/toy/budget", "admin", budget).is_success
        yield found
    engine.dispose()


def test_a_run_goes_its_way_once(yard: Yard) -> None:
    certificate = yard.certify()
    asked = yard.request(certificate)
    assert asked.status_code == 201, asked.text
    run = asked.json()
    assert yard.charged(run)[0] == "reserved"
    job = yard.claim()
    assert (job["run"], job["fence"]) == (run["id"], 1)
    assert yard.claim() is None
    assert yard.complete(job, 3).json()["code"] == "lease_lost"  # it was never begun
    assert yard.say(job, "start", plan_digest=HEAD).json()["code"] == "run_not_started"
    assert (yard.run(run)["state"], yard.charged(run)[0]) == ("failed", "released")

    run = yard.request(certificate).json()
    job = yard.claim()
    assert yard.start(job).json()["state"] == "running"
    assert yard.start(job).json()["code"] == "lease_lost"
    assert yard.say(job, "heartbeat", steps=2).json() == {"cancel": False}
    assert yard.run(run)["steps"]["reported"] == 2
    stranger = yard.complete(job, 3, key=SigningKey.generate())
    assert (stranger.status_code, stranger.json()["code"]) == (422, "bad_provenance")
    first = yard.complete(job, 3)
    assert (first.json()["state"], yard.charged(run)) == ("settled", ("settled", 3))
    assert yard.complete(job, 2).json()["code"] == "lease_lost"
    assert not replay(yard.engine)


def test_what_does_not_conform_has_failed_and_keeps_its_charge(yard: Yard) -> None:
    run = yard.request(yard.certify()).json()
    job = yard.claim()
    yard.start(job)
    assert yard.complete(job, 10**6, "too_many_steps").json()["state"] == "failed"
    state, steps = yard.charged(run)
    certified = yard.ask("GET", f"/v1/reservations/{run['reservation']}", "audit").json()
    assert (state, steps) == ("settled", certified["steps"]["certified"])
    assert yard.run(run)["code"] == "not_conformant"


def test_a_lost_lease_gives_back_what_was_not_begun_and_charges_what_was(yard: Yard) -> None:
    certificate = yard.certify()
    run = yard.request(certificate).json()
    for fence in range(1, MOST_CLAIMS + 1):
        zombie = yard.claim()
        assert zombie["fence"] == fence
        assert yard.later(61) == 1
        assert yard.start(zombie).json()["code"] == "lease_lost"
    assert (yard.run(run)["state"], yard.charged(run)[0]) == ("failed", "released")

    run = yard.request(certificate).json()
    zombie = yard.claim()
    yard.start(zombie)
    assert yard.later(30) == 0
    assert yard.later(61) == 1
    assert yard.later(61) == 0
    for late in (
        yard.complete(zombie, 1),
        yard.say(zombie, "heartbeat", steps=1),
        yard.say(zombie, "fail", code="late", message=""),
    ):
        assert (late.status_code, late.json()["code"]) == (409, "lease_lost")
    ended = yard.run(run)
    assert (ended["state"], ended["code"]) == ("failed", "lease_lost")
    assert yard.charged(run) == ("settled", ended["steps"]["charged"])


def test_what_changed_since_the_request_stops_the_run(yard: Yard) -> None:
    certificate = yard.certify()
    run = yard.request(certificate).json()
    job = yard.claim()
    revoked = yard.ask(
        "POST",
        f"/v1/certificates/{certificate}/revocation",
        "approve",
        {"code": "key_compromise", "reason": "test"},
    )
    assert revoked.is_success, revoked.text
    refused = yard.start(job)
    assert (refused.status_code, refused.json()["code"]) == (409, "run_not_started")
    ended = yard.run(run)
    assert (ended["state"], ended["code"]) == ("failed", "certificate_not_usable")
    assert yard.charged(run)[0] == "released"
    assert yard.request(certificate).json()["code"] == "certificate_not_usable"


def test_cancelling_and_asking_again(yard: Yard) -> None:
    certificate = yard.certify()
    body = {"certificate": certificate, "data": "d", "model": "m", "output": "o"}
    first = yard.ask("POST", "/v1/runs", "submit", body, idempotency_key="k")
    again = yard.ask("POST", "/v1/runs", "submit", body, idempotency_key="k")
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    other = yard.ask("POST", "/v1/runs", "submit", {**body, "model": "n"}, idempotency_key="k")
    assert other.json()["code"] == "idempotency_key_reused"
    run = first.json()
    named = yard.request(certificate, reservation=run["reservation"])
    assert named.json()["code"] == "reservation_not_usable"
    cancelled = yard.ask("POST", f"/v1/runs/{run['id']}/cancel", "submit", {"reason": "no"})
    assert cancelled.json()["state"] == "cancelled"
    assert yard.charged(run)[0] == "released"
    assert yard.claim() is None
    run = yard.request(certificate).json()
    job = yard.claim()
    yard.start(job)
    yard.ask("POST", f"/v1/runs/{run['id']}/cancel", "submit", {})
    assert yard.say(job, "heartbeat", steps=0).json() == {"cancel": True}
    assert yard.say(job, "fail", code="cancelled", message="").json()["state"] == "cancelled"
    assert yard.charged(run)[0] == "settled"


@pytest.mark.parametrize(
    ("field", "value"),
    [("output", "../x"), ("output", "/x"), ("data", "--x"), ("model", "a b"), ("priority", 101)],
)
def test_what_a_run_may_not_ask_for(yard: Yard, field: str, value: Any) -> None:
    answer = yard.request("sha256:" + "0" * 64, **{field: value})
    assert answer.status_code == 400
    assert answer.json()["reasons"][0]["pointer"] == f"/{field}"


def test_twenty_runs_over_four_workers_each_once_and_by_priority(yard: Yard) -> None:
    certificate = yard.certify()
    asked = [yard.request(certificate, priority=number % 3).json() for number in range(20)]
    needy = yard.request(certificate, priority=9, requirements={"gpu": True}).json()
    queue = RunQueue(yard.engine)
    wanting = Wanting(queue="default", worker="w", seconds=60, gpu=False, memory_mib=0)

    def worker(number: int) -> list[tuple[str, int]]:
        claimed = []
        while (run := queue.claim(wanting, f"w{number}", datetime.now(UTC))) is not None:
            claimed.append((run.id, run.priority))
        return claimed

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(worker, range(4)))
    assert sorted(run for each in found for run, _ in each) == sorted(run["id"] for run in asked)
    for each in found:
        priorities = [priority for _, priority in each]
        assert priorities == sorted(priorities, reverse=True)
    assert yard.claim(gpu=True)["run"] == needy["id"]


def test_the_database_keeps_what_happened(yard: Yard) -> None:
    run = yard.request(yard.certify()).json()
    job = yard.claim()
    yard.start(job)
    yard.complete(job, 3)
    insert = (
        "INSERT INTO run_events (run_id, seq, kind, once, follows, fence, at, actor, body) "
        f"VALUES ('{run['id']}', 9, "
    )
    tail = ", '2026-01-01 00:00:00', 'x', '{}')"
    for statement in (
        "UPDATE runs SET queue = 'x'",
        "DELETE FROM run_events",
        f"{insert}'failed', 'end', 'running', 1{tail}",
        f"{insert}'running', 'running', 'queued', 2{tail}",
        f"{insert}'claimed', NULL, 'queued', 1{tail}",
        f"{insert}'settled', NULL, 'running', 1{tail}",
        insert.replace("INSERT", "REPLACE", 1) + f"'failed', 'end', 'running', 1{tail}",
    ):
        with pytest.raises(DatabaseError), yard.engine.begin() as connection:
            connection.execute(text(statement))
    assert json.dumps(yard.run(run)["state"]) == '"settled"'
