"""A policy that wants a budget: refused without one, and judged anew once there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import text

from tests.service.conftest import ON_SQLITE

Document = Callable[..., dict[str, Any]]


def budget(house: Any, epsilon: float) -> None:
    document = {"unit": "example", "adjacency": "add_remove", "epsilon": epsilon, "delta": 1e-4}
    answer = house.ask("ada", "POST", "/v1/ledgers/toy/budget", document)
    assert answer.status_code in (200, 201), answer.text


def codes(answer: Any) -> list[str]:
    return [item["code"] for item in answer.json()["reasons"]]


def rows(house: Any, table: str) -> int:
    with house.engine.connect() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())


def test_a_refusal_for_want_of_a_budget_ends_when_there_is_one(house: Any, plan: Document) -> None:
    house.activate(budget="required")
    without = house.submit("sam", plan())
    assert (without.json()["verdict"], codes(without)) == ("refused", ["policy_budget"])
    assert "has no budget" in without.json()["reasons"][0]["message"]

    again = house.submit("sue", plan())
    assert (again.status_code, again.content) == (200, without.content)
    assert (rows(house, "certificates"), rows(house, "requests")) == (1, 2)

    budget(house, 0.1)
    exceeded = house.submit("sam", plan())
    assert (exceeded.status_code, codes(exceeded)) == (201, ["policy_budget"])
    assert "does not fit" in exceeded.json()["reasons"][0]["message"]

    budget(house, 5)
    passed = house.submit("sam", plan())
    assert (passed.status_code, passed.json()["verdict"]) == (201, "certified")
    assert passed.json()["certificate"]["id"] == without.json()["certificate"]["id"]
    assert passed.json()["certificate"]["issue"] == 3
    assert house.submit("sam", plan()).content == passed.content
    assert (len(house.entries("refusal")), len(house.entries("certificate"))) == (2, 1)


@ON_SQLITE
def test_a_plan_that_accountancy_refuses_is_not_told_of_a_budget(
    house: Any, plan: Document
) -> None:
    house.activate(budget="required")
    result = house.submit("sam", plan(target={"epsilon": 0.01, "delta": 1e-5}))
    assert (result.json()["verdict"], codes(result)) == ("under_noised", ["under_noised"])


@ON_SQLITE
def test_a_reservation_cannot_be_waived(house: Any) -> None:
    house.activate(budget="required")
    answer = house.waive(rule="policy_budget")
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed_waiver")
