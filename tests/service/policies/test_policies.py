"""Policies over HTTP: what is active judges, is signed and logged, and cannot be slipped in."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import create_engine, insert, text
from sqlalchemy.exc import DatabaseError

from affidavit.certificate import prove_certificate, verify
from affidavit.certificate.policy import BUILT_IN, Waiver, open_document, policy_from
from affidavit.service.core.database import writer
from affidavit.service.identity.actor import CommandContext
from affidavit.service.policies.store import insert_policy, insert_waiver
from affidavit.trust import (
    KeyStore,
    PublicKey,
    SigningKey,
    format_instant,
)
from tests.service.conftest import ON_SQLITE
from tests.support.trust import trusting

Document = Callable[..., dict[str, Any]]


def statement(answer: Any) -> dict[str, Any]:
    """The predicate that an answer's bundle signs."""
    payload = answer.json()["certificate"]["bundle"]["envelope"]["payload"]
    result: dict[str, Any] = json.loads(base64.b64decode(payload))["predicate"]
    return result


def code(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


def test_an_activated_policy_is_signed_logged_and_listed(house: Any, policy: Document) -> None:
    answer = house.ask("ada", "POST", "/v1/policies", policy(epsilon_cap=0.5))
    assert answer.status_code == 201
    created = answer.json()
    digest = policy_from(policy(epsilon_cap=0.5)).digest()
    assert (created["name"], created["version"], created["digest"]) == ("toys", 1, digest)
    assert (created["active"], created["created_by"]) == (True, "token:ada")
    (public,) = KeyStore(house.settings.key_directory).public_keys()
    assert (
        open_document("policy", json.dumps(created["envelope"]).encode(), public)
        == created["policy"]
    )
    (entry,) = house.entries("policy")
    assert (entry["subject"], entry["actor"]) == (digest, "token:ada")
    assert entry["body"]["policy"] == created["policy"]

    listed = house.ask("ann", "GET", "/v1/policies").json()["items"]
    assert [(item["name"], item["active"]) for item in listed] == [
        ("toys", True),
        ("default", True),
    ]
    one = house.ask("sam", "GET", "/v1/policies/toys/1")
    assert one.json() == created
    built_in = house.ask("sam", "GET", f"/v1/policies/default/{BUILT_IN.version}").json()
    assert (built_in["policy"], built_in["envelope"]) == (BUILT_IN.as_document(), None)
    assert code(house.ask("sam", "GET", "/v1/policies/toys/2")) == (404, "not_found")
    assert code(house.ask("sam", "GET", "/v1/policies/a b/1")) == (422, "invalid_parameter")


@ON_SQLITE
def test_yaml_is_taken_and_the_same_policy_again_changes_nothing(house: Any) -> None:
    house.activate(epsilon_cap=0.5)
    raw = b"schema_version: 1\nname: toys\nversion: 1\ndatasets: [toy]\nepsilon_cap: 0.5\n"
    yaml = {"content-type": "application/yaml"}
    again = house.ask("ada", "POST", "/v1/policies", raw, headers=yaml)
    assert again.status_code == 200
    assert len(house.entries("policy")) == 1


@ON_SQLITE
def test_plans_are_judged_by_the_policy_of_their_data_set(house: Any, plan: Document) -> None:
    before = house.submit("sam", plan())
    assert before.json()["policy"] == BUILT_IN.reference()
    created = house.activate(epsilon_cap=0.5, adjacencies=["zero_out"])

    after = house.submit("sam", plan())
    assert (before.status_code, after.status_code) == (201, 201)
    result = after.json()
    assert result["verdict"] == "refused"
    assert [item["code"] for item in result["reasons"]] == [
        "policy_adjacency",
        "policy_epsilon_cap",
    ]
    assert result["epsilon"] == before.json()["epsilon"]
    assert result["policy"] == {key: created[key] for key in ("name", "version", "digest")}
    assert result["certificate"]["id"] != before.json()["certificate"]["id"]
    stated = statement(after)
    assert (stated["verdict"], stated["policy"]) == ("refused", result["policy"])
    assert stated["guarantee"]["epsilon"] == statement(before)["guarantee"]["epsilon"]
    bundle = house.ask("sam", "GET", f"{after.headers['location']}/bundle").content
    verify(bundle, trusting(KeyStore(house.settings.key_directory).public_keys()))

    elsewhere = house.submit("sam", plan(dataset={"name": "other", "size": 1000}))
    nameless = house.submit("sam", plan(dataset={"size": 1000}))
    for answer in (elsewhere, nameless):
        assert answer.json()["verdict"] == "certified"
        assert answer.json()["policy"] == BUILT_IN.reference()


def test_a_new_version_asks_anew_and_the_old_certificate_stays(house: Any, plan: Document) -> None:
    house.activate(epsilon_cap=0.5)
    refused = house.submit("sam", plan())
    house.activate(version=2, epsilon_cap=3, valid_days=7)
    certified = house.submit("sam", plan())
    assert (refused.json()["verdict"], certified.json()["verdict"]) == ("refused", "certified")
    assert (refused.status_code, certified.status_code) == (201, 201)
    assert house.submit("sam", plan()).status_code == 200
    stored = house.ask("sam", "GET", refused.headers["location"]).json()
    assert stored["policy"]["version"] == 1
    stated = statement(certified)
    assert stated["policy"]["version"] == 2
    assert stated["validity"]["not_after"][:4].isdigit()
    listed = house.ask("sam", "GET", "/v1/policies").json()["items"]
    assert [(item["version"], item["active"]) for item in listed[:2]] == [(2, True), (1, False)]


@ON_SQLITE
def test_a_default_policy_is_for_what_no_other_names(house: Any, plan: Document) -> None:
    house.activate(name="everything", datasets="default", epsilon_cap=0.5)
    house.activate(epsilon_cap=3)
    assert house.submit("sam", plan()).json()["policy"]["name"] == "toys"
    for dataset in ({"name": "other", "size": 1000}, {"size": 1000}):
        result = house.submit("sam", plan(dataset=dataset)).json()
        assert (result["policy"]["name"], result["verdict"]) == ("everything", "refused")
    house.activate(version=2, datasets=[])
    assert house.submit("sam", plan()).json()["policy"]["name"] == "everything"
    listed = house.ask("sam", "GET", "/v1/policies").json()["items"]
    assert (listed[-1]["name"], listed[-1]["active"]) == ("default", False)


@ON_SQLITE
def test_no_policy_lets_pass_what_accountancy_refuses(house: Any, plan: Document) -> None:
    house.activate(epsilon_cap=1000, allow_large_delta=True)
    unsound = house.submit("sam", plan(optimizer={"name": "dp_dice"})).json()
    under_noised = house.submit("sam", plan(target={"epsilon": 0.01, "delta": 1e-5})).json()
    assert (unsound["verdict"], under_noised["verdict"]) == ("refused", "under_noised")


@ON_SQLITE
def test_approvals_that_a_policy_asks_for_stand_in_the_certificate(
    house: Any, plan: Document
) -> None:
    house.activate(approvals=2)
    result = house.submit("sam", plan()).json()
    assert result["certificate"]["status"] == "awaiting_approval"
    assert statement(house.submit("sam", plan()))["approvals"]["required"] == 2


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"version": 2}, 409, "policy_version"),
    ({"name": "default"}, 409, "policy_name_reserved"),
    ({"epsilon_cap": -1}, 400, "malformed_policy"),
    ({"epsilon_cup": 1}, 400, "malformed_policy"),
    ({"schema_version": 2}, 400, "malformed_policy"),
]


