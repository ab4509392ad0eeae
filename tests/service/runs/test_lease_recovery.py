"""A run that loses its worker: who may go on with it, and what is charged and believed then."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from affidavit.service.audit.audit import audit
from affidavit.service.core.database import snapshot, writer
from affidavit.service.identity.actor import CommandContext
from affidavit.service.ledger.store import lock_reservation
from affidavit.service.runs.queue import MAX_FAILED_ATTEMPTS
from affidavit.service.runs.wire_models import CompletionRequest
from affidavit.trust import SigningKey
from tests.service.ledger_replay import replay
from tests.service.runs.conftest import ON_SQLITE, Yard
from tests.support.random_seeds import seeded
from tests.support.run_records import Record, digest, record_of

STEPS = 10
HAND_OVERS = int(os.environ.get("AFFIDAVIT_HANDOVERS", "2"))
"""Random histories in each database; `make soak` takes more."""


def begun(yard: Yard, granted: int = 4, **more: Any) -> tuple[Any, Any]:
    """A run that is under way with so many steps granted, and its job."""
    run = yard.request(yard.certify(), **more).json()
    job = yard.claim()
    assert yard.say(job, "start", plan_digest=job["plan_digest"], wants=0).is_success
    stated = yard.say(job, "heartbeat", steps=0, wants=granted).json()
    assert stated == {"cancel": False, "granted": min(granted, STEPS)}
    return run, job


def taken(yard: Yard, **more: Any) -> Any:
    """The job of whoever goes on with a run whose worker is not heard of any more."""
    assert yard.later(61) == 1
    job = yard.claim(**more)
    answer = yard.say(job, "start", plan_digest=job["plan_digest"], wants=0)
    assert answer.is_success, answer.text
    return job


def steps_of(record: Record, count: int) -> Record:
    for _ in range(count):
        record.step()
    return record


@ON_SQLITE
def test_who_goes_on_passes_over_what_was_granted(yard: Yard) -> None:
    run, zombie = begun(yard)
    record = steps_of(Record(yard.predicate(zombie)), 3)
    stated = {"steps": 3, "head": record.charge_heads[-2]}
    assert yard.say(zombie, "heartbeat", **stated).json()["granted"] == 4  # it asked for no more
    job = taken(yard)
    assert (job["granted"], job["previous"], job["fence"]) == (4, 1, 2)
    for late in (
        yard.say(zombie, "heartbeat", steps=9, wants=9),
        yard.say(zombie, "record", part=1, lines="x"),
        yard.complete(zombie, 3, send=False),
        yard.start(zombie),
    ):
        assert (late.status_code, late.json()["code"]) == (409, "lease_lost")
    record.go_on(4)
    steps_of(record, STEPS - 4)
    assert yard.say(job, "heartbeat", steps=4, wants=99).json()["granted"] == STEPS
    ended = yard.complete(job, record.end())
    assert (ended.json()["state"], ended.json()["code"]) == ("settled", "conformant")
    assert yard.charged(run) == ("settled", STEPS)
    kinds = [(event["kind"], event["fence"]) for event in yard.events(run)]
    assert kinds == [
        ("queued", None),
        ("claimed", 1),
        ("running", 1),
        ("requeued", 1),
        ("claimed", 2),
        ("resumed", 2),
        ("settled", 2),
    ]
    assert not replay(yard.engine)


@ON_SQLITE
def test_a_lease_that_is_not_as_the_log_says_is_found(yard: Yard) -> None:
    """A grant that is taken back has another worker train and charge the same steps again."""
    run, _ = begun(yard)

    def edited(change: str) -> list[str]:
        with writer(yard.engine).begin() as connection:
            connection.execute(text(f"UPDATE run_leases SET {change}"))
        return yard.altered()

    where = [f"runs {run['id']}"]
    for change, back in (
        ("state = 'queued'", "state = 'running'"),
        ("fence = 9", "fence = 1"),
        ("cancel = TRUE", "cancel = FALSE"),
    ):
        assert edited(change) == where
        assert not edited(back)
    assert edited("granted = 0") == where
    job = taken(yard)
    assert yard.say(job, "heartbeat", steps=0, wants=99).json()["granted"] == STEPS
    assert yard.altered() == where


@ON_SQLITE
def test_a_charge_that_no_worker_signed_for_is_found(yard: Yard) -> None:
    """Whoever can write to the database settles a run early, and charges its steps to nobody."""
    genuine = yard.request(yard.certify()).json()
    job = yard.claim()
    yard.start(job)
    yard.complete(job, 7)
    assert yard.charged(genuine) == ("settled", 7)
    assert not charges(yard, yard.key)
    assert charges(yard, SigningKey.generate("other")) == [f"reservation {genuine['reservation']}"]
    run, _ = begun(yard)
    call = CommandContext(actor="token:work", at=datetime.now(UTC))
    with writer(yard.engine).begin() as connection:
        held = lock_reservation(connection, run["reservation"], call)
        held.settle(1, digest(), None)
    assert not replay(yard.engine)
    assert not yard.altered()
    assert charges(yard, yard.key) == [f"reservation {run['reservation']}"]


def charges(yard: Yard, key: SigningKey) -> list[str]:
    """What the audit finds where this worker's key is known."""
    with snapshot(yard.engine) as connection:
        return [finding.where for finding in audit(connection, [], [key.public])]


