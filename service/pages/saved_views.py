"""Searches that people keep: a name and the query of a page, for whoever kept it.

A search holds no cursor and nothing that the page itself would refuse: it is read by the page
before it is kept. Everybody has at most ``MOST`` of a page, and sees only their own.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Engine, delete, func, insert, select
from sqlalchemy.exc import IntegrityError

from affidavit.service.database import writer
from affidavit.service.pages.session_tables import saved_views

MOST = 50
LONGEST = 64


class NotKept(ValueError):
    """A search that is not kept; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedView:
    """A search of one page; ``query`` is its URL's, without the question mark."""

    id: str
    name: str
    query: str


class SavedViews:
    """The kept searches of one page."""

    def __init__(self, engine: Engine, page: str) -> None:
        self._engine = engine
        self._page = page

    def of(self, owner: str) -> tuple[SavedView, ...]:
        """Those of ``owner``, by name."""
        kept = saved_views.c
        query = (
            select(kept.id, kept.name, kept.query)
            .where(kept.owner == owner, kept.page == self._page)
            .order_by(kept.name)
            .limit(MOST)
        )
        with self._engine.connect() as connection:
            rows = connection.execute(query).mappings()
            return tuple(SavedView(**row) for row in rows)

    def keep(self, owner: str, name: str, query: str, at: datetime) -> None:
        """Keep a search; raises ``NotKept``."""
        name = name.strip()
        if not name or len(name) > LONGEST or not name.isprintable():
            raise NotKept(f"give it a name of 1 to {LONGEST} printable characters.")
        if not query:
            raise NotKept("there is nothing to keep: narrow the list first.")
        kept = saved_views.c
        mine = select(func.count()).where(kept.owner == owner, kept.page == self._page)
        try:
            with writer(self._engine).begin() as connection:
                if connection.execute(mine).scalar_one() >= MOST:
                    raise NotKept(f"you keep {MOST} searches already; forget one first.")
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
            raise NotKept("you keep a search of that name already; choose another.") from None

    def forget(self, owner: str, view_id: str) -> None:
        """Forget one of ``owner``'s own; one that is not there is forgotten already."""
        kept = saved_views.c
        with writer(self._engine).begin() as connection:
            connection.execute(
                delete(saved_views).where(
                    kept.id == view_id, kept.owner == owner, kept.page == self._page
                )
            )