@ON_SQLITE
def test_a_policy_that_cannot_stand_is_refused_and_nothing_is_kept(
    house: Any, policy: Document
) -> None:
    for changes, status, expected in REFUSED:
        answer = house.ask("ada", "POST", "/v1/policies", policy(**changes))
        assert code(answer) == (status, expected)
        assert answer.json()["reasons"][0]["remedy"]
    assert code(house.ask("ada", "POST", "/v1/policies", b"{")) == (400, "malformed_policy")
    html = {"content-type": "text/html"}
    assert house.ask("ada", "POST", "/v1/policies", b"", headers=html).status_code == 415
    assert house.ask("ada", "POST", "/v1/policies", b" " * 2_000_000).status_code == 413
    assert house.entries("policy") == []
    listed = house.ask("sam", "GET", "/v1/policies").json()["items"]
    assert [item["name"] for item in listed] == ["default"]


def test_versions_have_no_gap_and_no_data_set_has_two_policies(
    house: Any, policy: Document
) -> None:
    house.activate(datasets=["toy", "doll"])
    for changes, expected in (
        ({"epsilon_cap": 1}, "policy_version"),
        ({"version": 3}, "policy_version"),
        ({"name": "dolls", "datasets": ["doll"]}, "policy_overlap"),
    ):
        answer = house.ask("ada", "POST", "/v1/policies", policy(**changes))
        assert code(answer) == (409, expected)
    house.activate(version=2)
    house.activate(name="dolls", datasets=["doll"])
    house.activate(name="rest", datasets="default")
    second = policy(name="rest-too", datasets="default")
    assert code(house.ask("ada", "POST", "/v1/policies", second)) == (409, "policy_overlap")
    old = house.ask("ada", "POST", "/v1/policies", policy(datasets=["toy", "doll"]))
    assert code(old) == (409, "policy_version")