def audited(yard: Yard, document: Callable[..., dict[str, Any]], when: str) -> Any:
    """A run of a plan with canaries; its record's first line is reported before a step or not."""
    plan = {**document(), "canaries": {"count": 10}}
    made = yard.ask("POST", "/v1/certificates", "submit", plan).json()
    yard.request(str(made["certificate"]["id"]))
    job = yard.claim()
    yard.say(job, "start", plan_digest=job["plan_digest"], wants=0)
    record = Record(yard.predicate(job))
    first = json.loads(record.lines[0])["digest"]
    if when == "late":
        yard.say(job, "heartbeat", steps=0, wants=2)
    if when != "never":
        yard.say(job, "heartbeat", steps=0, wants=2, head=first)
    yard.say(job, "heartbeat", steps=0, wants=STEPS)
    steps_of(record, STEPS)
    return yard.run({"id": yard.complete(job, record.end()).json()["id"]}), first


@pytest.mark.ordinary("first-*", "late-*")
@ON_SQLITE
@pytest.mark.parametrize("when", ["first", "late", "never"])
def test_canaries_count_if_the_log_knew_of_them_before_a_step(
    yard: Yard, document: Callable[..., dict[str, Any]], when: str
) -> None:
    ended, first = audited(yard, document, when)
    if when == "first":
        assert ended["code"] == "conformant"
    else:
        assert ended["code"] == "not_conformant"
        assert "canaries_not_logged" in ended["message"]
    with yard.engine.connect() as connection:
        query = text("SELECT content FROM log_entries WHERE kind = 'record'")
        entries = connection.execute(query).scalars().all()
    assert [json.loads(entry)["body"]["record"] for entry in entries] == (
        [first] if when == "first" else []
    )


LIES = ("granted_not_passed", "other_history", "other_record", "no_record")


@ON_SQLITE
def test_what_the_service_knows_is_compared_with_the_record(yard: Yard) -> None:
    """Each is a record that conforms by itself, and only what the service knows denies it."""
    for lie in LIES:
        lied(yard, lie)


