"""The queue over HTTP with workers that only say what they did: leases, fencing, charges."""

from __future__ import annotations

import hashlib
import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DatabaseError

from affidavit.client import Reservation, Run
from affidavit.service.core.database import open_engine
from affidavit.service.identity.actor import CommandContext
from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import TokenRepository
from affidavit.service.runs.queue import MAX_FAILED_ATTEMPTS, RunQueue
from affidavit.service.runs.wire_models import RunClaimRequest
from affidavit.trust import SigningKey
from tests.service.ledger_replay import replay
from tests.service.runs.conftest import ON_SQLITE, Yard
from tests.support.run_records import Record

HEAD = "sha256:" + "1" * 64


def test_a_run_goes_its_way_once(yard: Yard) -> None:
    certificate = yard.certify()
    requested = yard.request(certificate)
    assert requested.status_code == 201, requested.text
    run = requested.json()
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
    # The first answer may have been lost.
    assert yard.start(job).json() == {**yard.run(run), "search": None}
    assert yard.say(job, "heartbeat", steps=2).json() == {"cancel": False, "granted": 10}
    assert yard.run(run)["steps"]["reported"] == 2
    services, stolen = yard.client.app.state.services, SigningKey.generate()
    services.runs._worker_keys.save(stolen.public)
    services.keyring._revoked = lambda: {stolen.key_id}
    for key in (SigningKey.generate(), stolen):
        refused = yard.complete(job, 10, key=key, send=False)
        assert (refused.status_code, refused.json()["code"]) == (422, "bad_provenance")
    first = yard.complete(job, 10)
    assert (first.json()["state"], yard.charged(run)) == ("settled", ("settled", 10))
    assert yard.complete(job, 2).json()["code"] == "lease_lost"
    assert not replay(yard.engine)


@ON_SQLITE
def test_an_answer_has_the_fields_of_its_model_and_no_more(yard: Yard) -> None:
    """What the service keeps beside them (a claim's secret, the plan's name) is in no answer."""
    run = yard.request(yard.certify()).json()
    job = yard.claim()
    started = yard.start(job).json()
    kept = hashlib.sha256(job["secret"].encode()).hexdigest()
    (listed,) = yard.ask("GET", "/v1/runs", "audit").json()["items"]
    for answer in (run, listed, yard.run(run)):
        assert answer.keys() == Run.model_fields.keys()
    assert started.keys() == {*Run.model_fields, "search"}
    reserved = yard.ask("GET", f"/v1/reservations/{run['reservation']}", "audit").json()
    (ledger,) = yard.ask("GET", "/v1/ledgers/toy", "audit").json()["items"]
    for answer in (reserved, *ledger["entries"]):
        assert answer.keys() == Reservation.model_fields.keys()
    for answer in (run, listed, started, reserved, ledger):
        assert job["secret"] not in json.dumps(answer)
        assert kept not in json.dumps(answer)


def test_what_a_run_has_reserved_is_settled_by_its_record_and_not_by_hand(yard: Yard) -> None:
    """Another worker's token would free the budget of a run that goes on."""
    certificate = yard.certify()
    nothing = {"steps_run": 0, "record": "sha256:" + "f" * 64}

    def by_hand(run: Any, *steps: str) -> None:
        for step in steps:
            path = f"/v1/reservations/{run['reservation']}/{step}"
            refused = yard.ask("POST", path, "work", nothing if step == "settle" else {})
            assert (refused.status_code, refused.json()["code"]) == (409, "held_by_run")
            assert f"POST /v1/runs/{run['id']}/cancel" in refused.text

    run = yard.request(certificate).json()
    by_hand(run, "commit", "settle", "release")
    assert yard.charged(run) == ("reserved", None)
    job = yard.claim()
    yard.start(job)
    by_hand(run, "commit", "settle", "release")
    assert yard.charged(run) == ("committed", None)
    assert yard.complete(job, 10).json()["state"] == "settled"
    by_hand(run, "settle")
    assert yard.charged(run) == ("settled", 10)
    assert not replay(yard.engine)


