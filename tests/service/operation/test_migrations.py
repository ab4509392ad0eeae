"""A migrated database agrees with the service's tables; an unknown schema is refused whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from affidavit.service.__main__ import main
from affidavit.service.core.database import open_engine
from affidavit.service.operation.database_admin import (
    UnknownSchema,
    head,
    metadata,
    require_head,
    revision_of,
    upgrade,
)
from tests.support.database_owner import statements


@pytest.fixture(params=["sqlite", "postgresql"])
def old_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with data and a revision that no release has."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'old.db'}"
    else:
        server: str = request.getfixturevalue("postgresql")
        name = f"m{abs(hash(request.node.nodeid))}"
        statements(f"{server}/postgres", f"CREATE DATABASE {name}")
        url = f"{server}/{name}"
    statements(
        url,
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)",
        "INSERT INTO alembic_version VALUES ('0016')",
        "CREATE TABLE audit (seq INTEGER PRIMARY KEY)",
        "INSERT INTO audit VALUES (1)",
    )
    return url


@pytest.mark.in_both
def test_the_migrated_schema_has_the_tables_types_and_indexes_of_the_metadata(
    database_url: str,
) -> None:
    engine = open_engine(database_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
        assert set(inspect(connection).get_table_names()) == {*metadata.tables, "alembic_version"}
    engine.dispose()


@pytest.mark.in_both
def test_a_schema_from_before_the_first_release_is_refused_and_left_alone(old_url: str) -> None:
    with pytest.raises(UnknownSchema, match="DATABASE_URL to an empty database"):
        upgrade(old_url)
    engine = open_engine(old_url)
    assert revision_of(engine) == "0016"
    with pytest.raises(UnknownSchema, match="0016"):
        require_head(engine)
    with engine.connect() as connection:
        assert sorted(inspect(connection).get_table_names()) == ["alembic_version", "audit"]
        assert connection.execute(text("SELECT seq FROM audit")).scalar_one() == 1
    engine.dispose()


def test_migrate_tells_what_to_do_with_an_old_database(
    old_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DATABASE_URL", old_url)
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path / "home"))
    assert main(["migrate"]) != 0
    told = capsys.readouterr().err
    assert "0016" in told
    assert head() in told
    assert "Traceback" not in told
