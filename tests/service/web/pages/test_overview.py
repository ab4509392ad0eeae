"""The first page says what needs somebody, however much else there is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.runs.conftest import Yard
from tests.support.page_views import page_views
from tests.support.run_records import Record

Monkey = pytest.MonkeyPatch


def _view(yard: Yard, path: str, who: str = "audit") -> Any:
    """What a page is rendered from."""
    with page_views() as views:
        answer = yard.ask("GET", path, who, accept="text/html")
    assert answer.is_success, answer.text
    return views[-1]


def _overview(yard: Yard) -> Any:
    return _view(yard, "/")


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
    view = _view(yard, "/datasets/toy")
    assert [run["run_id"] for run in view["not_conformant"]] == [wrong["id"]]
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
    totals = view["totals"]
    assert (totals["certified"], totals["not_certified"], totals["runs"]) == (4, 0, 0)
    assert [week[1] for week in totals["by_week"]] == [0] * 11 + [4]
    decision = {"envelope": yard.ask("GET", f"/v1/certificates/{waiting}", "audit").json()}
    decision["envelope"] = decision["envelope"]["certificate"]["envelope_digest"]
    path = f"/v1/certificates/{waiting}/approvals"
    assert yard.ask("POST", path, "approve", decision).is_success
    assert _overview(yard)["totals"]["certified"] == 4  # its second issue is no further plan


def test_an_incomplete_search_is_stated(yard: Yard, monkeypatch: Monkey) -> None:
    monkeypatch.setattr("affidavit.service.web.pages.overview.MAX_SEARCHED", 2)
    policy = {"schema_version": 1, "name": "rules", "version": 1, "datasets": ["toy"]}
    yard.ask("POST", "/v1/policies", "admin", {**policy, "valid_days": 9, "approvals": 1})
    for steps in range(20, 23):
        yard.ask("POST", "/v1/certificates", "submit", yard.document(steps=steps))
    view = _overview(yard)
    assert view["expiring"] == []
    assert view["more_expiring"]
    page = yard.ask("GET", "/", "audit", accept="text/html").text
    assert "Not all certificates were searched." in page


def test_a_search_has_what_the_reader_may_see(yard: Yard) -> None:
    certificate = yard.certify()
    run = yard.request(certificate).json()["id"]

    def hits(text: str, who: str) -> set[str]:
        headers = {"authorization": f"Bearer {yard.tokens[who]}"}
        with page_views() as views:
            answer = yard.client.get(
                "/search", params={"q": text}, headers=headers, follow_redirects=False
            )
        if answer.status_code == 303:  # there is one
            return {answer.headers["location"]}
        return {item["path"] for item in views[-1]["hits"]}

    name = yard.document()["name"]
    assert f"/certificates/{certificate}" in hits(name[:3], "audit")
    assert hits(certificate[:20], "audit") == {f"/certificates/{certificate}"}
    assert "/datasets/toy" in hits("to", "audit")
    assert hits(run[:13], "audit") == {f"/runs/{run}"}
    assert "/audit" in hits("aud", "audit")
    # A worker may not see certificates, nor the log.
    assert hits(certificate[:20], "work") == set()
    assert hits("aud", "work") == set()
    for text in ("%", "_", "\u202e", "'", "sha256:", " "):
        assert isinstance(hits(text, "audit"), set)
    opened = yard.ask("GET", f"/search?q={run}", "audit", accept="text/html")
    assert opened.url.path == f"/runs/{run}"