@ON_SQLITE
def test_a_workers_token_is_for_the_queues_and_data_sets_that_it_names(yard: Yard) -> None:
    tokens, now = TokenRepository(yard.engine), datetime.now(UTC)
    for name, named in (("gpu", {"queues": ["gpu"]}), ("hand", {"datasets": ["toy"]})):
        new = tokens.new(name, [Scope.WORK], 1, by="test", at=now, **named)
        yard.tokens[name] = new[1].text
    certificate = yard.certify()
    run = yard.request(certificate).json()
    body = {"certificate": certificate}
    by_hand = yard.ask("POST", "/v1/ledgers/toy/reservations", "submit", body).headers["location"]
    claims = "/v1/queues/default/claims"
    for who, method, path in (
        ("gpu", "POST", claims),
        ("hand", "POST", claims),
        ("gpu", "GET", f"/v1/runs/{run['id']}/bundle"),
        *(("gpu", "POST", f"{by_hand}/{step}") for step in ("commit", "settle", "release")),
    ):
        sent = {"worker": "w", "run": run["id"]} if path == claims else {}
        refused = yard.ask(method, path, who, sent if method == "POST" else None)
        assert (refused.status_code, refused.json()["code"]) == (403, "not_permitted"), path
    assert yard.run(run)["state"] == "queued"
    elsewhere = yard.request(certificate, queue="gpu").json()
    assert (
        yard.ask("POST", "/v1/queues/gpu/claims", "gpu", {"worker": "w"}).json()["run"]
        == (elsewhere["id"])
    )
    assert yard.ask("POST", f"{by_hand}/commit", "hand", {}).json()["state"] == "committed"


