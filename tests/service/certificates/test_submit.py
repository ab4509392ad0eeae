"""POST /v1/certificates: what is answered, and what is kept of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import create_engine, select

from affidavit.certificate import verify
from affidavit.plan import parse_plan
from affidavit.service.settings import Settings
from affidavit.service.tables.certificates import certificates, requests
from affidavit.trust import KeyStore, PublicKey
from tests.support.trust import trusting

Plan = Callable[..., dict[str, Any]]
Post = Callable[..., Any]

YAML_PLAN = b"""
version: 1
name: quick
dataset: {name: toy, size: 1000}
adjacency: add_remove
sampling: {scheme: full_batch}
steps: 10
releases: [{name: all, clip_norm: 1.0, noise_multiplier: 2e1}]
target: {epsilon: 8.0, delta: 1e-5}
"""


@pytest.fixture
def rows(settings: Settings) -> Iterator[Callable[[Any], list[Any]]]:
    """All rows of a table, read on a connection of our own."""
    engine = create_engine(settings.database_url)

    def read(table: Any) -> list[Any]:
        with engine.connect() as connection:
            return list(connection.execute(select(table)).mappings())

    yield read
    engine.dispose()


def test_a_new_plan_is_certified_with_201_and_kept_with_its_request(
    client: TestClient, plan: Plan, post: Post, rows: Any
) -> None:
    raw = json.dumps(plan()).encode()
    answer = post(client, raw)
    assert answer.status_code == 201
    assert answer.headers["content-type"] == "application/json"
    result = answer.json()
    assert result["verdict"] == "certified"
    identity = result["certificate"]["id"]
    assert answer.headers["location"] == f"/v1/certificates/{identity}"

    (row,) = rows(certificates)
    assert (row["id"], row["verdict"], row["name"]) == (identity, "certified", "quick")
    assert (row["dataset"], row["adjacency"], row["untrusted"]) == ("toy", "add_remove", False)
    assert row["epsilon_upper"] == result["epsilon"]["upper"]
    stored, stated = json.loads(row["result"]), answer.json()
    placed = {key: stated["certificate"].pop(key) for key in ("issue", "envelope_digest", "status")}
    assert stated == stored
    assert placed["envelope_digest"] == row["envelope_digest"]
    assert (placed["issue"], placed["status"]) == (row["issue"], "active") == (1, "active")
    (requested,) = rows(requests)
    assert (requested["body"], requested["content_type"]) == (raw, "application/json")
    assert requested["requester"] == "anonymous@loopback"
    assert (requested["certificate_id"], requested["issue"]) == (identity, 1)


def test_a_known_plan_is_answered_with_200_and_the_same_bytes(
    client: TestClient, plan: Plan, post: Post, rows: Any
) -> None:
    first, second = post(client, plan()), post(client, plan())
    assert (first.status_code, second.status_code) == (201, 200)
    assert second.content == first.content
    assert second.headers["location"] == first.headers["location"]
    assert len(rows(certificates)) == 1
    assert len(rows(requests)) == 2


@pytest.mark.parametrize(
    "syntax",
    ["application/yaml", "application/x-yaml", "text/yaml", "text/yaml; charset=UTF-8"],
)
def test_yaml_and_json_of_one_plan_are_one_certificate(
    client: TestClient, plan: Plan, post: Post, syntax: str
) -> None:
    by_json = post(client, plan())
    by_yaml = post(client, YAML_PLAN, syntax)
    assert (by_json.status_code, by_yaml.status_code) == (201, 200)
    assert by_yaml.content == by_json.content


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"target": {"epsilon": 0.01, "delta": 1e-5}}, "under_noised"),
        ({"target": {"epsilon": 8, "delta": 0.5}}, "refused"),
        ({"optimizer": {"name": "dp_dice"}}, "refused"),
    ],
)
def test_every_verdict_is_signed_and_kept(
    client: TestClient, settings: Settings, plan: Plan, post: Post, changes: Any, verdict: str
) -> None:
    answer = post(client, plan(**changes))
    assert answer.status_code == 201
    result = answer.json()
    assert result["verdict"] == verdict
    assert result["reasons"]
    bundle = client.get(f"{answer.headers['location']}/bundle")
    trusted = KeyStore(settings.key_directory).public_keys()
    statement = verify(bundle.content, trusting(trusted)).statement
    assert statement["predicate"]["verdict"] == verdict
    assert post(client, plan(**changes)).status_code == 200


def test_the_bundle_is_kept_byte_for_byte_and_verifies_offline(
    client: TestClient, plan: Plan, post: Post, rows: Any
) -> None:
    answer = post(client, plan())
    bundle = client.get(f"{answer.headers['location']}/bundle")
    assert bundle.status_code == 200
    (row,) = rows(certificates)
    # Once it has its place in the log, that is said after what was signed.
    assert bundle.content.startswith(row["bundle"].removesuffix(b"}"))
    assert bundle.json()["envelope"] == answer.json()["certificate"]["bundle"]["envelope"]
    published = [PublicKey.from_record(item) for item in client.get("/v1/keys").json()["keys"]]
    requested = parse_plan(json.dumps(plan()).encode(), "json")
    verify(bundle.content, trusting(published), plan=requested)


def test_get_answers_with_the_bytes_of_the_first_answer(
    client: TestClient, plan: Plan, post: Post
) -> None:
    answer = post(client, plan())
    assert client.get(answer.headers["location"]).content == answer.content


def test_requests_for_one_plan_at_once_are_accounted_once(
    client: TestClient, plan: Plan, post: Post, rows: Any
) -> None:
    pool = client.app.state.services.pool  # type: ignore[attr-defined]
    calls, original = [], pool.assess

    async def counted(asked: Any) -> Any:
        calls.append(asked)
        return await original(asked)

    pool.assess = counted
    with ThreadPoolExecutor(12) as callers:
        answers = list(callers.map(lambda _: post(client, plan()), range(12)))
    assert sorted(answer.status_code for answer in answers) == [200] * 11 + [201]
    assert len({answer.content for answer in answers}) == 1
    assert len(calls) == 1
    assert (len(rows(certificates)), len(rows(requests))) == (1, 12)


@pytest.mark.parametrize(
    "syntax", ["", "text/plain", "application/xml", "application/json; charset=latin-1"]
)
def test_another_content_type_is_415(
    client: TestClient, plan: Plan, post: Post, syntax: str
) -> None:
    answer = post(client, plan(), syntax)
    assert answer.status_code == 415
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "unsupported_media_type"


def test_no_content_type_and_a_compressed_body_are_415(client: TestClient) -> None:
    assert client.post("/v1/certificates", content=b"{}").status_code == 415
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert client.post("/v1/certificates", content=b"{}", headers=headers).status_code == 415


def test_without_a_key_every_certificate_says_untrusted_until_there_is_one(
    settings: Settings, plan: Plan, post: Post, tmp_path: Path, caplog: Any, client_of: Any
) -> None:
    bare = replace(settings, key_directory=tmp_path / "none")
    with client_of(bare) as client:
        assert "UNTRUSTED" in caplog.text
        assert client.get("/readyz").json()["signer"]["development"] is True
        first = post(client, plan())
        assert "untrusted" in [entry["code"] for entry in first.json()["warnings"]]
    with client_of(bare) as client:
        # Another process, another development key: the old bundle still has its key here.
        again = post(client, plan())
        assert (again.status_code, again.content) == (200, first.content)
        keys = [PublicKey.from_record(item) for item in client.get("/v1/keys").json()["keys"]]
        bundle = client.get(f"{again.headers['location']}/bundle").content
        signed_by = json.loads(bundle)["envelope"]["signatures"][0]["keyid"]
        assert signed_by in {key.key_id for key in keys if key.development}

        KeyStore(tmp_path / "none").new("real")
        trusted = post(client, plan())
        assert trusted.status_code == 201
        assert trusted.headers["location"] == first.headers["location"]
        assert "untrusted" not in [element["code"] for element in trusted.json()["warnings"]]
        assert client.get(first.headers["location"]).content == trusted.content
        assert post(client, plan()).status_code == 200
        assert client.get("/readyz").json()["signer"]["development"] is False
