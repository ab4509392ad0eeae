"""A certificate's curves over HTTP: those of the command line, computed once, or a problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from affidavit.assessment import (
    Curves,
    curves,
)
from affidavit.plan import plan_from
from affidavit.service.core.errors import AccountingTimeout
from affidavit.service.core.pool import AccountingPool

Make = Callable[..., dict[str, Any]]


def test_the_curves_are_those_of_the_plan(client: TestClient, plan: Make, post: Any) -> None:
    certificate = post(client, plan()).headers["location"]
    answer = client.get(f"{certificate}/curve")
    result = curves(plan_from(plan()))
    assert isinstance(result, Curves)
    assert answer.status_code == 200
    assert answer.json() == result.as_document()


def test_a_question_left_open_is_answered_as_it_was(
    client: TestClient, plan: Make, post: Any
) -> None:
    certificate = post(client, plan(releases=[{"name": "all", "clip_norm": 1}]))
    answer = client.get(f"{certificate.headers['location']}/curve").json()
    (at_target,) = [item for item in answer["epsilon_at_delta"] if item["delta"] == 1e-5]
    assert at_target["epsilon"] == certificate.json()["epsilon"]


def test_a_refused_plan_has_no_curve_and_says_why(
    client: TestClient, plan: Make, post: Any
) -> None:
    certificate = post(client, plan(target={"epsilon": 8, "delta": 0.5}))
    assert certificate.json()["verdict"] == "refused"
    answer = client.get(f"{certificate.headers['location']}/curve")
    assert answer.status_code == 404
    assert answer.json()["code"] == "no_curve"
    assert [item["code"] for item in answer.json()["reasons"]] == ["large_delta"]


def test_they_are_computed_once(
    client: TestClient, plan: Make, post: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = post(client, plan()).headers["location"]
    first = client.get(f"{certificate}/curve").text

    def never(*_: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(AccountingPool, "_run", never)
    assert client.get(f"{certificate}/curve").text == first


def test_accounting_that_is_cut_off_is_a_503_and_may_be_asked_again(
    client: TestClient, plan: Make, post: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = post(client, plan()).headers["location"]

    async def cut_off(*_: Any) -> None:
        raise AccountingTimeout("killed after 1 s")

    with monkeypatch.context() as patched:
        patched.setattr(AccountingPool, "run_long", cut_off)
        answer = client.get(f"{certificate}/curve")
        assert (answer.status_code, answer.json()["code"]) == (503, "accounting_timeout")
    assert client.get(f"{certificate}/curve").status_code == 200
