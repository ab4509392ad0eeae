"""Hand-over: what becomes of a run whose worker is not heard of any more, or gave it back.

One that was not begun waits again. One that began waits for another worker to go on with it,
under a new token; of its steps those that its workers were ever granted are spent, whether or
not they were taken, because the one that is not heard of may be taking them still. It is over,
and charged in full, when no step is left, when somebody asked for its end, or when
``MOST_IN_VAIN`` attempts in a row came to nothing: it may be what kills workers.

A run goes on from its checkpoint, so it waits for a worker of the same place (``place`` is the
name of a folder that workers share, or that a single worker has) for ``ELSEWHERE`` seconds before
any other may begin it anew. One that is given back waits a while, the longer the more often.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row

from affidavit.service.runs import rows
from affidavit.service.runs.rows import Run

MOST_IN_VAIN = 5
ELSEWHERE = 600
"""Seconds for which a run that began waits for a worker that has its checkpoint."""
FIRST_WAIT = 2
"""Seconds before a run that was given back may be claimed; twice as many each time in vain."""


def is_over(run: Run, lease: Row[Any]) -> bool:
    """Whether nobody is to go on with a run that loses its worker now."""
    spent = run.begun and lease.granted >= run.certified_steps
    return bool(lease.cancel) or spent or in_vain(run) + _one(run) >= MOST_IN_VAIN


def in_vain(run: Run) -> int:
    """How many of the latest attempts in a row came to nothing.

    One that charged two steps more than had been granted before has finished the first.
    """
    found = 0
    for attempt in run.attempts:
        found = 0 if attempt.further else found + 1
    return found


def _one(run: Run) -> int:
    """1 unless the attempt that ends now got further."""
    return 0 if further(run) else 1


def further(run: Run) -> bool:
    """Whether the attempt that holds the run has finished a step, by what it told."""
    granted = run.attempts[-1].granted if run.attempts else 0
    return run.begun and run.steps >= granted + 2


def requeue(
    connection: Connection,
    run: Run,
    lease: Row[Any],
    body: dict[str, Any],
    *,
    actor: str,
    at: datetime,
    given_back: bool,
) -> None:
    """Have the run wait for another worker; ``body`` says why."""
    wait = timedelta(seconds=FIRST_WAIT * 2 ** in_vain(run))
    elsewhere = at + timedelta(seconds=ELSEWHERE) if run.begun and lease.place else None
    rows.change_lease(
        connection,
        run.id,
        state="queued",
        expires_at=None,
        ready_at=at + wait if given_back else None,
        elsewhere_at=elsewhere,
    )
    told = {"granted": lease.granted, "steps": lease.steps, "head": lease.head}
    body = {**body, **told, "begun": run.begun, "further": further(run)}
    rows.add_event(connection, run.id, "requeued", body, actor=actor, at=at, fence=lease.fence)
