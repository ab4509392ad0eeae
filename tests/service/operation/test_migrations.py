"""Migrations on databases with data: from the release before, up, down and up again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, MetaData, create_engine, inspect, text
from sqlalchemy.exc import DatabaseError

from affidavit.certificate import PublicKey, verify
from affidavit.service.database import open_engine
from affidavit.service.migrate import current, downgrade, head, metadata, upgrade
from affidavit.service.settings import Settings
from tests.service.operation.databases import restore_dump, statements

OLD = ("signing_keys", "certificates", "requests", "audit")
Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of either kind without a schema."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'old.db'}"
    server: str = request.getfixturevalue("postgresql")
    name = f"m{abs(hash(request.node.nodeid))}"
    statements(f"{server}/postgres", f"CREATE DATABASE {name}")
    return f"{server}/{name}"


@pytest.fixture
def released_url(empty_url: str) -> str:
    """A database that the first release made and filled."""
    restore_dump(empty_url, "0001")
    assert current(empty_url) == "0001"
    return empty_url


def rows(url: str, columns: Rows | None = None) -> Rows:
    """What stands in the first release's tables, in the columns that it knew."""
    engine = create_engine(url)
    found: Rows = {}
    with engine.connect() as connection:
        reflected = MetaData()
        reflected.reflect(connection, only=OLD)
        for name in OLD:
            table = reflected.tables[name]
            names = list(columns[name][0]) if columns else table.columns.keys()
            kept = [table.c[item] for item in names]
            ordered = connection.execute(table.select().with_only_columns(*kept))
            found[name] = sorted((dict(row) for row in ordered.mappings()), key=repr)
    engine.dispose()
    return found


def test_the_release_before_is_brought_up_and_loses_nothing(released_url: str) -> None:
    before = rows(released_url)
    assert {name: len(found) for name, found in before.items()} == {
        "signing_keys": 2,
        "certificates": 4,
        "requests": 5,
        "audit": 5,
    }
    upgrade(released_url)
    assert current(released_url) == head()
    assert rows(released_url, before) == before
    engine = open_engine(released_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    for name in OLD:
        _protected(engine, name)
    engine.dispose()


def test_down_to_the_release_before_keeps_what_it_knew_and_up_again_works(
    released_url: str,
) -> None:
    before = rows(released_url)
    schema = _schema(released_url)
    upgrade(released_url)
    downgrade(released_url, "0001")
    assert rows(released_url) == before
    assert _schema(released_url) == schema
    engine = open_engine(released_url)
    for name in OLD:
        _protected(engine, name)
    engine.dispose()
    upgrade(released_url)
    assert rows(released_url, before) == before


def test_the_service_works_on_what_the_release_before_left(
    released_url: str,
    settings: Settings,
    client_of: Any,
    plan: Callable[..., dict[str, Any]],
    post: Callable[..., Any],
) -> None:
    upgrade(released_url)
    with client_of(replace(settings, database_url=released_url)) as client:
        items = client.get("/v1/certificates").json()["items"]
        assert len(items) == 4
        keys = [PublicKey.from_record(entry) for entry in client.get("/v1/keys").json()["keys"]]
        trusted = [item for item in items if not item["untrusted"]]
        assert len(trusted) == 3
        for item in trusted:
            # Its bytes are those that were signed, and its key is still known.
            bundle = client.get(f"/v1/certificates/{item['id']}/bundle")
            assert verify(bundle.content, keys).predicate["verdict"] == item["verdict"]
        ready = client.get("/readyz").json()
        assert ready["status"] == "ready", ready["detail"]
        assert post(client, plan(steps=11)).status_code == 201
        assert len(client.get("/v1/certificates").json()["items"]) == 5


def test_a_database_of_this_release_goes_down_and_up_with_its_data(
    database_url: str,
    settings: Settings,
    client_of: Any,
    plan: Callable[..., dict[str, Any]],
    post: Callable[..., Any],
) -> None:
    with client_of(replace(settings, database_url=database_url)) as client:
        made = [post(client, plan(steps=steps)) for steps in (1, 2, 10**6)]
        assert [entry.status_code for entry in made] == [201] * 3
    before = rows(database_url)
    downgrade(database_url, "0001")
    assert len(rows(database_url)["certificates"]) == 3
    upgrade(database_url)
    kept = rows(database_url)
    for name in ("signing_keys", "audit"):
        assert kept[name] == before[name]
    with client_of(replace(settings, database_url=database_url)) as client:
        for item in made:
            identity = item.json()["certificate"]["id"]
            found = client.get(f"/v1/certificates/{identity}").json()
            assert found["certificate"] == json.loads(item.content)["certificate"]


def _protected(engine: Engine, table: str) -> None:
    with pytest.raises(DatabaseError, match="append-only"), engine.begin() as connection:
        connection.execute(text(f"DELETE FROM {table}"))


def _schema(url: str) -> dict[str, Any]:
    engine = create_engine(url)
    seen = inspect(engine)
    found = {
        name: {
            "columns": {column["name"]: str(column["type"]) for column in seen.get_columns(name)},
            "key": seen.get_pk_constraint(name)["constrained_columns"],
            "indexes": sorted(str(index["name"]) for index in seen.get_indexes(name)),
            "foreign": sorted(
                (key["referred_table"], tuple(key["constrained_columns"]))
                for key in seen.get_foreign_keys(name)
            ),
        }
        for name in seen.get_table_names()
    }
    engine.dispose()
    return found
