"""A run as the API answers it, and as a worker is given it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from affidavit.service.runs.rows import Happened, Run


def run_document(run: Run) -> dict[str, Any]:
    """A run as it stands."""
    wanted, outcome = run.wanted, run.outcome or {}
    return {
        "id": run.id,
        "state": run.state,
        "certificate": run.certificate_id,
        "issue": run.issue,
        "plan_digest": run.plan_digest,
        "reservation": run.reservation_id,
        "queue": run.queue,
        "priority": run.priority,
        "requirements": wanted["requirements"],
        "time_limit": wanted["time_limit"],
        "data": wanted["data"],
        "model": wanted["model"],
        "output": wanted["output"],
        "worker": run.worker,
        "claims": run.fence,
        "cancel_asked": run.cancel_asked,
        "steps": {
            "certified": run.certified_steps,
            "granted": run.granted,
            "reported": run.steps,
            "charged": outcome.get("steps_charged"),
        },
        "code": outcome.get("code"),
        "message": outcome.get("message"),
        "record": outcome.get("record"),
        "provenance": outcome.get("provenance"),
        "requested_by": run.requested_by,
        "requested_at": _instant(run.requested_at),
        "changed_at": _instant(run.changed_at),
    }


def event_document(happened: Happened, state: str) -> dict[str, Any]:
    """What happened to a run, and the state that it was in afterwards."""
    told = ("code", "message", "worker", "fence", "steps_charged", "record")
    return {
        "seq": happened.seq,
        "event": happened.kind,
        "state": state,
        "at": _instant(happened.at),
        **{name: happened.body.get(name) for name in told},
    }


def job_document(run: Run) -> dict[str, Any]:
    """What a worker that claimed the run has to know."""
    names = ("data", "model", "output", "time_limit")
    return {
        "run": run.id,
        "fence": run.fence,
        "certificate": run.certificate_id,
        "plan_digest": run.plan_digest,
        "granted": run.granted,
        "previous": run.previous,
        **{name: run.wanted[name] for name in names},
    }


def _instant(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
