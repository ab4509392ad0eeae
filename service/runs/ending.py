"""How runs end, and what that costs: by their record, without one, or before they began.

All within the caller's transaction, which holds the lease's row.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row

from affidavit.accountants.privacy_filter import Cost
from affidavit.service.command import CommandContext
from affidavit.service.ledger import transitions
from affidavit.service.runs import handover, rows
from affidavit.service.runs.judging import Judged
from affidavit.service.runs.rows import Run

REAPER = "service:reaper"


def verdict(judged: Judged, run: Run, at: datetime, *, cancelled: bool) -> tuple[rows.Kind, str]:
    """How a run with a record ended, and why."""
    if judged.conformant and not judged.stopped:
        return "settled", "conformant"
    if cancelled:
        return "cancelled", "cancelled"
    if not judged.conformant:
        return "failed", judged.code
    limit, began = run.wanted["time_limit"], run.began_at
    too_late = limit is not None and began is not None and at >= began + timedelta(seconds=limit)
    return "failed", "time_limit" if too_late else "stopped"


def _release(connection: Connection, run: Run, reason: str, call: CommandContext) -> None:
    """Give back what was reserved, unless somebody else did or used it."""
    ledger, reservation = transitions.hold_reservation(connection, run.reservation_id)
    if reservation.state == "reserved":
        transitions.release(connection, ledger, reservation, call, reason=f"run {run.id}: {reason}")


def settle(
    connection: Connection,
    run: Run,
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
    run: Run,
    kind: rows.Kind,
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
    run: Run,
    kind: rows.Kind,
    body: dict[str, Any],
    call: CommandContext,
    *,
    fence: int | None,
) -> None:
    """Write down that a run is over."""
    rows.change_lease(connection, run.id, state="ended")
    rows.add_event(
        connection,
        run.id,
        kind,
        body,
        actor=call.actor,
        at=call.at,
        fence=fence,
        follows="running" if run.begun else "queued",
    )


def take_back(connection: Connection, lease: Row[Any], at: datetime) -> None:
    """End a run whose lease ran out, or hand it over."""
    run, call = rows.find(connection, lease.run_id), CommandContext(actor=REAPER, at=at)
    body = {
        "code": "lease_lost",
        "message": f"worker {lease.worker} was not heard of in time.",
        "fence": lease.fence,
    }
    if handover.is_over(run, lease):
        kind: rows.Kind = "cancelled" if lease.cancel and not run.begun else "failed"
        give_up(connection, run, kind, body, call, lease.fence)
        return
    handover.requeue(connection, run, lease, body, actor=REAPER, at=at, given_back=False)
