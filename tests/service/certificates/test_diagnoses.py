"""``POST /v1/diagnoses``: information, answered as documented, and never stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from jsonschema import Draft202012Validator

Make = Callable[..., dict[str, Any]]
JSON = {"content-type": "application/json"}


@pytest.fixture
def fits(openapi: dict[str, Any]) -> Callable[[Any], None]:
    """Check an answer against what is documented for its status."""

    def check(answer: Any) -> None:
        documented = openapi["paths"]["/v1/diagnoses"]["post"]["responses"]
        content = documented[str(answer.status_code)]["content"][answer.headers["content-type"]]
        schema = {**content["schema"], "components": openapi["components"]}
        Draft202012Validator(schema).validate(answer.json())

    return check


def ask(client: TestClient, body: Any, headers: dict[str, str] = JSON) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post("/v1/diagnoses", content=content, headers=headers)


def test_a_claim_is_compared_with_its_plan_and_nothing_is_stored(
    client: TestClient, plan: Make, fits: Callable[[Any], None]
) -> None:
    right = ask(client, {"plan": plan(), "claimed_epsilon": 3})
    assert right.status_code == 200
    assert right.json()["answer"] == "holds"
    assert right.json()["explanations"] == [{"mistakes": ["none"]}]
    wrong = ask(client, {"plan": plan(), "claimed_epsilon": "0.16"})
    assert wrong.status_code == 200
    assert wrong.json()["answer"] == "refuted"
    assert wrong.json()["explanations"] != [{"mistakes": ["none"]}]
    assert wrong.json()["corrected"]["verdict"] == "certified"
    own = ask(client, {"plan": plan(claim="0.16")})
    assert own.json()["claim"] == wrong.json()["claim"]
    for answer in (right, wrong, own):
        fits(answer)
    assert client.get("/v1/certificates").json()["items"] == []


def test_a_claim_between_the_bounds_is_not_decided(
    client: TestClient, plan: Make, fits: Callable[[Any], None]
) -> None:
    shuffled = plan(
        adjacency="zero_out",
        sampling={"scheme": "shuffled", "lot_size": 100},
        releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": 2}],
        claim="1.8",
    )
    answer = ask(client, {"plan": shuffled})
    fits(answer)
    told = answer.json()
    bounds = told["certified"]["epsilon"]
    assert bounds["lower"] < 1.75 < 1.85 < bounds["upper"]
    assert (told["answer"], told["explanations"]) == ("not_decided", [])
    submitted = client.post("/v1/certificates", content=json.dumps(shuffled), headers=JSON).json()
    assert submitted["verdict"] == "unproved"
    assert [reason["code"] for reason in submitted["reasons"]] == ["claim_not_decided"]


def test_yaml_is_read_too(client: TestClient) -> None:
    body = b"""
plan:
  version: 1
  adjacency: add_remove
  sampling: {scheme: full_batch}
  steps: 10
  releases: [{name: all, clip_norm: 1, noise_multiplier: 20}]
  target: {epsilon: 8, delta: 1e-5}
claimed_noise_multiplier: 20
"""
    answer = ask(client, body, {"content-type": "application/yaml"})
    assert answer.json()["explanations"] == [{"mistakes": ["none"]}]


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ([], ""),
        ({}, "/plan"),
        ({"plan": 1, "claimed_epsilon": 1}, "/plan"),
        ({"plan": {"stepz": 1}, "claimed_epsilon": 1}, "/plan/"),
        ({"plan": {}, "claimed_epsilonn": 1}, "/claimed_epsilonn"),
        ({"plan": ..., "claimed_epsilon": True}, "/claimed_epsilon"),
        ({"plan": ..., "claimed_epsilon": "7,98"}, "/claimed_epsilon"),
        ({"plan": ..., "claimed_epsilon": -1}, "/claimed_epsilon"),
        ({"plan": ..., "claimed_epsilon": 1, "claimed_noise_multiplier": 1}, "/claimed_"),
        ({"plan": ...}, ""),
        (b'{"plan": {}, "claimed_epsilon": NaN}', "/claimed_epsilon"),
        (b"{", ""),
    ],
)
def test_a_malformed_question_is_a_400_that_says_where(
    reader: TestClient, plan: Make, fits: Callable[[Any], None], body: Any, pointer: str
) -> None:
    if isinstance(body, dict) and body.get("plan") is ...:
        body = {**body, "plan": plan()}
    answer = ask(reader, body)
    assert answer.status_code == 400
    fits(answer)
    assert any(item["pointer"].startswith(pointer) for item in answer.json()["reasons"])


def test_what_the_plan_leaves_open_is_told_too(client: TestClient, plan: Make) -> None:
    answer = ask(client, {"plan": plan(steps=None), "claimed_epsilon": 1})
    assert answer.status_code == 400
    assert answer.json()["reasons"][0]["code"] == "claim_unanswerable"
    assert answer.json()["reasons"][0]["pointer"] == "/plan/target"
