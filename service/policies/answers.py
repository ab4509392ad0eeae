"""Policies, waivers and simulations as they are answered."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from affidavit.certificate.policy import BUILT_IN, Policy, Waiver
from affidavit.service.policies.rulebook import Rulebook
from affidavit.service.policies.simulate import Simulated
from affidavit.service.policies.store import KeptPolicy, KeptWaiver


def summary(policy: Policy, kept: KeptPolicy | None, rules: Rulebook) -> dict[str, Any]:
    """A line of the list; the built-in policy was set by nobody, and never."""
    return {
        **policy.reference(),
        "datasets": policy.as_document()["datasets"],
        "active": rules.is_active(policy),
        "created_by": None if kept is None else kept.created_by,
        "created_at": None if kept is None else _time(kept.created_at),
    }


def policy_answer(policy: Policy, kept: KeptPolicy | None, rules: Rulebook) -> dict[str, Any]:
    """A version with its document and, but for the built-in one, its signed envelope."""
    return {
        **summary(policy, kept, rules),
        "policy": policy.as_document(),
        "envelope": None if kept is None else json.loads(kept.envelope),
    }


def policies_answer(kept: list[KeptPolicy], rules: Rulebook) -> dict[str, Any]:
    """Every version, newest first; the built-in policy stands last."""
    lines = [summary(item.policy, item, rules) for item in kept]
    return {"policies": [*lines, summary(BUILT_IN, None, rules)]}


def waiver_answer(kept: KeptWaiver, now: datetime) -> dict[str, Any]:
    """A waiver with its status, its signed envelope and its revocation."""
    revoked = None
    if kept.revoked_at is not None:
        revoked = {
            "by": kept.revoked_by,
            "at": _time(kept.revoked_at),
            "reason": kept.revoked_because,
        }
    return {
        "id": kept.waiver.id,
        "status": _status(kept.waiver, revoked is not None, now),
        "waiver": kept.waiver.as_document(),
        "revoked": revoked,
        "envelope": json.loads(kept.envelope),
    }


def simulation_answer(draft: Policy, found: Simulated, following: str | None) -> dict[str, Any]:
    """What a page of certificates would become, and the path of the next page."""
    return {
        "policy": draft.reference(),
        "judged": found.judged,
        "changes": [change.as_dict() for change in found.changes],
        "next": following,
    }


def _status(waiver: Waiver, revoked: bool, now: datetime) -> str:
    if revoked:
        return "revoked"
    return "in_force" if now < waiver.expires else "expired"


def _time(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