# ---- the database is not trusted -----------------------------------------------------------


def test_rows_cannot_be_changed_or_replaced(house: Any) -> None:
    house.activate(epsilon_cap=0.5)
    attacks = [
        "UPDATE policies SET digest = 'x'",
        "DELETE FROM policies",
        "DELETE FROM policies WHERE version = 1",
    ]
    if house.engine.dialect.name == "sqlite":
        columns = "name, version, digest, envelope, key_id, created_by, created_at"
        attacks.append(
            f"INSERT OR REPLACE INTO policies ({columns}) SELECT {columns} FROM policies"
        )
    else:
        attacks += ["TRUNCATE policies CASCADE", "TRUNCATE waiver_uses"]
    # A stranger's connection, without the settings of ours.
    stranger = create_engine(house.settings.database_url)
    for attack in attacks:
        with pytest.raises(DatabaseError, match="append-only"), stranger.begin() as connection:
            connection.execute(text(attack))
    stranger.dispose()


def laxer(envelope: bytes) -> bytes:
    """The envelope with a payload whose cap is higher, and the signature that it had."""
    document = json.loads(envelope)
    stated = json.loads(base64.b64decode(document["payload"]))
    stated["predicate"]["epsilon_cap"] = 1000
    changed = policy_from(stated["predicate"])
    stated["subject"][0]["digest"]["sha256"] = changed.digest().removeprefix("sha256:")
    document["payload"] = base64.b64encode(json.dumps(stated).encode()).decode()
    return json.dumps(document).encode()


@pytest.mark.ordinary("sqlite-name", "postgresql-envelope", "sqlite-digest", "postgresql-key")
@pytest.mark.parametrize("what", ["digest", "envelope", "name", "key"])
def test_a_policy_row_that_was_changed_is_noticed_and_nothing_is_certified(
    house: Any, plan: Document, what: str
) -> None:
    """By the database's owner, with the triggers dropped."""
    created = house.activate(epsilon_cap=0.5)
    raw = laxer(json.dumps(created["envelope"]).encode())
    other = policy_from({**created["policy"], "epsilon_cap": 1000}).digest()
    if what == "key":
        stranger = KeyStore(house.settings.key_directory.parent / "stranger").new("stranger")
        record = json.dumps(stranger.public.as_record())
        house.tamper(
            "signing_keys",
            "INSERT INTO signing_keys (key_id, record, first_used_at) SELECT :k, :r, first_used_at "
            "FROM signing_keys LIMIT 1",
            k=stranger.key_id,
            r=record,
        )
        house.tamper("policies", "UPDATE policies SET key_id = :k", k=stranger.key_id)
    else:
        change = {
            "digest": "digest = :d",
            "envelope": "envelope = :e, digest = :d",
            "name": "name = 'other'",
        }[what]
        values = {
            key: value for key, value in {"d": other, "e": raw}.items() if f":{key}" in change
        }
        house.tamper("policies", f"UPDATE policies SET {change}", **values)
    house.restarted()
    answer = house.ask("sam", "POST", "/v1/certificates", plan())
    assert code(answer) == (503, "policy_altered")
    for who, path in (("sam", "/v1/policies"), ("ann", "/v1/policies")):
        assert code(house.ask(who, "GET", path)) == (503, "policy_altered")
    assert house.entries("certificate") == house.entries("refusal") == []
    assert house.client.get("/livez").status_code == 200


