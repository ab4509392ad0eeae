"""The log's entries in sentences, for people who read what happened.

>>> entry = {"kind": "approval", "actor": "token:priya", "body": {"decision": "approve"}}
>>> sentence_of(entry, plan="ward-readmission")
'token:priya approved the certificate of ward-readmission.'
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

_RUN = {
    "queued": "requested a run{of}",
    "claimed": "claimed the run{of} as a worker",
    "requeued": "returned the run{of} to its queue",
    "cancel_asked": "asked the run{of} to stop",
    "running": "began the first step of the run{of}, which commits its budget",
    "resumed": "continued the run{of}",
    "settled": "reported the run{of}, whose record conforms to the certificate",
    "failed": "ended the run{of} as failed",
    "cancelled": "cancelled the run{of}",
}
_SENTENCES = {
    "certificate": "had the plan{plan} certified",
    "refusal": "submitted the plan{plan}, which was not certified",
    "revocation": "revoked the certificate{of}",
    "policy": "activated policy {name}, version {version}",
    "waiver": "waived {rule} for {dataset}",
    "budget": "set the budget of {dataset} to ε = {epsilon} at δ = {delta}",
    "reservation": "reserved the cost of a run{of} on {dataset}",
    "commitment": "committed the cost of a run{of} on {dataset}",
    "settlement": "settled a run{of} on {dataset}",
    "release": "released a reservation{of} on {dataset}, which costs nothing",
    "record": "logged the first line of the record of the run{of}",
    "replay": "added a replay of the run{of}: {verdict}",
    "audit": "added an audit of the canaries of the run{of}: {verdict}",
    "steps": "was granted steps up to {granted} of the run{of}",
    "keyset": "published keyset {version}",
    "token": "created the token {name}",
    "proposal": "proposed a change of {kind}, which other administrators have to make too",
    "grant": "let team {team} {may} the data set {dataset}",
}
_MAY = {"reserve": "use", "read": "read the ledger of", "nothing": "no longer use"}
_MISSING = "(not stated)"


def sentence_of(entry: Mapping[str, Any], plan: str | None = None) -> str:
    """Return a log entry, as JSON data, in one sentence that begins with its actor.

    ``plan`` is the name of the plan that the entry is about, if it is known.
    """
    body = entry["body"]
    deed = _sentence(str(entry["kind"]), body).format_map(_named(body, plan))
    return f"{entry['actor']} {deed}{_detail(body)}."


def _sentence(kind: str, body: Mapping[str, Any]) -> str:
    match kind:
        case "run":
            return _RUN.get(str(body.get("event")), "changed the run{of}")
        case "approval":
            done = "approved" if body.get("decision") == "approve" else "rejected"
            return f"{done} the certificate{{of}}"
        case "token" if body.get("action") == "revoked":
            return "revoked the token"
        case "waiver" if body.get("event") == "revoked":
            return "ended the waiver"
        case "proposal" if body.get("carried_out"):
            return "made a change of {kind} that another administrator proposed"
        case _:
            return _SENTENCES.get(kind, "made an entry of an unknown kind")


def _named(body: Mapping[str, Any], plan: str | None) -> Mapping[str, str]:
    """Return the names in ``body`` and in its ledger or waiver, and what stands for others."""
    inner = body.get("ledger") or body.get("waiver") or {}
    result: defaultdict[str, str] = defaultdict(lambda: _MISSING)
    result |= {name: str(value) for name, value in {**body, **inner}.items()}
    result["verdict"] = str(body.get("verdict", _MISSING)).replace("_", " ")
    result["may"] = _MAY.get(str(body.get("may")), _MISSING)
    result["plan"], result["of"] = (f" {plan}", f" of {plan}") if plan else ("", "")
    return result


def _detail(body: Mapping[str, Any]) -> str:
    """Return the reason or the comment that a person gave, or the steps that were charged."""
    if (steps := body.get("steps_run", body.get("steps_charged"))) is not None:
        return f" ({steps} steps charged)"
    reasoned = {**body, **body.get("waiver", {})}
    for name in ("comment", "reason", "message"):
        if text := reasoned.get(name):
            return f": {str(text).rstrip('.')}"
    return ""
