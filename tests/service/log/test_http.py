"""The log over HTTP: checkpoint, proofs, entries, and bundles that prove their place."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from affidavit.certificate import (
    SeenCheckpoint,
    VerificationOptions,
    verify,
)
from affidavit.service.audit.audit import audit
from affidavit.service.core.database import snapshot
from affidavit.service.settings import Settings
from affidavit.trust import (
    KeyStore,
    PublicKey,
    VerificationError,
)
from affidavit.trust.log import (
    merkle_tree,
    open_checkpoint,
    read_checkpoint,
    read_consistency,
)
from tests.support.polling import wait_until
from tests.support.trust import trusting

Client = Any


@pytest.fixture
def client(request: pytest.FixtureRequest, tmp_path: Path, client_of: Any) -> Iterator[Client]:
    """A service on SQLite, or where a test asks for it on ``database_url``."""
    kind = "database_url" if "database_url" in request.fixturenames else "sqlite_url"
    KeyStore(tmp_path / "keys").new("test")
    settings = Settings(
        database_url=request.getfixturevalue(kind),
        key_directory=tmp_path / "keys",
        workers=1,
        log_origin="example.com/log",
        loopback=True,
    )
    with client_of(settings) as result:
        yield result


@pytest.fixture
def certified(client: Client, plan: Any, post: Any) -> Callable[..., str]:
    """Certify a plan and wait until it stands in the log; the path of its certificate."""

    def certify(**changes: Any) -> str:
        location: str = post(client, plan(**changes)).headers["location"]
        wait_until(lambda: "log" in client.get(f"{location}/bundle").json())
        return location

    return certify


def keys(client: Client) -> list[PublicKey]:
    return [PublicKey.from_record(item) for item in client.get("/v1/keys").json()["keys"]]


def hashes(document: Any) -> list[bytes]:
    return [base64.b64decode(item) for item in document["hashes"]]


@pytest.mark.usefixtures("database_url")
def test_a_bundle_proves_its_place_offline(client: Client, certified: Any) -> None:
    locations = [certified(steps=number) for number in range(1, 6)]
    seen: dict[str, SeenCheckpoint] = {}
    for location in reversed(locations):
        raw = client.get(f"{location}/bundle").content
        options = VerificationOptions(require_log=True, log_origin="example.com/log", seen=seen)
        result = verify(raw, trusting(keys(client)), options=options)
        assert not {10, 11, 12} & set(result.unchecked)
        assert result.checkpoint is not None
        seen = {"example.com/log": SeenCheckpoint(result.checkpoint)}
        # The signed envelope stands in it byte for byte, and the whole is canonical.
        stored = client.get(location).json()["certificate"]["bundle"]
        assert json.loads(raw)["envelope"] == stored["envelope"]
        assert raw.startswith(
            json.dumps(stored, sort_keys=True, separators=(",", ":")).encode()[:-1]
        )


def test_refusals_are_logged_too(client: Client, certified: Any) -> None:
    certified(target={"epsilon": 0.01, "delta": 1e-5})
    (entry,) = client.get("/v1/log/entries").json()["items"]
    assert json.loads(entry["content"])["kind"] == "refusal"


def test_a_repeated_request_is_no_second_entry(
    client: Client, certified: Any, plan: Any, post: Any
) -> None:
    certified()
    assert post(client, plan()).status_code == 200
    certified(steps=7)
    assert len(client.get("/v1/log/entries").json()["items"]) == 2


def test_the_checkpoint_is_signed_by_a_published_key(client: Client, certified: Any) -> None:
    certified()
    answer = client.get("/v1/log/checkpoint")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    checkpoint, signers = open_checkpoint(answer.content, keys(client))
    assert (checkpoint.origin, checkpoint.size, len(signers)) == ("example.com/log", 1, 1)


def test_proofs_of_inclusion_for_every_leaf_and_size(client: Client, certified: Any) -> None:
    roots = {}
    for number in range(1, 6):
        certified(steps=number)
        checkpoint = read_checkpoint(client.get("/v1/log/checkpoint").content)
        roots[checkpoint.size] = checkpoint.root_hash
    entries = client.get("/v1/log/entries").json()["items"]
    for size, root in roots.items():
        for entry in entries[:size]:
            leaf = merkle_tree.leaf_hash(entry["content"].encode())
            assert base64.b64decode(entry["leafHash"]) == leaf
            for which in (f"index={entry['leafIndex']}", f"hash={leaf.hex()}"):
                answer = client.get(f"/v1/log/proof/inclusion?{which}&size={size}").json()
                assert (answer["leafIndex"], answer["treeSize"]) == (entry["leafIndex"], size)
                merkle_tree.verify_inclusion(
                    leaf,
                    index=entry["leafIndex"],
                    size=size,
                    proof=hashes(answer),
                    root=root,
                )
    for first, old in roots.items():
        for second, new in roots.items():
            path = f"/v1/log/proof/consistency?first={first}&second={second}"
            answer = client.get(path)
            if first > second:
                assert answer.status_code == 404
                continue
            proof = read_consistency(answer.json())
            merkle_tree.verify_consistency(
                first=first, second=second, first_root=old, second_root=new, proof=proof.hashes
            )


ABSENT = [
    ("proof/inclusion?index=1", 404, "not_logged"),
    ("proof/inclusion?index=0&size=2", 404, "not_logged"),
    ("proof/inclusion?hash=" + "0" * 64, 404, "not_logged"),
    ("proof/inclusion", 404, "not_logged"),
    ("proof/inclusion?index=0&size=0", 422, "invalid_parameter"),
    ("proof/inclusion?index=9007199254740992", 422, "invalid_parameter"),
    ("proof/inclusion?index=0&indeks=1", 422, "invalid_parameter"),
    ("proof/inclusion?hash=" + "A" * 64, 422, "invalid_parameter"),
    ("proof/consistency", 422, "invalid_parameter"),
    ("proof/consistency?first=0", 422, "invalid_parameter"),
    ("proof/consistency?first=-1", 422, "invalid_parameter"),
    ("proof/consistency?first=2", 404, "not_logged"),
    ("proof/consistency?first=1&second=2", 404, "not_logged"),
    ("entries?start=-1", 422, "invalid_parameter"),
    ("entries?end=x", 422, "invalid_parameter"),
]


def test_what_the_log_does_not_have(client: Client, certified: Any) -> None:
    certified()
    for path, status, code in ABSENT:
        answer = client.get(f"/v1/log/{path}")
        assert (answer.status_code, answer.json()["code"]) == (status, code), path


def test_entries_come_in_pages(
    client: Client, certified: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("affidavit.service.web.routes.log.PAGE_SIZE", 2)
    for number in range(1, 6):
        certified(steps=number)
    path, result = "/v1/log/entries?end=3", []
    while path is not None:
        page = client.get(path).json()
        assert len(page["items"]) <= 2
        result += [item["leafIndex"] for item in page["items"]]
        path = page["next"]
    assert result == [0, 1, 2, 3]
    assert client.get("/v1/log/entries?start=99").json() == {"items": [], "next": None}
    assert client.get("/v1/log/entries?start=3&end=1").json()["items"] == []


def test_a_damaged_log_answers_503_and_makes_the_service_not_ready(
    client: Client, certified: Any, plan: Any, post: Any
) -> None:
    location = certified()
    services = client.app.state.services
    with services.engine.begin() as connection:
        if connection.dialect.name == "sqlite":
            connection.execute(text("DROP TRIGGER log_leaves_refuse_update"))
        else:
            connection.execute(text("ALTER TABLE log_leaves DISABLE TRIGGER ALL"))
        connection.execute(text("UPDATE log_leaves SET leaf_hash = :x"), {"x": bytes(32)})
    answer = client.get("/v1/log/proof/inclusion?index=0")
    assert (answer.status_code, answer.json()["code"]) == (503, "log_damaged")
    services.safety._seconds = 0
    assert client.get("/readyz").status_code == 503
    assert client.get("/v1/status").status_code == 503
    refused = post(client, plan(steps=2))
    assert (refused.status_code, refused.json()["code"]) == (503, "writes_suspended")
    assert "retry-after" in refused.headers
    reasons = client.get("/readyz").json()["reasons"]
    assert [reason["code"] for reason in reasons] == ["log_damaged"]
    bundle = client.get(f"{location}/bundle")
    assert bundle.status_code == 200
    with pytest.raises(VerificationError, match="does not give the certificate's place"):
        verify(
            bundle.content, trusting(keys(client)), options=VerificationOptions(require_log=True)
        )


@pytest.mark.usefixtures("database_url")
def test_log_and_tables_say_the_same_after_all_this(client: Client, certified: Any) -> None:
    for changes in ({}, {"steps": 3}, {"target": {"epsilon": 0.01, "delta": 1e-5}}):
        certified(**changes)
    services = client.app.state.services
    with snapshot(services.engine) as connection:
        assert list(audit(connection, ())) == []
