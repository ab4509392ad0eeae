"""Saved searches: a name and the query string of ``/certificates``, for whoever saved it.

A query holds no cursor and nothing that the page would refuse: the page reads it before it is
saved. Everybody has at most ``MOST``, and sees only their own.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy import ColumnElement, Engine, delete, func, insert, select
from sqlalchemy.exc import IntegrityError

from affidavit.service.certificate_tables import UtcDateTime, metadata
from affidavit.service.database import reader, writer

MOST = 50
LONGEST = 64
PAGE = "/certificates"

saved_views = sa.Table(
    "saved_views",
    metadata,
    sa.Column("id", sa.String(36), primary_key=True),
    sa.Column("owner", sa.String(255), nullable=False),
    sa.Column("page", sa.String(64), nullable=False),
    sa.Column("name", sa.String(64), nullable=False),
    sa.Column("query", sa.Text, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.UniqueConstraint("owner", "page", "name", name="saved_views_once"),
)


class InvalidSavedView(ValueError):
    """A search that cannot be saved; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedView:
    """A search; ``query`` is its URL's, without the question mark."""

    id: str
    name: str
    query: str


def saved_by(engine: Engine, owner: str) -> tuple[SavedView, ...]:
    """The searches of ``owner``, by name."""
    columns = saved_views.c
    query = select(columns.id, columns.name, columns.query).where(*_of(owner))
    with reader(engine).connect() as connection:
        rows = connection.execute(query.order_by(columns.name).limit(MOST)).mappings()
        return tuple(SavedView(**row) for row in rows)


def save(engine: Engine, owner: str, name: str, query: str, at: datetime) -> None:
    """Save a search; raises ``InvalidSavedView``."""
    name = name.strip()
    if not name or len(name) > LONGEST or not name.isprintable():
        raise InvalidSavedView(f"enter a name of 1 to {LONGEST} printable characters.")
    if not query:
        raise InvalidSavedView("there is no filter to save; narrow the list first.")
    row = {"id": str(uuid.uuid4()), "owner": owner, "page": PAGE, "name": name}
    try:
        with writer(engine).begin() as connection:
            count = select(func.count()).select_from(saved_views).where(*_of(owner))
            if connection.execute(count).scalar_one() >= MOST:
                raise InvalidSavedView(f"you have {MOST} saved searches; delete one first.")
            connection.execute(insert(saved_views).values(**row, query=query, created_at=at))
    except IntegrityError:
        raise InvalidSavedView(
            "you have a saved search of that name; choose another name."
        ) from None


def forget(engine: Engine, owner: str, view_id: str) -> None:
    """Delete one of ``owner``'s own, if it exists."""
    with writer(engine).begin() as connection:
        connection.execute(delete(saved_views).where(saved_views.c.id == view_id, *_of(owner)))


def _of(owner: str) -> tuple[ColumnElement[bool], ...]:
    return saved_views.c.owner == owner, saved_views.c.page == PAGE
