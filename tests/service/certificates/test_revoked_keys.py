"""A certificate whose key was revoked is not active, from the moment that the keyset says."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from affidavit.service.keys import keyring as keys
from tests.service.certificates.conftest import Company

Plan = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who signs is told of revoked keys once a second; these tests do not wait for it."""
    monkeypatch.setattr(keys, "FRESH_SECONDS", 0.0)


def test_it_shows_at_once_and_the_plan_sent_again_is_issued_again(
    company: Company, plan: Plan
) -> None:
    first = company.submit(plan()).json()
    assert first["certificate"]["status"] == "active"
    company.publish_revocation(datetime.now(UTC) - timedelta(days=1))
    assert company.current(first)["certificate"]["status"] == "key_revoked"
    where = "/v1/certificates?status="
    assert company.ask("bea", "GET", f"{where}active").json()["items"] == []
    (listed,) = company.ask("bea", "GET", f"{where}key_revoked").json()["items"]
    assert listed["id"] == first["certificate"]["id"]
    again = company.submit(plan())
    assert (again.status_code, again.json()["certificate"]["issue"]) == (201, 2)
    assert again.json()["certificate"]["status"] == "active"
    assert [issue["status"] for issue in company.issues(first)] == ["active", "superseded"]


def test_what_waits_for_approval_is_not_approved_any_more(
    company: Company, pending: dict[str, Any]
) -> None:
    company.publish_revocation(datetime.now(UTC) - timedelta(days=1))
    answer = company.decide("cem", pending)
    assert (answer.status_code, answer.json()["code"]) == (409, "not_awaiting_approval")


def test_a_revocation_in_the_future_is_not_one_yet(company: Company, plan: Plan) -> None:
    first = company.submit(plan()).json()
    company.publish_revocation(datetime.now(UTC) + timedelta(days=1))
    assert company.current(first)["certificate"]["status"] == "active"
    assert company.submit(plan()).status_code == 200
