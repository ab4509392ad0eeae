"""Runs against the jobs of an engine that fails: each is executed once or charged, never twice."""

from __future__ import annotations

import os
import random
import shlex
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from affidavit.service.dispatch import dispatcher as dispatcher_module
from affidavit.service.dispatch.dispatcher import Dispatcher
from affidavit.service.dispatch.engine import EngineUnavailable
from affidavit.service.runs.queue import MAX_FAILED_ATTEMPTS
from tests.service.dispatch.conftest import RayCluster, dispatcher_of
from tests.service.ledger_replay import replay
from tests.service.runs.conftest import ON_SQLITE, Yard
from tests.support.random_seeds import seeded

STEPS = 10
SEEDS = int(os.environ.get("AFFIDAVIT_HANDOVERS", "2"))
"""Random histories in each database; `make soak` takes more."""


def look(dispatcher: Dispatcher) -> None:
    dispatcher.reconcile(datetime.now(UTC))


def job_of(run: Any, number: int = 1) -> str:
    return f"affidavit-{run['id']}-{number}"


def options_of(cluster: RayCluster, job: str) -> dict[str, str]:
    words = shlex.split(cluster.entrypoints[job])
    assert words[:2] == ["affidavit", "worker"]
    options = words[2:]
    return dict(zip(options[::2], options[1::2], strict=True))


def claimed(yard: Yard, cluster: RayCluster, job: str) -> Any:
    """What the job's worker does first."""
    options = options_of(cluster, job)
    cluster.status[job] = "RUNNING"
    body = {"worker": options["--name"], "run": options["--run"]}
    path = f"/v1/queues/{options['--queue']}/claims"
    return yard.ask("POST", path, "work", body).json()


def test_a_run_is_handed_over_once_however_often_and_by_whomever(
    yard: Yard, cluster: RayCluster, dispatcher: Dispatcher
) -> None:
    run = yard.request(yard.certify()).json()
    assert not cluster.status  # the service may die here
    cluster.lose_answers = True
    look(dispatcher)
    cluster.lose_answers = False
    for replica in (dispatcher_of(yard, cluster), dispatcher):
        look(replica)
    assert cluster.active == [job_of(run)]
    assert options_of(cluster, job_of(run)) == {
        "--run": run["id"],
        "--queue": "default",
        "--name": job_of(run),
    }
    job = claimed(yard, cluster, job_of(run))
    assert claimed(yard, cluster, job_of(run)) is None  # handed over twice all the same
    yard.start(job)
    look(dispatcher)
    assert yard.complete(job, STEPS).json()["state"] == "settled"
    cluster.status[job_of(run)] = "SUCCEEDED"
    look(dispatcher)
    assert list(cluster.status) == [job_of(run)]
    assert yard.charged(run) == ("settled", STEPS)


@ON_SQLITE
def test_a_run_gets_several_hosts_only_where_an_engine_gives_them(yard: Yard) -> None:
    refused = yard.request(yard.certify(), requirements={"hosts": 2})
    assert (refused.status_code, refused.json()["code"]) == (422, "hosts_not_available")
    assert refused.json()["reasons"][0]["pointer"] == "/requirements/hosts"


@ON_SQLITE
def test_an_engine_that_is_away_delays_and_changes_nothing(
    yard: Yard, cluster: RayCluster, dispatcher: Dispatcher
) -> None:
    run = yard.request(yard.certify()).json()
    cluster.down = True
    with pytest.raises(EngineUnavailable):
        look(dispatcher)
    cluster.down = False
    look(dispatcher)
    job = claimed(yard, cluster, job_of(run))
    yard.start(job)
    cluster.forget()  # the head starts anew; its job goes on
    look(dispatcher)
    assert (cluster.active, yard.run(run)["state"]) == ([], "running")
    assert yard.complete(job, STEPS).json()["state"] == "settled"


@ON_SQLITE
def test_a_job_that_dies_loses_its_lease_at_once_and_another_goes_on(
    yard: Yard, cluster: RayCluster, dispatcher: Dispatcher
) -> None:
    run = yard.request(yard.certify()).json()
    look(dispatcher)
    lost = claimed(yard, cluster, job_of(run))
    yard.say(lost, "start", plan_digest=lost["plan_digest"], wants=0)
    assert yard.say(lost, "heartbeat", steps=0, wants=4).json()["granted"] == 4
    cluster.status[job_of(run)] = "FAILED"
    look(dispatcher)
    assert yard.run(run)["state"] == "queued"
    assert yard.say(lost, "heartbeat", steps=4, wants=9).json()["code"] == "lease_lost"
    look(dispatcher)
    assert cluster.active == [job_of(run, 2)]
    job = claimed(yard, cluster, job_of(run, 2))
    assert (job["fence"], job["granted"], job["previous"]) == (2, 4, 1)
    assert yard.charged(run) == ("committed", None)