def lied(yard: Yard, lie: str) -> None:
    run, zombie = begun(yard)
    record = steps_of(Record(yard.predicate(zombie)), 3)
    yard.say(zombie, "heartbeat", steps=3, head=record.charge_heads[-2])
    job = taken(yard)
    if lie == "other_history":
        record = Record(yard.predicate(job))
    record.go_on(3 if lie == "granted_not_passed" else 4)
    steps_of(record, STEPS - record.charged).end()
    other = steps_of(Record(record.predicate), STEPS).end()
    ended = yard.complete(
        job, record, send=lie != "no_record", signed=other if lie == "other_record" else None
    ).json()
    code = lie if lie == "no_record" else "not_conformant"
    assert (ended["state"], ended["code"]) == ("failed", code)
    assert lie in ended["message"] or lie == "no_record"
    assert yard.charged(run) == ("settled", STEPS)


@ON_SQLITE
def test_a_key_that_another_attempt_had_for_another_step_is_found(yard: Yard) -> None:
    run, zombie = begun(yard)
    before = steps_of(Record(yard.predicate(zombie)), 3)
    assert yard.say(zombie, "record", part=1, lines=before.content).is_success
    job = taken(yard)
    record = before.copy()
    record.go_on(4)
    steps_of(record, STEPS - 5)
    record.step(key_commitment=digest())
    # Its own record says nothing of the key: it dropped the step that had it.
    other = Record(record.predicate)
    other.go_on(4)
    other.step(key_commitment=before.chain.key(1))
    steps_of(other, STEPS - 5)
    ended = yard.complete(job, other.end()).json()
    assert "key_in_two_steps" in ended["message"]
    assert yard.charged(run) == ("settled", STEPS)


