"""What the queue reads to answer while many runs wait: one worker's whole run, claims, lists.

The worker takes the run at the head of the queue and does all that a worker does. Beside it
stand a claim in a queue where nothing waits, one by a worker that none of the waiting runs fits,
which is the most that a claim can read, and the pages of the list under every filter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TypeVar

from sqlalchemy import Engine

from affidavit.certificate import KeyStore, SigningKey
from affidavit.service.runs.repository import Filters
from affidavit.service.services import Services
from affidavit.worker import ClaimRequest
from bench.explained import Reading, Statement, explain, noted
from bench.simulated_workers import LEASE, Clock, Share, services_of, take_one

T = TypeVar("T")

PAGE = 50
BEAT = 0.02
"""Seconds after which the lease is renewed here."""
NOTHING_FITS = "claim, none fits"


class Noting(Clock):
    """Notes by what is asked the statements that ask it; one after the other only."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.statements: dict[str, list[Statement]] = {}

    async def asked(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """What ``work`` returns."""
        with noted(self.engine) as statements:
            result = await super().asked(what, work)
        self.statements.setdefault(what, []).extend(statements)
        return result


def queue_reads(share: Share) -> dict[str, list[Reading]]:
    """What is read, by what is asked; one run of the share's queue is over afterwards."""
    key = KeyStore(share.home / "worker").signing_key()
    assert isinstance(key, SigningKey)
    with services_of(share.url, share.home) as services:
        clock = Noting(services.engine)
        asyncio.run(_ask(services, clock, share, key))
        return {what: explain(clock.engine, item) for what, item in clock.statements.items()}


async def _ask(services: Services, clock: Noting, share: Share, key: SigningKey) -> None:
    assert await take_one(services, clock, share.queue, 0, 2.5 * BEAT, key, BEAT)
    for name, queue, memory in (
        ("claim, nothing waits", "nothing", 0),
        (NOTHING_FITS, share.queue, -1),  # no run needs as little
    ):
        wanting = ClaimRequest(queue=queue, worker="w", seconds=LEASE, gpu=False, memory_mib=memory)
        await clock.threaded(
            name,
            lambda wanting=wanting: services.runs.queue.claim(  # type: ignore[misc]
                wanting, "worker:w", datetime.now(UTC)
            ),
        )
    for name, filters in _lists(share).items():
        await clock.threaded(
            f"list, {name}",
            lambda filters=filters: _two_pages(services, filters),  # type: ignore[misc]
        )


def _lists(share: Share) -> dict[str, Filters]:
    return {
        "all": Filters(),
        "queued": Filters(state="queued"),
        "running": Filters(state="running"),
        "settled": Filters(state="settled"),
        "a queue": Filters(queue=share.queue),
        "a queue without runs": Filters(queue="nothing"),
        "a certificate": Filters(certificate_id=share.certificates[0]),
        "who asked": Filters(requested_by="load"),
        "somebody who did not": Filters(requested_by="nobody"),
    }


def _two_pages(services: Services, filters: Filters) -> None:
    _, cursor = services.runs.queue.page(filters, None, PAGE)
    if cursor is not None:
        services.runs.queue.page(filters, cursor, PAGE)