@ON_SQLITE
def test_a_stuck_job_that_lost_its_lease_is_cancelled_and_another_goes_on(
    yard: Yard, cluster: RayCluster, dispatcher: Dispatcher
) -> None:
    run = yard.request(yard.certify()).json()
    look(dispatcher)
    claimed(yard, cluster, job_of(run))
    assert yard.later(61) == 1
    look(dispatcher)
    assert cluster.status[job_of(run)] == "STOPPED"
    assert cluster.active == [job_of(run, 2)]


@ON_SQLITE
def test_jobs_that_never_claim_their_run_are_given_up(
    yard: Yard, cluster: RayCluster, dispatcher: Dispatcher
) -> None:
    run = yard.request(yard.certify()).json()
    for _ in range(3 * MAX_FAILED_ATTEMPTS):
        look(dispatcher)
        for job in cluster.active:
            cluster.status[job] = "FAILED"
    assert len(cluster.status) == MAX_FAILED_ATTEMPTS
    ended = yard.run(run)
    assert (ended["state"], ended["code"]) == ("failed", "job_failed")
    assert yard.charged(run)[0] == "released"


@ON_SQLITE
def test_the_job_of_a_cancelled_run_is_cancelled(
    yard: Yard, cluster: RayCluster, dispatcher: Dispatcher
) -> None:
    run = yard.request(yard.certify()).json()
    look(dispatcher)
    assert yard.ask("POST", f"/v1/runs/{run['id']}/cancel", "submit", {}).is_success
    cluster.status["affidavit-of-somebody-else"] = "RUNNING"
    look(dispatcher)
    assert cluster.active == ["affidavit-of-somebody-else"]
    assert claimed(yard, cluster, job_of(run)) is None


@ON_SQLITE
def test_a_job_that_outlives_its_run_is_cancelled_when_its_lease_is_over(
    yard: Yard, cluster: RayCluster, dispatcher: Dispatcher
) -> None:
    run, stuck = (yard.request(yard.certify()).json() for _ in range(2))
    look(dispatcher)
    job = claimed(yard, cluster, job_of(run))
    yard.start(job)
    assert yard.complete(job, STEPS).json()["state"] == "settled"
    cluster.status[job_of(stuck)] = "RUNNING"  # and never claims its run
    assert yard.ask("POST", f"/v1/runs/{stuck['id']}/cancel", "submit", {}).is_success
    look(dispatcher)
    assert cluster.active == [job_of(run)]
    dispatcher.reconcile(datetime.now(UTC) + timedelta(seconds=61))
    assert cluster.active == []


@ON_SQLITE
def test_a_refused_job_shows_the_reason_and_ends_its_run_after_a_day(
    yard: Yard, cluster: RayCluster, dispatcher: Dispatcher
) -> None:
    yard.client.app.state.services.dispatcher = dispatcher
    run = yard.request(yard.certify()).json()
    began, cluster.refused = datetime.now(UTC), {job_of(run)}
    rounds = [timedelta(seconds=seconds) for seconds in (0, 1, 3, 4, 9)]
    attempts = []
    for later in rounds:
        before = cluster.attempts
        dispatcher.reconcile(began + later)
        attempts.append(cluster.attempts - before)
    assert attempts == [1, 0, 1, 0, 1]  # after pauses that grow
    assert "no node has these resources" in yard.run(run)["refusal"]
    page = yard.ask("GET", f"/runs/{run['id']}", "audit", accept="text/html")
    assert "no node has these resources" in page.text
    cluster.refused.clear()
    dispatcher.reconcile(began + timedelta(hours=3))
    assert (cluster.active, yard.run(run)["refusal"]) == ([job_of(run)], None)

    other = yard.request(yard.certify()).json()
    cluster.refused = {job_of(other)}
    for hours in range(3, 29):
        dispatcher.reconcile(began + timedelta(hours=hours, seconds=1))
    ended = yard.run(other)
    assert (ended["state"], ended["code"], ended["refusal"]) == ("failed", "job_refused", None)
    assert "no node has these resources" in ended["message"]
    assert yard.charged(other)[0] == "released"


