"""Run the service as a forked process that kills itself with SIGKILL.

It does so at the point that is its only argument: a moment and the beginning of a statement::

    before|after STATEMENT            around the statement itself
    uncommitted|committed STATEMENT   around the commit of the transaction that it was in
    statement N                       before the N-th statement of all

``MANY`` before the statement means one that writes several rows at once; the first that
writes one is then held up, so that there are others to be written together after it. A point
counts from the time that the process gets SIGUSR1.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.engine.default import DefaultDialect

from tests.service import forked_service

HELD_UP = 0.4
"""Seconds."""


def arm(moment: str, statement: str) -> None:
    """Kill this process at that point."""
    inside: set[int] = set()
    numbers = count(1)
    many = statement.startswith("MANY ")
    requested = statement.removeprefix("MANY ")
    held_up = count(1)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def is_it(text: str, rows: Any) -> bool:
        if not text.lstrip().startswith(requested):
            return False
        if many and not (isinstance(rows, list) and len(rows) > 1):
            if next(held_up) == 1:
                time.sleep(HELD_UP)
            return False
        return True

    def before(connection: Any, _cursor: Any, text: str, rows: Any, *_: Any) -> None:
        if moment == "statement":
            if next(numbers) == int(statement):
                die()
        elif is_it(text, rows):
            if moment == "before":
                die()
            inside.add(id(connection.connection.dbapi_connection))

    def after(_connection: Any, _cursor: Any, text: str, rows: Any, *_: Any) -> None:
        if moment == "after" and is_it(text, rows):
            die()

    commit: Callable[[Any, Any], None] = DefaultDialect.do_commit

    def committing(self: Any, connection: Any) -> None:
        result = getattr(connection, "dbapi_connection", connection)
        if id(result) not in inside:
            return commit(self, connection)
        if moment == "uncommitted":
            die()
        commit(self, connection)
        if moment == "committed":
            die()
        return None

    event.listen(Engine, "before_cursor_execute", before)
    event.listen(Engine, "after_cursor_execute", after)
    DefaultDialect.do_commit = committing  # type: ignore[method-assign]


def prepare() -> None:
    """It is prepared as ``forked_service`` is."""


def main(arguments: Sequence[str]) -> int:
    """Serve, and be armed by a signal."""
    moment, statement = arguments[0].split(" ", 1)
    armed = Path(os.environ["AFFIDAVIT_HOME"]) / "armed"

    def handler(*_: Any) -> None:
        arm(moment, statement)
        armed.touch()

    signal.signal(signal.SIGUSR1, handler)
    return forked_service.main(["serve", "--port", "0"])
