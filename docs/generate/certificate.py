"""A whole statement, as the certificate's page shows it: small, with a fixed time and requester."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from affidavit.assessment import certify
from affidavit.certificate import issue
from affidavit.plan import plan_from
from affidavit.trust import SigningKey

PLAN = {
    "version": 1,
    "name": "digits",
    "dataset": {"name": "digits", "size": 1797},
    "adjacency": "add_remove",
    "sampling": {"scheme": "full_batch"},
    "steps": 10,
    "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 20}],
    "target": {"epsilon": 8, "delta": 1e-5},
}
"""A single Gaussian, which all engines account exactly."""
ISSUED = datetime(2026, 1, 1, tzinfo=UTC)


def example() -> str:
    """The statement about ``PLAN`` as it is signed; no key is part of it."""
    result = certify(plan_from(PLAN))
    signed = issue(result, SigningKey.generate(), requester="me", issued_at=ISSUED)
    return json.dumps(signed.statement, indent=1, ensure_ascii=False) + "\n"
