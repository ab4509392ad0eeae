"""Keyset versions in the service: in order, checked like everywhere, served as signed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.exc import DatabaseError
from typer.testing import CliRunner

from affidavit.gate import app
from affidavit.service.core.database import open_engine
from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import TokenRepository
from affidavit.service.keys.keyring import (
    FRESH_SECONDS,
    KeysetStore,
    RevokedKeys,
)
from affidavit.service.settings import Settings
from affidavit.service.tables.log import log_entries
from affidavit.trust import (
    KeysetError,
    KeyStore,
    Revocation,
    Roots,
    SignedKeyset,
    SigningKey,
    draft_keyset,
    read_keyset,
)

NOW = datetime.now(UTC).replace(microsecond=0)
ROOT, SIGNER = SigningKey.generate("root"), SigningKey.generate("signer")


def version(
    last: SignedKeyset | None = None, days: int = 30, revoked: Any = (), signer: Any = SIGNER
) -> SignedKeyset:
    created = draft_keyset(
        last,
        roots=Roots.of([ROOT.public], threshold=1),
        keys=[signer.public],
        revoked=revoked,
        issued_at=NOW,
        expires_at=NOW + timedelta(days=days),
    )
    return created.signed_by(ROOT)


@pytest.fixture
def store(engine: Engine) -> KeysetStore:
    return KeysetStore(engine)


def published(store: KeysetStore, found: SignedKeyset) -> str:
    try:
        return "new" if store.publish(found.as_bytes(), actor="me", at=NOW)[1] else "known"
    except KeysetError as error:
        return error.code


def test_versions_follow_each_other_and_are_served_byte_for_byte(
    store: KeysetStore, engine: Engine
) -> None:
    first = version()
    second = version(first, days=31)
    third = version(second)
    assert store.newest() is None
    assert published(store, second) == "keyset_gap"
    assert published(store, first) == "new"
    assert published(store, first) == "known"
    assert published(store, third) == "keyset_gap"
    assert published(store, version(first, days=32)) == "new"
    assert published(store, second) == "keyset_fork"
    assert published(store, first) == "keyset_rollback"
    assert store.find(1) == first.as_bytes()
    assert store.find(3) is None
    newest = store.newest()
    assert newest is not None
    assert read_keyset(newest).keyset.version == 2
    with engine.connect() as connection:
        told = connection.execute(
            select(log_entries.c.subject).where(log_entries.c.kind == "keyset")
        ).scalars()
        assert sorted(told) == ["keyset:1", "keyset:2"]


def test_what_does_not_count_is_not_kept(store: KeysetStore) -> None:
    unsigned = draft_keyset(
        None,
        roots=Roots.of([ROOT.public], threshold=1),
        keys=[SIGNER.public],
        revoked=[],
        issued_at=NOW,
        expires_at=NOW + timedelta(days=1),
    )
    assert published(store, unsigned) == "keyset_unsigned"
    assert published(store, unsigned.signed_by(SigningKey.generate())) == "keyset_unsigned"
    late = NOW + timedelta(days=31)
    with pytest.raises(KeysetError, match="expired"):
        store.publish(version().as_bytes(), actor="me", at=late)
    assert store.newest() is None


def test_of_versions_that_race_one_is_kept(database_url: str, store: KeysetStore) -> None:
    first = version()
    published(store, first)
    engines = [open_engine(database_url) for _ in range(6)]
    drafts = [version(first, days=40 + number) for number in range(6)]
    with ThreadPoolExecutor(6) as racers:
        pairs = zip(map(KeysetStore, engines), drafts, strict=True)
        outcomes = sorted(racers.map(lambda pair: published(*pair), pairs))
    for item in engines:
        item.dispose()
    assert outcomes == ["keyset_fork"] * 5 + ["new"]


@pytest.mark.parametrize(
    "row",
    ["(3, 2, 'x')", "(3, 1, 'x')", "(3, NULL, 'x')", "(1, NULL, 'y')", "(2, NULL, 'x')"],
)
def test_the_database_itself_leaves_no_gap(store: KeysetStore, engine: Engine, row: str) -> None:
    published(store, version())
    number, follows, digest = row.strip("()").split(", ")
    insert = text(
        "INSERT INTO keysets (version, follows, digest, document, published_at, publisher) "
        f"VALUES ({number}, {follows}, {digest}, 'd', '2026-01-01', 'me')"
    )
    with pytest.raises(DatabaseError), engine.begin() as connection:
        connection.execute(insert)
    for attack in ("UPDATE keysets SET digest = 'z'", "DELETE FROM keysets"):
        with pytest.raises(DatabaseError, match="append-only"), engine.begin() as connection:
            connection.execute(text(attack))


# ---- over HTTP ---------------------------------------------------------------------


@pytest.fixture
def admin(settings: Settings) -> dict[str, str]:
    """The headers of somebody who may publish."""
    engine = open_engine(settings.database_url)
    _, token = TokenRepository(engine).new(
        "root-holder", [Scope.ADMIN], 1, by="test", at=datetime.now(UTC)
    )
    engine.dispose()
    return {"authorization": f"Bearer {token.text}", "content-type": "application/json"}


def test_an_admin_publishes_and_anybody_reads(client: Any, admin: dict[str, str]) -> None:
    first = version().as_bytes()
    assert client.get("/v1/keyset").status_code == 404
    created = client.post("/v1/keysets", content=first, headers=admin)
    assert (created.status_code, created.json()["version"]) == (201, 1)
    assert client.post("/v1/keysets", content=first, headers=admin).status_code == 200
    assert client.get("/v1/keyset").content == first
    assert client.get("/v1/keysets/1").content == first
    assert client.get("/v1/keysets/2").status_code == 404
    assert client.get("/v1/keysets/0").status_code == 422
    anonymous = {"content-type": "application/json"}
    assert client.post("/v1/keysets", content=first, headers=anonymous).status_code in (401, 403)


def test_what_is_wrong_with_a_keyset_is_a_problem_with_its_code(
    client: Any, admin: dict[str, str]
) -> None:
    for body, status, code in (
        (b"{}", 400, "keyset_malformed"),
        (b"\xff", 400, "keyset_malformed"),
        (json.dumps({"payload": "!"}).encode(), 400, "keyset_malformed"),
        (version(version()).as_bytes(), 409, "keyset_gap"),
    ):
        result = client.post("/v1/keysets", content=body, headers=admin)
        assert (result.status_code, result.json()["code"]) == (status, code)
    yaml = {**admin, "content-type": "application/yaml"}
    assert client.post("/v1/keysets", content=b"{}", headers=yaml).status_code == 415


def test_a_revoked_key_signs_no_more(
    client: Any,
    settings: Settings,
    admin: dict[str, str],
) -> None:
    store = KeyStore(settings.key_directory)
    (old,) = store.public_keys()
    signer = replace(SIGNER, public=old)
    lost = [Revocation(key_id=old.key_id, since=NOW.strftime("%Y-%m-%dT%H:%M:%SZ"))]
    created = version(revoked=lost, signer=signer).as_bytes()
    assert client.post("/v1/keysets", content=created, headers=admin).status_code == 201
    client.app.state.services.keyring._revoked._read_at = None  # a second later
    assert client.get("/readyz").json()["reasons"][0]["code"] == "signer_unavailable"
    new = store.new("new")
    assert client.get("/readyz").json()["signer"]["key_id"] == new.key_id


def test_revocations_are_asked_for_at_most_once_a_second(store: KeysetStore) -> None:
    revoked = RevokedKeys(store)
    assert revoked() == frozenset()
    lost = [Revocation(key_id=SIGNER.key_id, since=NOW.strftime("%Y-%m-%dT%H:%M:%SZ"))]
    published(store, version(revoked=lost))
    revoked._read_at = (revoked._read_at or 0.0) - FRESH_SECONDS
    assert revoked() == {SIGNER.key_id}


def test_the_command_line_publishes_to_a_running_service(
    forked_server: Any,
    token_for: Any,
    settings: Settings,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "keyset.json"
    file.write_bytes(version().as_bytes())
    admin = token_for(settings, "admin")["authorization"].removeprefix("Bearer ")
    forked_server.start()
    publish = ["keyset", "publish", str(file), "--server", forked_server.url]
    monkeypatch.delenv("AFFIDAVIT_TOKEN", raising=False)
    assert CliRunner().invoke(app, publish).exit_code == 1
    monkeypatch.setenv("AFFIDAVIT_TOKEN", admin)
    done = CliRunner().invoke(app, publish)
    assert done.exit_code == 0, done.output
    assert httpx.get(f"{forked_server.url}/v1/keyset").content == file.read_bytes()
