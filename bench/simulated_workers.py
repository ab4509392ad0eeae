"""Many workers at once, each a coroutine that asks what a worker asks and trains nothing.

They are spread over a few processes, each of which has what a process of the service has (its
engine with that many connections, its threads, its sequencer) and calls what the routes
call; only HTTP is left out. Training is a sleep of random length, during which the lease is
renewed. What is measured is the time from asking to the answer, waiting for a thread and
for a connection included.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from starlette.concurrency import run_in_threadpool

from affidavit.certificate import Conformance, KeyStore, SigningKey, check_conformance
from affidavit.service.command import CommandContext
from affidavit.service.errors import DomainError
from affidavit.service.log.reader import with_inclusion
from affidavit.service.runs.models import RunRequest
from affidavit.service.runs.queue import HeldLease
from affidavit.service.runs.repository import StoredRun
from affidavit.service.serve import prepare_process
from affidavit.service.services import Services
from affidavit.service.settings import Settings
from affidavit.worker import ClaimRequest
from affidavit.worker.job import provenance
from affidavit.worker.lease import Job
from tests.service.runs.records import record_of

T = TypeVar("T")

QUEUE = "default"
LEASE = 60
BEAT = 5.0
"""Seconds after which a lease is renewed; a worker does it after a third of its lease."""
WAIT = 2.0
"""Seconds after which a worker asks again when nothing waits."""
ASKING = 16
"""Requests for runs at a time, in each process."""
PRIORITIES = 10

Timing = tuple[str, float, float]
"""What was asked, when, and for how many seconds until the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one process does: ``workers`` by number, ``runs`` to be asked for.

    ``training`` is the mean length of a training in seconds, 0 for none at all.
    """

    url: str
    home: Path
    certificates: tuple[str, ...]
    queue: str = QUEUE
    workers: range = range(0)
    runs: range = range(0)
    training: float = 0.0
    seconds: float = 0.0


class Clock:
    """What was asked, and how long it took."""

    def __init__(self) -> None:
        self.timings: list[Timing] = []

    async def asked(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """What ``work`` returns."""
        at = time.perf_counter()
        result = await work()
        self.timings.append((what, at, time.perf_counter() - at))
        return result

    async def threaded(self, what: str, work: Callable[[], T]) -> T:
        """The same for work that blocks on the database."""
        return await self.asked(what, lambda: run_in_threadpool(work))


def requesting(share: Share) -> list[Timing]:
    """Ask for the share's runs, as quickly as they are answered."""
    numbers = iter(share.runs)

    async def ask(services: Services, clock: Clock) -> None:
        for number in numbers:
            wanted = RunRequest(
                certificate=share.certificates[number % len(share.certificates)],
                data="digits",
                model="mlp:8",
                output=f"run-{number}",
                queue=share.queue,
                priority=random.Random(number).randrange(PRIORITIES),
            )
            call = CommandContext(actor="load", at=datetime.now(UTC))
            await clock.asked(
                "request",
                lambda wanted=wanted, call=call: services.runs.request(  # type: ignore[misc]
                    wanted, call, any_reservation=False
                ),
            )

    return _together(share, [ask] * ASKING)


def working(share: Share) -> list[Timing]:
    """Work until nothing waits; the workers come one after the other."""
    key = KeyStore(share.home / "worker").signing_key()
    assert isinstance(key, SigningKey)

    def worker(number: int) -> Callable[[Services, Clock], Awaitable[None]]:
        async def work(services: Services, clock: Clock) -> None:
            drawn = random.Random(number)
            await asyncio.sleep(drawn.uniform(0, share.training))
            again = True
            while again:
                length = drawn.expovariate(1 / share.training) if share.training else 0.0
                again = await take_one(services, clock, share.queue, number, length, key)

        return work

    return _together(share, [worker(number) for number in share.workers])


def idling(share: Share) -> list[Timing]:
    """Ask an empty queue for so many seconds, each worker once at least."""

    def worker(number: int) -> Callable[[Services, Clock], Awaitable[None]]:
        async def ask(services: Services, clock: Clock) -> None:
            end = time.perf_counter() + share.seconds
            await asyncio.sleep(random.Random(number).uniform(0, min(WAIT, share.seconds)))
            assert await _claim(services, clock, share.queue, number) is None
            while time.perf_counter() + WAIT < end:
                await asyncio.sleep(WAIT)
                assert await _claim(services, clock, share.queue, number) is None

        return ask

    return _together(share, [worker(number) for number in share.workers])


