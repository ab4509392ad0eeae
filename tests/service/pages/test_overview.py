"""The first page says what needs somebody, however much else there is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.runs.conftest import Yard
from tests.service.runs.records import Record

Monkey = pytest.MonkeyPatch


def _overview(yard: Yard) -> Any:
    return yard.ask("GET", "/overview.json", "audit").json()


def test_runs_that_do_not_conform_are_listed_before_other_failures(yard: Yard) -> None:
    certificate = yard.certify()
    wrong = yard.request(certificate).json()
    job = yard.claim()
    yard.start(job)
    record = Record(yard.predicate(job))
    for _ in range(11):
        record.step()
    yard.complete(job, record.end())
    for _ in range(2):
        yard.request(certificate)
        job = yard.claim()
        yard.start(job)
        yard.say(job, "fail", code="trainer_died", message="killed")
    codes = [item["code"] for item in _overview(yard)["failed"]]
    assert codes == ["not_conformant", "trainer_died", "trainer_died"]
    # What it was charged bounds nothing, and its data set says so.
    view = yard.ask("GET", "/datasets/toy.json", "audit").json()
    assert view["not_conformant"] == [wrong["id"]]
    page = yard.ask("GET", f"/runs/{wrong['id']}", "audit", accept="text/html").text
    assert "the run may have spent more" in page


def test_certificates_awaiting_approval_are_listed(yard: Yard) -> None:
    policy = {"schema_version": 1, "name": "rules", "version": 1, "datasets": ["toy"]}
    yard.ask("POST", "/v1/policies", "admin", {**policy, "approvals": 1})
    waiting = yard.certify()
    yard.ask("POST", "/v1/policies", "admin", {**policy, "version": 2})
    for steps in range(20, 23):
        yard.ask("POST", "/v1/certificates", "submit", yard.document(steps=steps))
    view = _overview(yard)
    assert [item["id"] for item in view["awaiting"]] == [waiting]
    assert view["expiring"] == []
    assert not view["more_expiring"]


def test_an_incomplete_search_is_stated(yard: Yard, monkeypatch: Monkey) -> None:
    monkeypatch.setattr("affidavit.service.pages.overview.LOOKED_AT", 2)
    policy = {"schema_version": 1, "name": "rules", "version": 1, "datasets": ["toy"]}
    yard.ask("POST", "/v1/policies", "admin", {**policy, "valid_days": 9, "approvals": 1})
    for steps in range(20, 23):
        yard.ask("POST", "/v1/certificates", "submit", yard.document(steps=steps))
    view = _overview(yard)
    assert view["expiring"] == []
    assert view["more_expiring"]
    page = yard.ask("GET", "/", "audit", accept="text/html").text
    assert "Some certificates were not searched." in page
