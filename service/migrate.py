"""Schema revisions: which one a database has, which one this release needs, and upgrading.

The service never creates a table. ``affidavit migrate`` does, once, before the service is
started; start-up and ``/readyz`` call ``require_head``. The scripts are found inside the
installed package, so a wheel migrates as a checkout does.
"""

from __future__ import annotations

from functools import cache

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine

from affidavit.service import keys
from affidavit.service.database import is_missing_file, make_room, open_engine, writer
from affidavit.service.identity import second_person, tokens
from affidavit.service.ledger import state
from affidavit.service.lifecycle import status
from affidavit.service.log import entries
from affidavit.service.pages import saved_views, sessions
from affidavit.service.policies import store
from affidavit.service.runs import run_tables
from affidavit.service.tables import metadata
from affidavit.service.use_cases import certifications

MODULES = (
    tokens,
    second_person,
    state,
    keys,
    entries,
    status,
    saved_views,
    sessions,
    store,
    run_tables,
    certifications,
)
"""Every module with tables, so that ``metadata`` has all of them."""

__all__ = ["metadata"]


class SchemaNotAtHead(Exception):
    """The database's schema is not the one that this release works with."""

    def __init__(self, found: str | None, expected: str) -> None:
        self.found = found
        self.expected = expected
        where = f"at revision {found}" if found else "empty"
        super().__init__(
            f"the database's schema is {where}, and this release needs revision {expected}; "
            f"{self._remedy(expected)}"
        )

    def _remedy(self, expected: str) -> str:  # noqa: ARG002
        return "run: affidavit migrate"


class UnknownSchema(SchemaNotAtHead):
    """The database's schema has a revision that this release cannot upgrade."""

    def _remedy(self, expected: str) -> str:
        return (
            "it cannot be upgraded from there. If a newer release made it, use that release. "
            f"If it was made before the first release (a revision below {expected}), keep a copy, "
            "set DATABASE_URL to an empty database, and run: affidavit migrate"
        )


@cache
def head() -> str:
    """The revision that this release works with.

    Raises ``RuntimeError`` where an installation has no revision.
    """
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    if revision is None:
        raise RuntimeError("affidavit.migrations has no revision; the installation is incomplete")
    return revision


def current(url: str) -> str | None:
    """The revision of the database at ``url``, or None when it has no schema."""
    engine = open_engine(url)
    try:
        return revision_of(engine)
    finally:
        engine.dispose()


def revision_of(engine: Engine) -> str | None:
    """The revision of the database behind ``engine``."""
    if is_missing_file(engine.url):
        return None
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def require_head(engine: Engine) -> str:
    """The head's revision; raises ``SchemaNotAtHead`` when the database has another one."""
    revision, expected = revision_of(engine), head()
    if revision != expected:
        raise _not_at_head(revision)
    return expected


def upgrade(url: str) -> None:
    """Bring the database at ``url`` to the head, in one transaction.

    Raises ``UnknownSchema`` when no revision of this release leads there from its own.
    """
    make_room(url)
    engine = open_engine(url, bounded=False)
    try:
        revision = revision_of(engine)
        if revision is not None and revision not in _revisions():
            raise _not_at_head(revision)
        with writer(engine).connect() as connection:
            config = _config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        engine.dispose()


def _not_at_head(revision: str | None) -> SchemaNotAtHead:
    known = revision is None or revision in _revisions()
    return (SchemaNotAtHead if known else UnknownSchema)(revision, head())


@cache
def _revisions() -> frozenset[str]:
    scripts = ScriptDirectory.from_config(_config()).walk_revisions()
    return frozenset(script.revision for script in scripts)


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "affidavit:migrations")
    return config
