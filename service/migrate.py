"""The schema: where it is, where it should be, and bringing it there.

The service never makes a table. ``affidavit migrate`` does, once, before the service is
started; ``require_head`` is what start-up and ``/readyz`` ask. The scripts are found
inside the installed package, so a wheel migrates as a checkout does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine

from affidavit.service.database import is_missing_file, make_room, open_engine, writer
from affidavit.service.identity import token_repository
from affidavit.service.keysets import keyset_tables
from affidavit.service.ledger import ledger_tables
from affidavit.service.lifecycle import lifecycle_tables
from affidavit.service.log import log_tables
from affidavit.service.pages import session_tables
from affidavit.service.policies import policy_tables
from affidavit.service.runs import run_tables
from affidavit.service.tables import metadata

MODULES = (
    token_repository,
    ledger_tables,
    keyset_tables,
    log_tables,
    lifecycle_tables,
    session_tables,
    policy_tables,
    run_tables,
)
"""Every module with tables, so that ``metadata`` has all of them."""

__all__ = ["metadata"]


class SchemaNotAtHead(Exception):
    """The database's schema is not the one that this release works with."""

    def __init__(self, found: str | None, wanted: str) -> None:
        self.found = found
        self.wanted = wanted
        where = f"at revision {found}" if found else "empty"
        super().__init__(
            f"the database's schema is {where}, and this release needs revision {wanted}; "
            "run: affidavit migrate"
        )


@cache
def head() -> str:
    """The revision that this release works with.

    Raises ``RuntimeError`` where an installation has no revision.
    """
    found = ScriptDirectory.from_config(_config()).get_current_head()
    if found is None:
        raise RuntimeError("affidavit.migrations has no revision; the installation is incomplete")
    return found


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
    """The revision, which is the head's; raises ``SchemaNotAtHead`` when it is not."""
    found, wanted = revision_of(engine), head()
    if found != wanted:
        raise SchemaNotAtHead(found, wanted)
    return wanted


def upgrade(url: str, revision: str = "head") -> None:
    """Bring the database at ``url`` to ``revision``, in one transaction."""
    make_room(url)
    _run(url, lambda config: command.upgrade(config, revision))


def downgrade(url: str, revision: str) -> None:
    """Take the database at ``url`` back to ``revision``; drops what came after it."""
    _run(url, lambda config: command.downgrade(config, revision))


def _run(url: str, work: Callable[[Config], None]) -> None:
    engine = open_engine(url)
    try:
        with writer(engine).connect() as connection:
            config = _config()
            config.attributes["connection"] = connection
            work(config)
    finally:
        engine.dispose()


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "affidavit:migrations")
    return config
