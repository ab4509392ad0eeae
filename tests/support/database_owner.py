"""Statements run as a database's owner, and its URL for another user."""

from __future__ import annotations

from sqlalchemy import create_engine
from sqlalchemy.engine import make_url


def statements(url: str, *lines: str) -> None:
    """Run statements, each in a transaction of its own, as the URL's user."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for line in lines:
            connection.exec_driver_sql(line)
    engine.dispose()


def with_user(url: str, user: str) -> str:
    """The same database, as another user."""
    return make_url(url).set(username=user).render_as_string(hide_password=False)
