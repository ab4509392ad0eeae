"""The service as a process that kills itself with SIGKILL at a named point.

``python -m tests.service.whole.mortal`` reads one point a line, forks a process that runs
``serve`` (with everything imported already, which is most of what a start costs), writes
its process id, and how it ended. A point is a moment and the beginning of a statement::

    before|after STATEMENT            around the statement itself
    uncommitted|committed STATEMENT   around the commit of the transaction that it was in
    statement N                       before the N-th statement of all

``MANY`` before the statement means one that writes several rows at once; the first that
writes one is then held up, so that there are others to be written together after it. A point
counts from the time that the process gets SIGUSR1. Accounting is done in the process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.engine.default import DefaultDialect
from starlette.concurrency import run_in_threadpool

from affidavit.certificate import certify  # noqa: F401  # so that no child imports it
from affidavit.service import serve  # noqa: F401  # the same
from affidavit.service.__main__ import main
from affidavit.service.pool import AccountingPool

HELD_UP = 0.4
"""Seconds."""


async def _here(_pool: Any, work: Any, *given: Any, **named: Any) -> Any:
    return await run_in_threadpool(work, *given, **named)


def arm(moment: str, statement: str) -> None:
    """Kill this process at that point."""
    inside: set[int] = set()
    numbers = count(1)
    many = statement.startswith("MANY ")
    wanted = statement.removeprefix("MANY ")
    held_up = count(1)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def is_it(text: str, rows: Any) -> bool:
        if not text.lstrip().startswith(wanted):
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

    commit = DefaultDialect.do_commit

    def committing(self: Any, connection: Any) -> None:
        found = getattr(connection, "dbapi_connection", connection)
        if id(found) not in inside:
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


def child(moment: str, statement: str, log: Path, armed: Path) -> None:
    """Serve, and be armed by a signal."""

    def handler(*_: Any) -> None:
        arm(moment, statement)
        armed.touch()

    signal.signal(signal.SIGUSR1, handler)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os._exit(main(["serve", "--port", "0"]))


def mother() -> None:
    """A child for each line."""
    AccountingPool.run = _here  # type: ignore[method-assign,assignment]
    AccountingPool.warm_up = lambda _: None  # type: ignore[method-assign]
    home = Path(os.environ["AFFIDAVIT_HOME"])
    for line in sys.stdin:
        moment, statement = line.rstrip("\n").split(" ", 1)
        pid = os.fork()
        if pid == 0:
            try:
                child(moment, statement, home / "said", home / "armed")
            finally:
                os._exit(99)
        print(pid, flush=True)  # noqa: T201  # what is asked for
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


if __name__ == "__main__":
    mother()