def _together(
    share: Share, work: list[Callable[[Services, Clock], Awaitable[None]]]
) -> list[Timing]:
    async def run(services: Services, clock: Clock) -> None:
        await services.pool.run(float)  # it has started when this is answered
        try:
            await asyncio.gather(*(item(services, clock) for item in work))
        except DomainError as refusal:  # which does not travel between processes
            raise RuntimeError(f"{refusal.code}: {refusal}") from None

    clock = Clock()
    with services_of(share.url, share.home) as services:
        prepare_process()
        services.sequencer.start()
        asyncio.run(run(services, clock))
    return clock.timings


@contextmanager
def services_of(url: str, home: Path) -> Iterator[Services]:
    """What a process of the service has."""
    services = Services(
        Settings(database_url=url, key_directory=home / "keys", workers=1, loopback=True)
    )
    try:
        yield services
    finally:
        services.close()


async def _claim(services: Services, clock: Clock, queue: str, number: int) -> StoredRun | None:
    wanting = ClaimRequest(queue=queue, worker=f"w{number}", seconds=LEASE, gpu=False, memory_mib=0)
    return await clock.threaded(
        "claim",
        lambda: services.runs.queue.claim(wanting, f"worker:{number}", datetime.now(UTC)),
    )


async def take_one(
    services: Services,
    clock: Clock,
    queue: str,
    number: int,
    length: float,
    key: SigningKey,
    beat: float = BEAT,
) -> bool:
    """Claim a run and do it, with so many seconds of training; False if none was to be had."""
    run = await _claim(services, clock, queue, number)
    if run is not None:
        await _run(services, clock, run, number, length, key, beat)
    return run is not None


async def _run(
    services: Services,
    clock: Clock,
    run: StoredRun,
    number: int,
    length: float,
    key: SigningKey,
    beat: float,
) -> None:
    def held() -> HeldLease:
        return HeldLease(
            run=run.id, fence=run.fence, actor=f"worker:{number}", at=datetime.now(UTC)
        )

    queue = services.runs.queue
    bundle = await clock.threaded("bundle", lambda: _bundle(services, run))
    await clock.threaded("status", lambda: services.status_lists.at(datetime.now(UTC)))
    content, result = _trained(bundle)
    await clock.threaded("start", lambda: queue.start(held(), run.plan_digest))
    end = time.perf_counter() + length
    while (left := end - time.perf_counter()) > 0:
        await asyncio.sleep(min(left, beat))
        if left > beat:
            await clock.threaded("renew", lambda: queue.renew(held(), 1))
    await clock.threaded("record", lambda: queue.add_record_part(held(), 1, content))
    envelope = provenance(
        _job(run),
        result,
        key,
        worker=f"w{number}",
        weights="2" * 64,
        header=None,
        began=datetime.now(UTC),
    )
    await clock.asked("complete", lambda: services.runs.complete(held(), envelope))


def _bundle(services: Services, run: StoredRun) -> bytes:
    for issue in services.store.issues(run.certificate_id):
        if (issue.issue, issue.untrusted) == (run.issue, run.untrusted):
            return with_inclusion(services.log, issue.bundle)
    raise AssertionError("a run's certificate is kept")


def _trained(bundle: bytes) -> tuple[bytes, Conformance]:
    """The record of a run of the certificate in ``bundle``, and what it comes to."""
    signed = json.loads(bundle)["envelope"]["payload"]
    if signed not in _records:
        predicate = json.loads(base64.b64decode(signed))["predicate"]
        content = record_of(predicate, predicate["plan"]["steps"]).content.encode()
        _records[signed] = content, check_conformance(content, predicate)
    return _records[signed]


_records: dict[str, tuple[bytes, Conformance]] = {}
"""Runs of one certificate all have one record here: only their keys would differ."""


def _job(run: StoredRun) -> Job:
    requested = run.wanted
    return Job(
        run=run.id,
        fence=run.fence,
        certificate=run.certificate_id,
        plan_digest=run.plan_digest,
        data=requested["data"],
        model=requested["model"],
        output=requested["output"],
        time_limit=requested["time_limit"],
    )
