"""Saved searches: a name and the query string of a page, for the person who saved it.

A query holds no cursor and nothing that the page would refuse: the page reads it before it is
saved. Everybody has at most ``MOST`` of a page, and sees only their own.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import (
    Column,
    Engine,
    String,
    Table,
    Text,
    UniqueConstraint,
    delete,
    func,
    insert,
    select,
)
from sqlalchemy.exc import IntegrityError

from affidavit.service.database import writer
from affidavit.service.tables import UtcDateTime, metadata

MOST = 50
LONGEST = 64

saved_views = Table(
    "saved_views",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("owner", String(255), nullable=False),
    Column("page", String(64), nullable=False),
    Column("name", String(64), nullable=False),
    Column("query", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    UniqueConstraint("owner", "page", "name", name="saved_views_once"),
)


class InvalidSavedView(ValueError):
    """A search that cannot be saved; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedView:
    """A search of one page; ``query`` is its URL's, without the question mark."""

    id: str
    name: str
    query: str


class SavedViews:
    """The saved searches of one page."""

    def __init__(self, engine: Engine, page: str) -> None:
        self._engine = engine
        self._page = page

    def of(self, owner: str) -> tuple[SavedView, ...]:
        """Those of ``owner``, by name."""
        columns = saved_views.c
        query = (
            select(columns.id, columns.name, columns.query)
            .where(columns.owner == owner, columns.page == self._page)
            .order_by(columns.name)
            .limit(MOST)
        )
        with self._engine.connect() as connection:
            rows = connection.execute(query).mappings()
            return tuple(SavedView(**row) for row in rows)

    def save(self, owner: str, name: str, query: str, at: datetime) -> None:
        """Save a search; raises ``InvalidSavedView``."""
        name = name.strip()
        if not name or len(name) > LONGEST or not name.isprintable():
            raise InvalidSavedView(f"enter a name of 1 to {LONGEST} printable characters.")
        if not query:
            raise InvalidSavedView("there is no filter to save; narrow the list first.")
        columns = saved_views.c
        count = select(func.count()).where(columns.owner == owner, columns.page == self._page)
        try:
            with writer(self._engine).begin() as connection:
                if connection.execute(count).scalar_one() >= MOST:
                    raise InvalidSavedView(f"you have {MOST} saved searches; delete one first.")
                connection.execute(
                    insert(saved_views).values(
                        id=str(uuid.uuid4()),
                        owner=owner,
                        page=self._page,
                        name=name,
                        query=query,
                        created_at=at,
                    )
                )
        except IntegrityError:
            raise InvalidSavedView(
                "you have a saved search of that name; choose another name."
            ) from None

    def delete(self, owner: str, view_id: str) -> None:
        """Delete one of ``owner``'s own, if it exists."""
        columns = saved_views.c
        with writer(self._engine).begin() as connection:
            connection.execute(
                delete(saved_views).where(
                    columns.id == view_id, columns.owner == owner, columns.page == self._page
                )
            )