@pytest.mark.parametrize("what", ["policy", "waiver"])
def test_what_a_stranger_signed_and_only_the_database_has_certifies_nothing(
    house: Any, plan: Document, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever inserts rows can insert a key of their own."""
    strict = policy_from(house.activate(epsilon_cap=0.5)["policy"])
    monkeypatch.setattr(
        "affidavit.service.policies.store.insert_logged",
        lambda connection, table, row, _entry: connection.execute(insert(table), row),
    )
    at, stranger = datetime.now(UTC).replace(microsecond=0), SigningKey.generate("stranger")
    with writer(house.engine).begin() as connection:
        if what == "policy":
            laxer = policy_from({**strict.as_document(), "version": 2, "epsilon_cap": 1000})
            call = CommandContext(actor="token:ada", at=at)
            insert_policy(connection, laxer, stranger, call)
        else:
            waiver = Waiver(
                rule="policy_epsilon_cap",
                policy=strict.digest(),
                dataset="toy",
                owner="sam",
                reason="why not",
                created_by="token:amy",
                created_at=format_instant(at),
                expires_at=format_instant(at + timedelta(days=1)),
            )
            insert_waiver(connection, waiver, "default", stranger, at)
    shown = "policies" if what == "policy" else "waivers"
    assert code(house.ask("ann", "GET", f"/v1/{shown}")) == (503, "policy_altered")
    assert code(house.ask("sam", "POST", "/v1/certificates", plan())) == (503, "policy_altered")


@ON_SQLITE
def test_the_newest_version_is_the_one_that_says_so(house: Any, plan: Document) -> None:
    """Not the row with the highest number, which is not signed."""
    house.activate()
    house.activate(version=2, epsilon_cap=0.5)
    house.tamper("policies", "UPDATE policies SET id = id + 9 WHERE version = 1")
    house.restarted()
    assert house.submit("sam", plan()).json()["verdict"] == "refused"


@ON_SQLITE
def test_the_record_of_a_key_in_the_database_does_not_count_before_the_directorys(
    house: Any, plan: Document
) -> None:
    """A stranger who signs a laxer policy and rewrites the key's record is not believed."""
    house.activate(epsilon_cap=0.5)
    public: PublicKey = KeyStore(house.settings.key_directory).public_keys()[0]
    stranger = KeyStore(house.settings.key_directory.parent / "stranger").new("stranger")
    record = {**stranger.public.as_record(), "key_id": public.key_id}
    house.tamper("signing_keys", "UPDATE signing_keys SET record = :r", r=json.dumps(record))
    house.restarted()
    assert house.submit("sam", plan()).json()["verdict"] == "refused"


@ON_SQLITE
def test_a_policy_that_asks_for_a_proof_has_one_signed_or_refuses(
    house: Any, plan: Document
) -> None:
    house.activate(proof="required")
    proved = house.submit("sam", plan())
    assert proved.json()["verdict"] == "certified"
    assert prove_certificate(statement(proved)).theorems == ("gaussian",)
    page = house.ask("sam", "GET", proved.headers["location"].removeprefix("/v1"))
    assert "affidavit verify --prove" in page.text
    metric = {"kind": "laplace", "name": "count", "noise_multiplier": 20.0}
    refused = house.submit("sam", plan(extra=[metric])).json()
    assert (refused["verdict"], [item["code"] for item in refused["reasons"]]) == (
        "refused",
        ["policy_proof"],
    )
    assert "no_statement" in refused["reasons"][0]["message"]
