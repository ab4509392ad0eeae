"""Simulation: what a draft would change is what it does change once it is active."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.service.conftest import ON_SQLITE

Document = Callable[..., dict[str, Any]]
OTHER = {"dataset": {"name": "other", "size": 1000}}


@pytest.fixture
def stocked(house: Any, plan: Document) -> Any:
    """Certificates of several kinds under the built-in policy."""
    for changes in (
        {},
        {"steps": 20},
        {"adjacency": "zero_out"},
        {"target": {"epsilon": 0.01, "delta": 1e-5}},
        {"optimizer": {"name": "dp_dice"}},
        OTHER,
        {"dataset": {"size": 1000}},
    ):
        house.submit("sam", plan(**changes))
    return house


def simulated(house: Any, document: dict[str, Any], query: str = "") -> dict[str, Any]:
    answer = house.ask("ann", "POST", f"/v1/policies/simulate{query}", document)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def test_a_simulation_says_what_activating_does(
    stocked: Any, plan: Document, policy: Document
) -> None:
    draft = policy(adjacencies=["add_remove"], epsilon_cap=0.8)
    result = simulated(stocked, draft)
    assert (result["judged"], result["next"]) == (5, None)
    told = {item["certificate_id"]: item for item in result["items"]}
    assert {entry["dataset"] for entry in told.values()} == {"toy"}

    stocked.ask("ada", "POST", "/v1/policies", draft)
    changed = 0
    for changes in (
        {},
        {"steps": 20},
        {"adjacency": "zero_out"},
        {"target": {"epsilon": 0.01, "delta": 1e-5}},
    ):
        now = stocked.submit("sam", plan(**changes)).json()
        path = f"/v1/certificates?plan_digest={now['plan_digest']}"
        stored = [element["id"] for element in stocked.ask("sam", "GET", path).json()["items"]]
        lines = [told[member] for member in stored if member in told]
        assert bool(lines) == (now["verdict"] == "refused")
        for line in lines:
            changed += 1
            assert (line["verdict"], line["would_be"]) == ("certified", "refused")
            # Only a submission computes what the cap needs, which its remedy says.
            told_now = [{**reason, "remedy": ""} for reason in now["reasons"]]
            assert [{**reason, "remedy": ""} for reason in line["reasons"]] == told_now
    assert changed == len(told) > 0


@ON_SQLITE
def test_nothing_is_kept_of_a_simulation(stocked: Any, policy: Document) -> None:
    simulated(stocked, policy(epsilon_cap=0.1, version=77))
    assert stocked.entries("policy") == []
    listed = stocked.ask("sam", "GET", "/v1/policies").json()["items"]
    assert [item["name"] for item in listed] == ["default"]


@ON_SQLITE
def test_a_draft_for_the_default_is_compared_with_what_no_policy_names(
    stocked: Any, policy: Document
) -> None:
    stocked.activate(epsilon_cap=100)
    result = simulated(stocked, policy(name="rest", datasets="default", epsilon_cap=0.01))
    assert result["judged"] == 2
    assert {item["dataset"] for item in result["items"]} == {"other", None}
    assert simulated(stocked, policy(name="none", datasets=[]))["judged"] == 0


@ON_SQLITE
def test_what_a_policy_refused_would_pass_a_laxer_one(
    house: Any, plan: Document, policy: Document
) -> None:
    house.activate(epsilon_cap=0.1)
    house.submit("sam", plan())
    (change,) = simulated(house, policy(version=2, epsilon_cap=3))["items"]
    assert (change["verdict"], change["would_be"], change["reasons"]) == (
        "refused",
        "certified",
        [],
    )


def test_pages_cover_everything_once(stocked: Any, policy: Document) -> None:
    draft = policy(epsilon_cap=1e-3)
    whole = simulated(stocked, draft)
    pages = [simulated(stocked, draft, "?limit=2")]
    while pages[-1]["next"] is not None:
        answer = stocked.ask("ann", "POST", pages[-1]["next"], draft)
        pages.append(answer.json())
    assert len(pages) == 4
    assert sum(page["judged"] for page in pages) == whole["judged"]
    assert [item for page in pages for item in page["items"]] == whole["items"]


@ON_SQLITE
def test_a_draft_that_could_not_be_active_is_refused(house: Any, policy: Document) -> None:
    house.activate()
    overlap = house.ask("ann", "POST", "/v1/policies/simulate", policy(name="b"))
    assert (overlap.status_code, overlap.json()["code"]) == (409, "policy_overlap")
    wrong = house.ask("ann", "POST", "/v1/policies/simulate", policy(epsilon_cap=0))
    assert (wrong.status_code, wrong.json()["code"]) == (400, "malformed_policy")
    for query in ("?limit=0", "?limit=201", "?cursor=x", "?page=1"):
        answer = house.ask("ann", "POST", f"/v1/policies/simulate{query}", policy())
        assert answer.status_code == 422, query
