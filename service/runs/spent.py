"""What a run has spent so far: ε at its certificate's δ, of the steps that were reported.

It is that of the steps rounded up to the next hundredth of the certified ones, and so never less
than what was spent; a run that is watched from its first step to its last costs at most a
hundred accountings, whoever watches. Runs that are charged in full once a step was run (see
``certificate.costs``) have spent everything with their first step.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.concurrency import run_in_threadpool

from affidavit.service.errors import AccountingUnavailable, DomainError
from affidavit.service.ledger.models import RunCharge
from affidavit.service.ledger.service import LedgerService
from affidavit.service.ledger.store import LedgerStore
from affidavit.service.runs.rows import Run

PARTS = 100
PATIENCE = 5.0
"""Seconds that an answer waits; what takes longer is there when it is asked for again."""

Document = dict[str, Any]


class Spending:
    """ε so far of any run; belongs to one event loop."""

    def __init__(self, ledger: LedgerService, ledger_store: LedgerStore) -> None:
        self._ledger = ledger
        self._ledger_store = ledger_store
        self._asked: dict[tuple[str, int], asyncio.Task[Document | None]] = {}

    async def after(self, run: Run, steps: int) -> Document | None:
        """``epsilon`` and ``delta`` as decimals, for ``steps`` steps; None if not known yet."""
        counted = rounded_up(steps, run.certified_steps)
        key = (run.reservation_id, counted)
        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = asyncio.create_task(self._cost(*key))
            task.add_done_callback(lambda _: self._asked.pop(key))
        done, _ = await asyncio.wait([task], timeout=PATIENCE)
        found = task.result() if done else None
        return None if found is None else {"steps": counted, **found}

    async def _cost(self, reservation_id: str, steps: int) -> Document | None:
        try:
            reservation = await run_in_threadpool(self._ledger_store.reservation, reservation_id)
            cost = await self._ledger.cost_of_steps(reservation, steps)
        except (AccountingUnavailable, DomainError):
            return None
        spent = RunCharge.of(reservation.cost if cost is None else cost)
        return {"epsilon": spent.epsilon, "delta": spent.delta}


def rounded_up(steps: int, certified: int) -> int:
    """``steps`` rounded up to a hundredth of ``certified``, in whole steps.

    >>> [rounded_up(steps, 1000) for steps in (0, 1, 10, 11, 995, 1000, 2000)]
    [0, 10, 10, 20, 1000, 1000, 1000]
    >>> rounded_up(7, 50)
    7
    """
    part = max(1, certified // PARTS)
    return min(certified, -(-steps // part) * part)