def test_a_run_and_its_reservation_are_one_transaction(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that dies between the two leaves neither."""
    certificate = yard.certify()

    def die(*_: Any) -> None:
        raise SystemError

    with monkeypatch.context() as patch:
        patch.setattr("affidavit.service.runs.service._insert_run", die)
        assert yard.request(certificate).status_code == 500
    ledger = yard.ask("GET", "/v1/ledgers/toy", "audit").json()["items"][0]
    assert ledger["entries_total"] == 0
    key = {"idempotency_key": "nightly"}
    body = {"certificate": certificate, "data": "digits", "model": "mlp:8", "output": "o"}
    first = yard.ask("POST", "/v1/runs", "submit", body, **key)
    again = yard.ask("POST", "/v1/runs", "submit", body, **key)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    ledger = yard.ask("GET", "/v1/ledgers/toy", "audit").json()["items"][0]
    assert ledger["entries_total"] == 1
    assert not replay(yard.engine)


@ON_SQLITE
def test_what_does_not_conform_has_failed_and_keeps_its_charge(yard: Yard) -> None:
    run = yard.request(yard.certify()).json()
    job = yard.claim()
    yard.start(job)
    record = Record(yard.predicate(job))
    for _ in range(11):
        record.step()
    assert yard.complete(job, record.end()).json()["state"] == "failed"
    state, steps = yard.charged(run)
    certified = yard.ask("GET", f"/v1/reservations/{run['reservation']}", "audit").json()
    assert (state, steps) == ("settled", certified["steps"]["certified"])
    assert yard.run(run)["code"] == "not_conformant"


@ON_SQLITE
def test_a_lost_lease_gives_back_what_was_not_begun_and_charges_what_was(yard: Yard) -> None:
    certificate = yard.certify()
    run = yard.request(certificate).json()
    for fence in range(1, MAX_FAILED_ATTEMPTS + 1):
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


@ON_SQLITE
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


@ON_SQLITE
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
    assert yard.say(job, "heartbeat", steps=0).json()["cancel"]
    assert yard.say(job, "fail", code="cancelled", message="").json()["state"] == "cancelled"
    assert yard.charged(run)[0] == "settled"


@ON_SQLITE
def test_what_a_run_may_not_ask_for(yard: Yard) -> None:
    for field, value in (
        ("output", "../x"),
        ("output", "/x"),
        ("data", "--x"),
        ("model", "a b"),
        ("queue", "a b"),
    ):
        answer = yard.request("sha256:" + "0" * 64, **{field: value})
        assert answer.status_code == 400
        assert answer.json()["reasons"][0]["pointer"] == f"/{field}"


@pytest.mark.ordinary("postgresql")
def test_twenty_runs_over_four_workers_each_once_and_the_oldest_first(yard: Yard) -> None:
    certificate = yard.certify()
    requested = [yard.request(certificate).json()["id"] for _ in range(20)]
    queue, place = RunQueue(yard.engine), requested.index
    next_run = RunClaimRequest(worker="w")

    def worker(number: int) -> list[str]:
        claimed = []
        call = CommandContext(actor=f"w{number}", at=datetime.now(UTC))
        while (claim := queue.claim("default", next_run, call)) is not None:
            claimed.append(claim[0].id)
        return claimed

    with ThreadPoolExecutor(4) as pool:
        result = list(pool.map(worker, range(4)))
    assert sorted(run for item in result for run in item) == sorted(requested)
    for item in result:
        assert item == sorted(item, key=place)


def test_a_named_run_is_claimed_out_of_turn_and_only_from_its_queue(yard: Yard) -> None:
    certificate = yard.certify()
    first, second = (yard.request(certificate).json()["id"] for _ in range(2))
    elsewhere = yard.request(certificate, queue="other").json()["id"]
    assert yard.claim(run=elsewhere) is None
    assert yard.claim(run=second)["run"] == second
    assert yard.claim(run=second) is None
    assert yard.claim()["run"] == first


@ON_SQLITE
def test_only_the_secret_of_a_claim_reports_on_it(yard: Yard) -> None:
    """Another worker of the same token guesses the fencing token, and nothing more."""
    run = yard.request(yard.certify()).json()
    job = yard.claim()
    for guess in ("0" * 64, secrets.token_hex(32), None):
        thief = {**job, "secret": guess}
        for refused in (
            yard.start(thief),
            yard.say(thief, "heartbeat", steps=1, wants=9),
            yard.say(thief, "record", part=1, lines="x"),
            yard.say(thief, "fail", code="x", message=""),
            yard.say(thief, "complete", provenance={}),
        ):
            assert refused.status_code in (400, 409, 422), refused.text
            assert job["secret"] not in refused.text
    assert yard.run(run)["state"] == "claimed"
    with yard.engine.connect() as connection:
        (stored,) = connection.execute(text("SELECT secret FROM run_leases")).scalars()
        logged = connection.execute(text("SELECT content FROM log_entries")).scalars().all()
    assert stored == "sha256:" + hashlib.sha256(job["secret"].encode()).hexdigest()
    assert not any(job["secret"] in str(entry) for entry in logged)
    assert job["secret"] not in str(yard.run(run))
    # The secret of an attempt ends with it.
    assert yard.later(61) == 1
    successor = yard.claim()
    assert successor["secret"] != job["secret"]
    mixed = {**successor, "secret": job["secret"]}
    assert yard.start(mixed).json()["code"] == "lease_lost"
    assert yard.start(successor).json()["state"] == "running"


def test_a_claim_reads_the_queue_in_the_order_of_an_index(database_url: str) -> None:
    engine = open_engine(database_url)
    query = "SELECT * FROM run_leases WHERE queue = 'q' AND state = 'queued'"
    query += " ORDER BY requested_at, run_id LIMIT 1"
    with engine.connect() as connection:
        word = "EXPLAIN QUERY PLAN"
        if engine.dialect.name == "postgresql":
            word = "EXPLAIN"
            # An empty table is sorted in no time, so that alone would be no reason against it.
            for way in ("sort", "incremental_sort", "seqscan", "bitmapscan"):
                connection.exec_driver_sql(f"SET LOCAL enable_{way} = off")
        rows = connection.exec_driver_sql(f"{word} {query}")
        plan = "\n".join(str(row[-1]) for row in rows)
    engine.dispose()
    assert "run_leases_next" in plan
    assert "Sort" not in plan
    assert "TEMP B-TREE" not in plan


@pytest.mark.in_both
def test_leases_that_ran_out_are_taken_back_each_once(yard: Yard) -> None:
    certificate = yard.certify()
    runs = [yard.request(certificate).json() for _ in range(7)]
    for _ in runs:
        yard.claim()
    assert yard.later(30) == 0
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda _: yard.later(61), range(4)))
    assert (sum(taken), yard.later(61)) == (7, 0)
    for run in runs:
        assert [item["kind"] for item in yard.events(run)] == ["queued", "claimed", "requeued"]


@pytest.mark.in_both
def test_the_database_keeps_what_happened(yard: Yard) -> None:
    run = yard.request(yard.certify()).json()
    job = yard.claim()
    yard.start(job)
    yard.complete(job, 10)
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
