"""The story of a run: asked for on a page, watched as it goes on, settled, and on the ledger."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.sample_company import Worker

pytestmark = pytest.mark.soak

PLAN = {
    "version": 1,
    "name": "quick",
    "dataset": {"name": "toy", "size": 1000},
    "adjacency": "add_remove",
    "sampling": {"scheme": "full_batch"},
    "steps": 10,
    "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 20}],
    "target": {"epsilon": 8, "delta": 1e-5},
}


@pytest.fixture(scope="module")
def worker(site: Any) -> Worker:
    admin = site.token("admin", "admin")
    budget = {"adjacency": "add_remove", "epsilon": 40, "delta": 1e-3}
    site.ask("POST", "/v1/ledgers/toy/budget", admin, json=budget)
    return Worker(site)


def _certificate(site: Any, token: str) -> str:
    result = site.ask("POST", "/v1/certificates", token, json=PLAN).json()
    return str(result["certificate"]["id"])


def _seen(visitor: Any, text: str) -> None:
    """Wait for a text: it comes by itself with scripts, and by looking again without."""
    if not visitor.kind.scripts:
        visitor.page.reload()
    visitor.page.locator("#live").get_by_text(text).first.wait_for()


def test_a_run_is_started_watched_and_settled(visitor: Any, site: Any, worker: Worker) -> None:
    page, token = visitor.page, site.token("dana", "submit", "audit")
    certificate = _certificate(site, token)
    visitor.sign_in(token, "/runs/new")
    page.select_option("#r-certificate", certificate)
    page.fill("#r-data", "digits:part=train")
    page.fill("#r-model", "mlp:8,seed=1")
    page.fill("#r-output", "../outside")
    if visitor.kind.scripts:
        page.press("#r-output", "Tab")
    else:
        page.click("text=Start run")
    page.locator("#r-output-wrong").get_by_text("Output").wait_for()
    page.fill("#r-output", "runs-of-today")
    page.click("text=Start run")
    visitor.sees("Waiting for a worker")
    job = worker.claim()
    _seen(visitor, "Claimed by w1")
    page.focus("#in-the-log")
    worker.say(job, "start", plan_digest=job["plan_digest"])
    worker.say(job, "heartbeat", steps=4)
    _seen(visitor, "Running on w1.")
    if visitor.kind.scripts:  # what comes by itself does not take the focus away
        assert page.evaluate("document.activeElement.id") == "in-the-log"
    visitor.sees("ε by step 4")
    visitor.look("run-under-way")
    worker.complete(job, 10)
    _seen(visitor, "The record conforms to the certificate")
    visitor.sees("of 10 certified steps charged")
    assert "Stop run" not in visitor.text()
    visitor.look("run-settled")
    visitor.goto("/datasets/toy")
    page.locator("#composed").get_by_text("≤").wait_for()
    visitor.sees("settled")
    visitor.look("dataset")


def test_a_failed_run_shows_its_code(visitor: Any, site: Any, worker: Worker) -> None:
    token = site.token("dana", "submit", "audit")
    requested = {
        "certificate": _certificate(site, token),
        "data": "d",
        "model": "m",
        "output": "o",
    }
    run = site.ask("POST", "/v1/runs", token, json=requested).json()
    job = worker.claim()
    worker.say(job, "start", plan_digest=job["plan_digest"])
    worker.say(job, "fail", code="trainer_died", message="killed for memory")
    visitor.sign_in(token, "/runs")
    visitor.sees("trainer died")
    visitor.look("runs")
    visitor.goto(f"/runs/{run['id']}")
    visitor.sees("killed for memory")
    visitor.sees("all certified steps are charged")
    visitor.look("run-failed")
