"""Searches: one run and one charge, whose number of trials the service draws and hides."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import text

from affidavit.evidence import SearchOpening
from affidavit.service.core.database import writer
from tests.service.runs.conftest import ON_SQLITE, Yard
from tests.support.run_records import record_of

SELECTION = {"kind": "repeat_and_select", "name": "s", "distribution": "geometric", "mean": 5}
SEARCH = {"choices": {"learning_rate": [0.1, 0.3]}, "score": "digits:part=test"}


def certified(yard: Yard) -> str:
    plan = {**yard.document(), "extra": [SELECTION]}
    answer = yard.ask("POST", "/v1/certificates", "submit", plan)
    assert answer.is_success, answer.text
    return str(answer.json()["certificate"]["id"])


@ON_SQLITE
def test_a_search_is_one_run_whose_draw_only_its_worker_learns(yard: Yard) -> None:
    certificate = certified(yard)
    assert yard.request(certificate).json()["code"] == "wrong_search"
    unknown = yard.request(certificate, search={**SEARCH, "choices": {"steps": [1]}})
    assert unknown.status_code == 400, unknown.text
    assert yard.request(certificate, search=SEARCH, time_limit=9).json()["code"] == "wrong_search"
    assert yard.request(yard.certify(), search=SEARCH).json()["code"] == "wrong_search"

    def begun() -> tuple[Any, Any, SearchOpening]:
        requested = yard.request(certificate, search=SEARCH)
        assert requested.status_code == 201, requested.text
        job = yard.claim()
        assert "search" not in job
        started = yard.start(job).json()
        assert yard.start(job).json()["search"] == started["search"]  # drawn once
        return requested.json(), job, SearchOpening.read(started["search"])

    run, job, opening = begun()
    assert (opening.certificate, dict(opening.choices)) == (
        certificate,
        {"learning_rate": (0.1, 0.3)},
    )
    (running,) = [event for event in yard.events(run) if event["kind"] == "running"]
    assert running["search"] == opening.digest
    shown = [yard.run(run), yard.events(run)]
    shown.append(yard.ask("GET", "/v1/log/entries?limit=200", "audit").text)
    assert opening.draw not in json.dumps(shown)
    steps = yard.predicate(job)["plan"]["steps"]
    settled = yard.complete(job, record_of(yard.predicate(job), steps, search=opening.digest))
    assert (settled.json()["state"], yard.charged(run)) == ("settled", ("settled", steps))

    for stated in ({}, {"search": opening.digest}):  # of no search, and of another
        run, job, other = begun()
        assert other.draw != opening.draw
        failed = yard.complete(job, record_of(yard.predicate(job), steps, **stated)).json()
        assert (failed["state"], failed["code"]) == ("failed", "not_conformant")
        assert "other_search" in failed["message"]
        assert yard.charged(run) == ("settled", steps)

    run, job, _ = begun()
    assert yard.later(100) == 1  # its worker is gone: no other number is drawn
    assert (yard.run(run)["state"], yard.charged(run)) == ("failed", ("settled", steps))

    run, job, other = begun()
    assert not yard.altered()
    with writer(yard.engine).begin() as connection:  # to a number of trials of somebody's choice
        connection.execute(
            text("UPDATE run_leases SET search = REPLACE(search, :drawn, :chosen)"),
            {"drawn": other.draw, "chosen": opening.draw},
        )
    assert yard.altered() == [f"runs {run['id']}"]
