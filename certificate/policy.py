"""The policy under which certificates are issued: for how long, and by which engines.

A certificate names its policy by digest, so that a verifier can tell under which rules it
came to be.
"""

from __future__ import annotations

from typing import Any

from affidavit.plan.canonical import digest_of

VALID_DAYS = 365

DEFAULT_POLICY: dict[str, Any] = {
    "name": "default",
    "version": 1,
    "second_opinion": "where an independent engine reaches the plan",
    "valid_days": VALID_DAYS,
}


def policy_reference() -> dict[str, str]:
    """Name and digest of the policy, as certificates carry it."""
    return {"name": str(DEFAULT_POLICY["name"]), "digest": digest_of(DEFAULT_POLICY)}
