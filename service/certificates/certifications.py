"""Certifications that outlast their request: 202, and a status to poll.

A request is answered within the time that its client waits (``Prefer: wait``, RFC 7240). What is
not certified in that time goes on as a certification with an id of its own. It has its share of the
accounting as before, and ends without a certificate when nobody asked for it for
``ABANDONED_AFTER``, when its replica stops, and when its accounting passes the time limit.

``certifications``
    The state of each, so that any replica can tell it: ``running``, ``done`` or ``failed``; who
    asked for it, and when they and the replica that works on it last gave a sign of life.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy import Engine, Row, delete, insert, select, update
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from affidavit.service.certificate_tables import UtcDateTime, metadata
from affidavit.service.certificates.submit_plan import Submission
from affidavit.service.database import Store
from affidavit.service.errors import TooBusy
from affidavit.service.problems import Problem, problem_of_error

WAIT_SECONDS = 30
"""How long a request is held whose client does not say."""
MAX_SECONDS = 60
"""How long it is held at most."""
MAX_EACH = 64
"""Certifications of one caller that run at a time."""
KEEP_SECONDS = 5.0
"""Between two signs of life of a replica."""
LOST_AFTER = timedelta(seconds=30)
ABANDONED_AFTER = timedelta(minutes=5)
FORGOTTEN_AFTER = timedelta(days=1)

certifications = sa.Table(
    "certifications",
    metadata,
    sa.Column("id", sa.String(36), primary_key=True),
    sa.Column("requester", sa.String(255), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("certificate_id", sa.String(71)),
    sa.Column("problem", sa.Text),
    sa.Column("requested_at", UtcDateTime, nullable=False, index=True),
    sa.Column("alive_at", UtcDateTime, nullable=False),
    sa.Column("asked_at", UtcDateTime, nullable=False),
)

STOPPED = Problem(
    503, "stopping", "The service stopped before the plan was certified; send it again."
)
ABANDONED = Problem(
    503, "abandoned", "Nobody polled this certification for five minutes; send the plan again."
)
LOST = Problem(
    503, "replica_lost", "The replica that certified the plan is gone; send the plan again."
)

log = logging.getLogger("affidavit.service")


class Certifications(Store):
    """Those of one replica, and what the database says of all; belongs to one event loop."""

    def __init__(self, engine: Engine, now: Callable[[], datetime]) -> None:
        super().__init__(engine)
        self._now = now
        self._running: dict[str, tuple[str, asyncio.Task[Submission]]] = {}
        self._ends: dict[str, Problem] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None

    async def submit(
        self, requester: str, work: Coroutine[Any, Any, Submission], seconds: float
    ) -> Submission | str:
        """What ``work`` returns within ``seconds``, or the id of the certification that goes on.

        Raises what ``work`` raises in that time, and ``TooBusy``. Cancelled, the work ends too.
        """
        task = asyncio.create_task(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=seconds)
            if done:
                return task.result()
            if sum(name == requester for name, _ in self._running.values()) >= MAX_EACH:
                raise TooBusy
            return await self._go_on(requester, task)
        except BaseException:
            task.cancel()
            raise

    async def _go_on(self, requester: str, task: asyncio.Task[Submission]) -> str:
        identity = str(uuid.uuid4())
        self._running[identity] = requester, task
        try:
            await run_in_threadpool(self._begin, identity, requester)
        except BaseException:
            del self._running[identity]
            raise
        task.add_done_callback(lambda _: self._spawn(self._end(identity, task)))
        if self._keeper is None or self._keeper.done():
            self._keeper = self._spawn(self._keep())
        return identity

    def find(self, identity: str, requester: str) -> Row[Any] | None:
        """The certification of that id and requester, which is kept going by asking for it."""
        now = self._now()
        mine = (certifications.c.id == identity) & (certifications.c.requester == requester)
        with self._reader.connect() as connection:
            row = connection.execute(select(certifications).where(mine)).first()
        if row is not None and row.state == "running":
            with self._writer.begin() as connection:
                connection.execute(update(certifications).where(mine).values(asked_at=now))
        return row

    def state_of(self, row: Row[Any]) -> Literal["running", "done", "failed"]:
        """``failed`` too where the replica that worked on it is gone."""
        lost = row.state == "running" and row.alive_at < self._now() - LOST_AFTER
        return "failed" if lost else row.state

    async def stop(self) -> None:
        """End all that run, and say so."""
        for identity in list(self._running):
            self._cancel(identity, STOPPED)
        if self._keeper is not None:
            self._keeper.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _cancel(self, identity: str, why: Problem) -> None:
        self._ends.setdefault(identity, why)
        self._running[identity][1].cancel()

    def _begin(self, identity: str, requester: str) -> None:
        now = self._now()
        row = {"id": identity, "requester": requester, "state": "running", "requested_at": now}
        with self._writer.begin() as connection:
            old = certifications.c.requested_at < now - FORGOTTEN_AFTER
            connection.execute(delete(certifications).where(old))
            connection.execute(insert(certifications).values(**row, alive_at=now, asked_at=now))

    async def _end(self, identity: str, task: asyncio.Task[Submission]) -> None:
        """Write down how a certification ended."""
        problem, certificate = self._ends.pop(identity, None), None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            problem = problem_of_error(error)
        elif not task.cancelled():
            problem, certificate = None, task.result().certificate.id
        elif problem is None:
            problem = STOPPED
        values = {
            "state": "failed" if certificate is None else "done",
            "certificate_id": certificate,
            "problem": None if problem is None else json.dumps(problem.document()),
        }
        try:
            await run_in_threadpool(self._write, identity, values)
        except SQLAlchemyError as failure:
            log.error("a certification's end was not stored: %s", failure)
        finally:
            del self._running[identity]

    def _write(self, identity: str, values: dict[str, Any]) -> None:
        with self._writer.begin() as connection:
            mine = certifications.c.id == identity
            connection.execute(update(certifications).where(mine).values(**values))

    async def _keep(self) -> None:
        """Say that this replica is alive, and end what nobody asks for, while anything runs."""
        while self._running:
            await asyncio.sleep(KEEP_SECONDS)
            try:
                abandoned = await run_in_threadpool(self._renew, list(self._running))
            except SQLAlchemyError as failure:
                log.warning("certifications could not be renewed: %s", failure)
                continue
            for identity in abandoned:
                if identity in self._running:
                    self._cancel(identity, ABANDONED)

    def _renew(self, own: Sequence[str]) -> Sequence[str]:
        now, mine = self._now(), certifications.c.id.in_(own)
        with self._writer.begin() as connection:
            connection.execute(update(certifications).where(mine).values(alive_at=now))
            left = certifications.c.asked_at < now - ABANDONED_AFTER
            return connection.execute(select(certifications.c.id).where(mine, left)).scalars().all()
