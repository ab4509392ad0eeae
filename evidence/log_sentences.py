"""The log's entries in sentences, for people who read what happened.

>>> sentence_of({"kind": "approval", "actor": "token:priya", "body": {"decision": "approve"}})
'token:priya approved the certificate.'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_RUN = {
    "queued": "requested the run",
    "claimed": "claimed the run as a worker",
    "requeued": "returned the run to its queue",
    "cancel_asked": "asked the run to stop",
    "running": "began the first step of the run, which commits its budget",
    "resumed": "continued the run",
    "settled": "reported the run, whose record conforms to the certificate",
    "failed": "ended the run as failed",
    "cancelled": "cancelled the run",
}
_SENTENCES = {
    "certificate": "had the plan certified",
    "refusal": "had the plan assessed, which was not certified",
    "revocation": "revoked the certificate",
    "policy": "activated a policy",
    "waiver": "changed a waiver",
    "budget": "set the budget of the data set",
    "reservation": "reserved the cost of a run",
    "commitment": "committed the cost of a run",
    "settlement": "settled a run",
    "release": "released a reservation, which costs nothing",
    "record": "logged the first line of the run's record",
    "keyset": "published a keyset",
    "token": "changed a token",
    "proposal": "proposed a change that other administrators have to make too",
    "grant": "granted a team the use of the data set",
}


def sentence_of(entry: Mapping[str, Any]) -> str:
    """Return a log entry, as JSON data, in one sentence that begins with its actor."""
    body = entry["body"]
    return f"{entry['actor']} {_deed(str(entry['kind']), body)}{_detail(body)}."


def _deed(kind: str, body: Mapping[str, Any]) -> str:
    match kind:
        case "run":
            return _RUN.get(str(body.get("event")), "changed the run")
        case "approval":
            done = "approved" if body.get("decision") == "approve" else "rejected"
            return f"{done} the certificate"
        case "steps":
            return f"was granted steps up to {body.get('granted')}"
        case _:
            return _SENTENCES.get(kind, f"made an entry of the kind {kind}")


def _detail(body: Mapping[str, Any]) -> str:
    """Return the reason or the comment that a person gave, or the steps that were charged."""
    if (steps := body.get("steps_run", body.get("steps_charged"))) is not None:
        return f" ({steps} steps charged)"
    for name in ("comment", "reason", "message"):
        if text := body.get(name):
            return f": {str(text).rstrip('.')}"
    return ""
