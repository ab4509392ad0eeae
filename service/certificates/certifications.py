"""Certifications that outlast their request: 202, and a status to poll.

A request is answered within the time that its client waits (``Prefer: wait``, RFC 7240). A longer
certification continues with an id of its own and keeps its share of the accounting. It ends without
a certificate if nobody polls it for ``ABANDONED_AFTER``, if its replica stops, and if its
accounting exceeds the time limit.

``certifications``
    The state of each certification for all replicas: ``running``, ``done`` or ``failed``; its
    requester, its last poll, and the last sign of life of its replica.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

from sqlalchemy import Engine, Row, delete, insert, select, update
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from affidavit.service.certificates.submit_plan import Submission
from affidavit.service.core.database import (
    Store,
)
from affidavit.service.core.errors import TooBusy
from affidavit.service.core.problems import Problem, problem_of_error
from affidavit.service.tables.certificates import certifications

WAIT_SECONDS = 30
"""Waiting time of a request without ``Prefer``."""
MAX_SECONDS = 60
"""Maximum waiting time of a request."""
MAX_PER_CALLER = 64
"""Running certifications of one caller."""
HEARTBEAT_SECONDS = 5.0
"""Time between two signs of life of a replica."""
LOST_AFTER = timedelta(seconds=30)
ABANDONED_AFTER = timedelta(minutes=5)
DELETED_AFTER = timedelta(days=1)


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
    """The certifications of one replica, and their stored states; belongs to one event loop."""

    def __init__(self, engine: Engine, now: Callable[[], datetime]) -> None:
        super().__init__(engine)
        self._now = now
        self._running: dict[str, tuple[str, asyncio.Task[Submission]]] = {}
        self._ends: dict[str, Problem] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._renewal: asyncio.Task[None] | None = None

    async def submit(
        self, requester: str, work: Coroutine[Any, Any, Submission], seconds: float
    ) -> Submission | str:
        """Return the result of ``work`` within ``seconds``, or else the certification's id.

        Raises what ``work`` raises in that time, and ``TooBusy``. Cancellation cancels the work.
        """
        task = asyncio.create_task(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=seconds)
            if done:
                return task.result()
            if sum(name == requester for name, _ in self._running.values()) >= MAX_PER_CALLER:
                raise TooBusy
            return await self._continue(requester, task)
        except BaseException:
            task.cancel()
            raise

    async def _continue(self, requester: str, task: asyncio.Task[Submission]) -> str:
        identity = str(uuid.uuid4())
        self._running[identity] = requester, task
        try:
            await run_in_threadpool(self._begin, identity, requester)
        except BaseException:
            del self._running[identity]
            raise
        task.add_done_callback(lambda _: self._spawn(self._end(identity, task)))
        if self._renewal is None or self._renewal.done():
            self._renewal = self._spawn(self._renew_all())
        return identity

    def find(self, identity: str, requester: str) -> Row[Any] | None:
        """Return a certification of that requester, and record the poll, which keeps it running."""
        now = self._now()
        condition = (certifications.c.id == identity) & (certifications.c.requester == requester)
        with self._reader.connect() as connection:
            row = connection.execute(select(certifications).where(condition)).first()
        if row is not None and row.state == "running":
            with self._writer.begin() as connection:
                connection.execute(update(certifications).where(condition).values(asked_at=now))
        return row

    def state_of(self, row: Row[Any]) -> Literal["running", "done", "failed"]:
        """Return the state; it is ``failed`` if the replica is lost."""
        lost = row.state == "running" and row.alive_at < self._now() - LOST_AFTER
        return "failed" if lost else row.state

    async def stop(self) -> None:
        """End all running certifications as ``STOPPED``."""
        for identity in list(self._running):
            self._cancel(identity, STOPPED)
        if self._renewal is not None:
            self._renewal.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _cancel(self, identity: str, problem: Problem) -> None:
        self._ends.setdefault(identity, problem)
        self._running[identity][1].cancel()

    def _begin(self, identity: str, requester: str) -> None:
        now = self._now()
        row = {"id": identity, "requester": requester, "state": "running", "requested_at": now}
        with self._writer.begin() as connection:
            old = certifications.c.requested_at < now - DELETED_AFTER
            connection.execute(delete(certifications).where(old))
            connection.execute(insert(certifications).values(**row, alive_at=now, asked_at=now))

    async def _end(self, identity: str, task: asyncio.Task[Submission]) -> None:
        """Store the end of a certification."""
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
            condition = certifications.c.id == identity
            connection.execute(update(certifications).where(condition).values(**values))

    async def _renew_all(self) -> None:
        """Renew the running certifications, and end abandoned ones."""
        while self._running:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            try:
                abandoned = await run_in_threadpool(self._renew, list(self._running))
            except SQLAlchemyError as failure:
                log.warning("certifications could not be renewed: %s", failure)
                continue
            for identity in abandoned:
                if identity in self._running:
                    self._cancel(identity, ABANDONED)

    def _renew(self, running: Sequence[str]) -> Sequence[str]:
        now, condition = self._now(), certifications.c.id.in_(running)
        with self._writer.begin() as connection:
            connection.execute(update(certifications).where(condition).values(alive_at=now))
            abandoned = certifications.c.asked_at < now - ABANDONED_AFTER
            return (
                connection.execute(select(certifications.c.id).where(condition, abandoned))
                .scalars()
                .all()
            )
