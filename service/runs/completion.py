"""How runs end or change hands, and what that costs.

A run ends by its record, without one, or before it began. All within the caller's transaction,
which holds the lease's row.

A run whose worker was lost, or gave it back, is requeued. If it began, another worker continues it
under a new token; the steps that its workers were ever granted are spent, whether or not they were
taken, because the lost worker may be taking them still. It is over, and charged in full, when no
step is left, when it was cancelled, or when ``MOST_FAILED_ATTEMPTS`` attempts in a row made no
progress: it may be what kills workers.

A run continues from its checkpoint, in the output folder that the workers of a queue share.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row

from affidavit.accountants.privacy_filter import Cost
from affidavit.service.command import CommandContext
from affidavit.service.ledger import transitions
from affidavit.service.runs import repository
from affidavit.service.runs.conformance import ConformanceResult
from affidavit.service.runs.repository import Kind, StoredRun

REAPER = "service:reaper"
MOST_FAILED_ATTEMPTS = 5


def verdict(
    result: ConformanceResult, run: StoredRun, at: datetime, *, cancelled: bool
) -> tuple[Kind, str]:
    """How a run with a record ended, and why."""
    if result.conformant and not result.stopped:
        return "settled", "conformant"
    if cancelled:
        return "cancelled", "cancelled"
    if not result.conformant:
        return "failed", result.code
    limit, began = run.wanted["time_limit"], run.began_at
    too_late = limit is not None and began is not None and at >= began + timedelta(seconds=limit)
    return "failed", "time_limit" if too_late else "stopped"


def _release(connection: Connection, run: StoredRun, reason: str, call: CommandContext) -> None:
    """Release what was reserved, unless it was released or used already."""
    ledger, reservation = transitions.hold_reservation(connection, run.reservation_id)
    if reservation.state == "reserved":
        transitions.release(connection, ledger, reservation, call, reason=f"run {run.id}: {reason}")


def settle(
    connection: Connection,
    run: StoredRun,
    steps: int | None,
    record: str | None,
    cost: Cost | None,
    call: CommandContext,
) -> int:
    """Charge a run; in full without ``steps``, and never twice."""
    ledger, reservation = transitions.hold_reservation(connection, run.reservation_id)
    if reservation.state == "settled":
        return int(reservation.steps_run or 0)
    charged = reservation.certified_steps if steps is None else steps
    transitions.settle(
        connection, ledger, reservation, call, steps_run=charged, record=record, cost=cost
    )
    return charged


def give_up(
    connection: Connection,
    run: StoredRun,
    kind: Kind,
    body: dict[str, Any],
    call: CommandContext,
    fence: int | None,
) -> None:
    """End a run without a record."""
    if run.begun:
        body = {**body, "steps_charged": settle(connection, run, None, None, None, call)}
    else:
        _release(connection, run, str(body["code"]), call)
    end(connection, run, kind, body, call, fence=fence)


def end(
    connection: Connection,
    run: StoredRun,
    kind: Kind,
    body: dict[str, Any],
    call: CommandContext,
    *,
    fence: int | None,
) -> None:
    """Record that a run is over."""
    repository.change_lease(connection, run.id, state="ended")
    repository.add_event(
        connection,
        run.id,
        kind,
        body,
        actor=call.actor,
        at=call.at,
        fence=fence,
        follows="running" if run.begun else "queued",
    )


def recover(
    connection: Connection, lease: Row[Any], at: datetime, why: str = "did not renew its lease."
) -> None:
    """End a run whose lease expired or whose job ended, or requeue it."""
    run, call = repository.find(connection, lease.run_id), CommandContext(actor=REAPER, at=at)
    body = {
        "code": "lease_lost",
        "message": f"worker {lease.worker}: {why}",
        "fence": lease.fence,
    }
    if is_over(run, lease):
        kind: Kind = "cancelled" if lease.cancel and not run.begun else "failed"
        give_up(connection, run, kind, body, call, lease.fence)
        return
    requeue(connection, run, lease, body, call)


# ---- recovery of lost leases ---------------------------------------------------------


def is_over(run: StoredRun, lease: Row[Any]) -> bool:
    """Whether a run that loses its worker now is over."""
    spent = run.begun and lease.granted >= run.certified_steps
    failed = failed_attempts(run) + (0 if made_progress(run) else 1)
    return bool(lease.cancel) or spent or failed >= MOST_FAILED_ATTEMPTS


def failed_attempts(run: StoredRun) -> int:
    """How many of the latest attempts in a row made no progress.

    One that charged two steps more than had been granted before has finished the first.
    """
    count = 0
    for attempt in run.attempts:
        count = 0 if attempt.further else count + 1
    return count


def made_progress(run: StoredRun) -> bool:
    """Whether the current attempt has finished a step, by what it reported."""
    granted = run.attempts[-1].granted if run.attempts else 0
    return run.begun and run.steps >= granted + 2


def requeue(
    connection: Connection,
    run: StoredRun,
    lease: Row[Any],
    body: dict[str, Any],
    call: CommandContext,
) -> None:
    """Queue the run for another worker; ``body`` says why."""
    repository.change_lease(connection, run.id, state="queued", expires_at=None, secret=None)
    progress = {"granted": lease.granted, "steps": lease.steps, "head": lease.head}
    body = {**body, **progress, "begun": run.begun, "further": made_progress(run)}
    repository.add_event(
        connection, run.id, "requeued", body, actor=call.actor, at=call.at, fence=lease.fence
    )
