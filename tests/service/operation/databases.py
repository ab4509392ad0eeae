"""Databases as an earlier release left them, and a role that may only work with one."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import create_engine
from sqlalchemy.engine import make_url

RELEASED = Path(__file__).parent / "released"
"""Dumps of databases that an earlier release filled; ``0001`` is the first schema."""


def statements(url: str, *lines: str) -> None:
    """Run statements, each in a transaction of its own, as the URL's user."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for line in lines:
            connection.exec_driver_sql(line)
    engine.dispose()


def restore_dump(url: str, revision: str) -> None:
    """Fill the empty database at ``url`` from the dump of ``revision``."""
    found = make_url(url)
    kind = found.get_backend_name()
    script = (RELEASED / f"{revision}.{kind}.sql").read_text()
    if kind == "sqlite":
        with closing(sqlite3.connect(str(found.database))) as connection:
            connection.executescript(script)
        return
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.execute(script.encode())
    engine.dispose()


def with_user(url: str, user: str) -> str:
    """The same database, as another user."""
    return make_url(url).set(username=user).render_as_string(hide_password=False)