@ON_SQLITE
def test_the_check_of_a_record_goes_on_when_its_worker_hangs_up(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check may take longer than a client waits, and would begin again with each repetition."""
    run, job = begun(yard)
    record = steps_of(Record(yard.predicate(job)), STEPS).end()
    reported: dict[str, Any] = {}

    class Silent(Yard):
        def say(self, job: Any, what: str, **body: Any) -> Any:
            if what != "complete":
                return super().say(job, what, **body)
            reported.update(fence=job["fence"], secret=job["secret"], **body)
            return None

    Silent(**vars(yard)).complete(job, record)
    runs = yard.client.app.state.services.runs
    report = CompletionRequest.from_data(reported)
    call = CommandContext(actor=runs.queue.find(run["id"]).holder, at=datetime.now(UTC))

    async def story() -> None:
        checking, slow, checks = asyncio.Event(), asyncio.Event(), []

        async def check(work: Callable[[Any], Any], sent: Any) -> Any:
            checks.append(sent)
            checking.set()
            await slow.wait()
            return work(sent)

        monkeypatch.setattr(runs._pool, "run", check)
        first = asyncio.create_task(runs.complete(run["id"], report, call))
        await checking.wait()
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        again = asyncio.create_task(runs.complete(run["id"], report, call))
        await asyncio.sleep(0)
        slow.set()
        assert (await again).state == "settled"
        assert (await runs.complete(run["id"], report, call)).state == "settled"
        assert len(checks) == 1

    asyncio.run(story())
    assert yard.charged(run) == ("settled", STEPS)


DEEP = [
    b'{"step":' + 200_000 * b"[" + 200_000 * b"]" + b',"type":"%s"}\n' % kind
    for kind in (b"charge", b"resumed")
]


@pytest.mark.ordinary("key-True-*", "deep-False-*")
@ON_SQLITE
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("bad", ["deep", "key"])
def test_lines_that_cannot_be_read_deny_a_record_and_nobody_elses(
    yard: Yard, bad: str, before: bool
) -> None:
    """``before``: it is the worker before that sent them, and its successor is honest."""
    run, zombie = begun(yard)
    record = steps_of(Record(yard.predicate(zombie)), 3)
    wrong = record.copy()
    if bad == "deep":
        wrong.lines += DEEP
    else:
        wrong.charge(key_commitment=["a list"])
        wrong.release()
    sent = wrong if before else record
    assert yard.say(zombie, "record", part=1, lines=sent.content).is_success
    job = taken(yard)
    ours = record if before else wrong
    ours.go_on(4)
    ended = yard.complete(job, steps_of(ours, STEPS - ours.charged).end()).json()
    expected = ("settled", "conformant") if before else ("failed", "not_conformant")
    assert (ended["state"], ended["code"]) == expected, ended
    assert yard.charged(run) == ("settled", STEPS)


POISSON = {"sampling": {"scheme": "poisson", "lot_size": 50}}


@ON_SQLITE
def test_a_run_may_be_begun_anew_where_its_steps_stand_alone(yard: Yard) -> None:
    created = yard.document
    yard.document = lambda: created(**POISSON)
    run, zombie = begun(yard)
    yard.say(zombie, "heartbeat", steps=3, head=digest())
    job = taken(yard)
    record = Record(yard.predicate(job))
    record.go_on(4)
    assert yard.complete(job, steps_of(record, STEPS - 4).end()).json()["state"] == "settled"
    assert yard.charged(run) == ("settled", STEPS)


@ON_SQLITE
def test_a_change_since_the_run_began_stops_its_next_attempt(yard: Yard) -> None:
    for what in ("settled", "cancelled", "other_plan", "revoked"):
        stopped_by(yard, what)
    assert not replay(yard.engine)


def stopped_by(yard: Yard, what: str) -> None:
    run, zombie = begun(yard)
    yard.later(61)
    job = yard.claim()
    if what == "revoked":
        path = f"/v1/certificates/{zombie['certificate']}/revocation"
        body = {"code": "key_compromise", "reason": "test"}
        assert yard.ask("POST", path, "approve", body).is_success
    if what == "settled":  # which nobody can over HTTP
        with writer(yard.engine).begin() as connection:
            call = CommandContext(actor="owner", at=datetime.now(UTC))
            held = lock_reservation(connection, run["reservation"], call)
            held.settle(STEPS, None, None)
    if what == "cancelled":
        yard.ask("POST", f"/v1/runs/{run['id']}/cancel", "submit", {})
    plan = digest() if what == "other_plan" else job["plan_digest"]
    refused = yard.say(job, "start", plan_digest=plan, wants=0)
    assert (refused.status_code, refused.json()["code"]) == (409, "run_not_started")
    assert yard.run(run)["state"] == ("cancelled" if what == "cancelled" else "failed")
    assert yard.charged(run) == ("settled", STEPS)


@ON_SQLITE
def test_nobody_goes_on_where_no_step_is_left_or_somebody_asked_for_its_end(yard: Yard) -> None:
    run, _ = begun(yard, granted=STEPS)
    assert yard.later(61) == 1
    assert (yard.run(run)["state"], yard.run(run)["code"]) == ("failed", "lease_lost")
    assert yard.charged(run) == ("settled", STEPS)

    run, _ = begun(yard)
    yard.later(61)
    stopped = yard.ask("POST", f"/v1/runs/{run['id']}/cancel", "submit", {"reason": "no"})
    assert (stopped.json()["state"], yard.charged(run)) == ("cancelled", ("settled", STEPS))


def given_back(yard: Yard, job: Any) -> Any:
    return yard.say(job, "fail", code="trainer_killed", message="x", again=True).json()


@ON_SQLITE
def test_a_run_that_is_given_back_is_given_up_when_nothing_comes_of_it(
    yard: Yard,
) -> None:
    run, job = begun(yard)
    answer = yard.say(job, "fail", code="trainer_killed", message="x", again=True)
    assert answer.json()["state"] == "queued"
    for attempt in range(2, MAX_FAILED_ATTEMPTS + 2):
        job = yard.claim()
        yard.say(job, "start", plan_digest=job["plan_digest"], wants=0)
        if attempt == 2:  # this one gets further, and those before do not count any more
            granted = job["granted"]
            yard.say(job, "heartbeat", steps=granted + 2, wants=granted + 2)
        ended = given_back(yard, job)
        assert ended["state"] == "queued"
    job = yard.claim()
    yard.say(job, "start", plan_digest=job["plan_digest"], wants=0)
    ended = given_back(yard, job)
    assert (ended["state"], ended["code"]) == ("failed", "trainer_killed")
    assert yard.charged(run) == ("settled", STEPS)


@ON_SQLITE
def test_an_early_stop_is_settled_on_the_steps_that_were_run(yard: Yard) -> None:
    for steps in (0, 3):
        run, job = begun(yard)
        yard.ask("POST", f"/v1/runs/{run['id']}/cancel", "submit", {"reason": "enough"})
        assert yard.say(job, "heartbeat", steps=steps).json()["cancel"]
        ended = yard.complete(job, steps).json()
        assert (ended["state"], ended["code"]) == ("cancelled", "cancelled")
        assert yard.charged(run) == ("settled", steps)
    assert not replay(yard.engine)
    run, job = begun(yard)  # nobody asked
    ended = yard.complete(job, 2).json()
    assert (ended["state"], ended["code"], yard.charged(run)) == (
        "failed",
        "stopped",
        ("settled", 2),
    )


def test_parts_of_a_record_come_in_order_and_stay(yard: Yard) -> None:
    _, job = begun(yard)
    say = lambda part, lines: yard.say(job, "record", part=part, lines=lines)  # noqa: E731
    assert say(2, "b").json()["code"] == "record_refused"
    assert say(1, "é").is_success
    assert say(1, "é").is_success
    assert say(1, "x").json()["code"] == "record_refused"
    assert say(2, "").status_code == 400


def test_a_planted_pickle_executes_nothing(yard: Yard, tmp_path: Path) -> None:
    """Wherever a database writer may put one, and whatever is then asked."""
    marker = tmp_path / "executed"

    class Bomb:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {marker}",)

    bomb = pickle.dumps(Bomb(), protocol=0).decode("latin-1")
    run, job = begun(yard)
    whole = record_of(yard.predicate(job), STEPS)
    with yard.engine.begin() as connection:
        for column in ("worker", "head"):
            connection.execute(text(f"UPDATE run_leases SET {column} = :bomb"), {"bomb": bomb[:64]})
        connection.execute(
            text(
                "INSERT INTO run_records (run_id, fence, part, content, length) "
                "VALUES (:run, 1, 1, :bomb, 1)"
            ),
            {"run": run["id"], "bomb": pickle.dumps(Bomb())},
        )
        connection.execute(
            text(
                "INSERT INTO run_events (run_id, seq, kind, follows, fence, at, actor, body) "
                "VALUES (:run, 8, 'requeued', 'queued', 7, '2026-01-01 00:00:00', 'x', :bomb)"
            ),
            {"run": run["id"], "bomb": bomb},
        )
    yard.client._transport.raise_server_exceptions = False
    for path in (f"/v1/runs/{run['id']}", "/v1/runs", f"/v1/runs/{run['id']}/bundle"):
        assert yard.ask("GET", path, "work").status_code in (200, 500)
    for answer in (
        yard.say(job, "heartbeat", steps=1, wants=3),
        yard.say(job, "record", part=1, lines="x"),
        yard.complete(job, whole, send=False),
        yard.ask("POST", "/v1/queues/default/claims", "work", {"worker": "w"}),
    ):
        assert answer.status_code in (200, 409, 500, 503)
    assert not marker.exists()


# ---- random histories --------------------------------------------------------------


@dataclass
class Sim:
    """A worker whose trainer does what it is allowed to, whether or not anybody hears of it."""

    yard: Yard
    job: Any
    record: Record
    allowed: int
    steps: list[tuple[int, str]] = field(default_factory=list)
    told: int = 0
    kept: list[Record] = field(default_factory=list)
    died: bool = False

    def train(self, drawn: random.Random) -> None:
        """A step, if there is leave for it."""
        if self.died or self.record.charged >= min(self.allowed, STEPS):
            return
        key = self.record.chain.key(self.record.charged)
        self.record.charge()
        self.steps.append((self.record.charged - 1, key))
        if drawn.random() < 0.9:
            self.record.release()
            if drawn.random() < 0.4:
                self.record.checkpoint()
        else:
            self.died = True
        self.kept.append(self.record.copy())

    def restart(self) -> None:
        """Go on from the checkpoint where it died in its step."""
        if self.died:
            self.record.go_on(self.record.charged)
            self.died = False

    def renew(self, ahead: int) -> Any:
        heads = self.record.charge_heads
        wants = self.record.charged + ahead
        head = heads[-2] if len(heads) > 1 else None
        answer = self.yard.say(
            self.job, "heartbeat", steps=self.record.charged, wants=wants, head=head
        )
        if answer.is_success:
            self.told = len(heads) - 1
            self.allowed = max(self.allowed, answer.json()["granted"])
        return answer


def heir(yard: Yard, job: Any, before: Sim | None, drawn: random.Random) -> Sim:
    """The worker that goes on, with a copy of the record from some time after it was told of."""
    if before is None or not job["granted"]:
        record = Record(yard.predicate(job))
        return Sim(yard, job, record, 1, kept=[record.copy()])
    copies = [item for item in before.kept if len(item.charge_heads) >= before.told]
    record = drawn.choice(copies).copy()
    record.go_on(job["granted"])
    return Sim(yard, job, record, job["granted"], told=before.told, kept=[record.copy()])


@pytest.mark.ordinary("sqlite")
def test_whatever_happens_each_step_is_taken_once_and_charged(yard: Yard) -> None:
    ends = [history(yard, seed) for seed in range(HAND_OVERS)]
    assert not replay(yard.engine)
    assert max(attempts for attempts, _ in ends) > 2
    if HAND_OVERS >= 20:
        assert {state for _, state in ends} >= {"settled", "failed"}


def history(yard: Yard, seed: int) -> tuple[int, str]:
    """One run in its random ways; how many had it, and how it ended."""
    drawn = random.Random(seeded(seed))
    run = yard.request(yard.certify()).json()
    everybody: list[Sim] = []
    current: Sim | None = None
    for _ in range(60):
        state = yard.run(run)["state"]
        if state not in ("queued", "claimed", "running"):
            break
        if state != "running":
            job = yard.claim()
            answer = yard.say(job, "start", plan_digest=job["plan_digest"], wants=0)
            assert answer.is_success, answer.text
            current = heir(yard, job, everybody[-1] if everybody else None, drawn)
            current.allowed = max(job["granted"], 0)
            everybody.append(current)
            assert current.renew(drawn.randint(1, 3)).is_success
            continue
        assert current is not None
        for zombie in everybody:
            for _ in range(drawn.randint(0, 3)):
                zombie.train(drawn)
            if zombie is not current:
                for late in (zombie.renew(9), yard.complete(zombie.job, 1, send=False)):
                    assert late.json()["code"] == "lease_lost"
        match drawn.choice(["renew", "renew", "lost", "back", "end"]):
            case "renew":
                assert current.renew(drawn.randint(1, 3)).is_success
                current.restart()
            case "lost":
                yard.later(61)
            case "back":
                yard.say(current.job, "fail", code="x", message="", again=True)
            case "end" if current.record.charged == STEPS and not current.died:
                current.record.end()
                assert yard.complete(current.job, current.record).json()["state"] == "settled"
    ended = yard.run(run)
    taken_steps = [item for sim in everybody for item in sim.steps]
    assert len({step for step, _ in taken_steps}) == len(taken_steps)
    assert len({key for _, key in taken_steps}) == len(taken_steps)
    if ended["state"] in ("settled", "failed"):
        assert yard.charged(run) == ("settled", STEPS)
    else:
        granted = ended["steps"]["granted"]
        assert all(step < granted for step, _ in taken_steps)
        yard.ask("POST", f"/v1/runs/{run['id']}/cancel", "submit", {})
        yard.later(61)
    return len(everybody), ended["state"]