@ON_SQLITE
def test_jobs_that_the_engine_refuses_or_never_starts_hold_up_no_others(
    yard: Yard, cluster: RayCluster, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "MAX_WAITING", 2)
    certificate, began = yard.certify(), datetime.now(UTC)
    runs = [yard.request(certificate).json() for _ in range(5)]
    cluster.refused = {job_of(run) for run in runs[:2]}
    dispatcher.reconcile(began)
    assert cluster.active == []
    dispatcher.reconcile(began + timedelta(seconds=2))
    assert cluster.active == [job_of(run) for run in runs[2:4]]
    dispatcher.reconcile(began + timedelta(seconds=9))
    assert len(cluster.active) == 2  # as many as may wait
    dispatcher.reconcile(began + timedelta(seconds=9) + dispatcher_module.STUCK_AFTER)
    assert job_of(runs[4]) in cluster.active
    yard.ask("POST", f"/v1/runs/{runs[2]['id']}/cancel", "submit", {})
    yard.ask("POST", f"/v1/runs/{runs[3]['id']}/cancel", "submit", {})
    cluster.refused = {job_of(runs[2])}
    dispatcher.reconcile(began + timedelta(hours=1))
    assert job_of(runs[2]) in cluster.active
    assert job_of(runs[3]) not in cluster.active


@ON_SQLITE
def test_thousands_of_jobs_are_compared_at_once(
    yard: Yard, cluster: RayCluster, dispatcher: Dispatcher
) -> None:
    run = yard.request(yard.certify()).json()
    look(dispatcher)
    yard.ask("POST", f"/v1/runs/{run['id']}/cancel", "submit", {})
    others = [f"affidavit-{uuid.uuid4()}-1" for _ in range(5_000)]
    cluster.status.update(dict.fromkeys(others, "PENDING"))
    look(dispatcher)
    assert cluster.active == others


@ON_SQLITE
def test_a_worker_that_is_no_job_is_left_alone(
    yard: Yard, cluster: RayCluster, dispatcher: Dispatcher
) -> None:
    run = yard.request(yard.certify()).json()
    look(dispatcher)
    job = yard.claim(run=run["id"])
    cluster.status[job_of(run)] = "SUCCEEDED"  # it found nothing to claim
    look(dispatcher)
    assert yard.start(job).json()["state"] == "running"


@pytest.mark.ordinary("sqlite")
def test_whatever_the_engine_does_a_run_is_executed_once_or_charged(
    yard: Yard, cluster: RayCluster, dispatcher: Dispatcher
) -> None:
    for seed in range(SEEDS):
        drawn = random.Random(seeded(seed))
        run = yard.request(yard.certify()).json()
        replicas, jobs = [dispatcher, dispatcher_of(yard, cluster)], []
        for _ in range(120):
            if yard.run(run)["state"] in ("settled", "failed"):
                break
            _step(yard, cluster, drawn, replicas, jobs)
        ended = yard.run(run)
        assert ended["state"] in ("settled", "failed"), ended
        settled = [job for job in jobs if job.get("settled")]
        assert len(settled) == (ended["state"] == "settled")
        state, charged = yard.charged(run)
        assert (state, charged) in (("settled", STEPS), ("released", None))
        granted = [job["granted"] for job in jobs]
        assert granted == sorted(granted)
    assert not replay(yard.engine)


def _step(
    yard: Yard,
    cluster: RayCluster,
    drawn: random.Random,
    replicas: list[Dispatcher],
    jobs: list[Any],
) -> None:
    match drawn.choice(
        ["look", "look", "claim", "claim", "die", "work", "work", "forget", "lease"]
    ):
        case "look":
            cluster.lose_answers = drawn.random() < 0.3
            look(drawn.choice(replicas))
        case "claim" if cluster.active:
            job = claimed(yard, cluster, drawn.choice(cluster.active))
            if job is not None:
                start = {"plan_digest": job["plan_digest"], "wants": 0}
                assert yard.say(job, "start", **start).is_success
                jobs.append(job)
        case "die" if cluster.active:
            cluster.status[drawn.choice(cluster.active)] = "FAILED"
        case "work" if jobs:  # the current one, or a zombie
            job = drawn.choice(jobs)
            if drawn.random() < 0.7:
                wants = job["granted"] + drawn.randint(1, 4)
                yard.say(job, "heartbeat", steps=job["granted"], wants=wants)
            elif job["granted"] == 0:
                job["settled"] = yard.complete(job, STEPS).json().get("state") == "settled"
        case "forget" if drawn.random() < 0.3:
            cluster.forget()
        case "lease" if drawn.random() < 0.5:
            yard.later(61)
