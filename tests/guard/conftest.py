"""Certificates for small guarded runs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from affidavit.assessment import certify
from affidavit.certificate import issue
from affidavit.plan import plan_from
from affidavit.trust import SigningKey

collect_ignore = ["opacus_scenarios.py"]
"""Needs Opacus, which is in an environment of its own."""

RECORDS, LOT, STEPS = 600, 64, 8

Certified = Callable[..., tuple[dict[str, Any], bytes]]


@pytest.fixture(scope="session")
def key() -> SigningKey:
    """An issuer's key."""
    return SigningKey.generate("issuer")


@pytest.fixture(scope="session")
def guarded_plan() -> Callable[..., Any]:
    """A Poisson plan of one flat block, with top-level fields changed."""

    def make(**changes: Any) -> Any:
        return plan_from(
            {
                "version": 1,
                "dataset": {"size": RECORDS},
                "adjacency": "add_remove",
                "sampling": {"scheme": "poisson", "lot_size": LOT},
                "steps": STEPS,
                "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 1.2}],
                "clipping": "flat",
                "target": {"delta": 1e-4},
                **changes,
            }
        )

    return make


@pytest.fixture(scope="session")
def certified(key: SigningKey, guarded_plan: Callable[..., Any]) -> Certified:
    """Predicate and bundle of such a plan, all issued at one moment, before any run began."""
    at = datetime.now(UTC).replace(microsecond=0)

    def make(**changes: Any) -> tuple[dict[str, Any], bytes]:
        plan = guarded_plan(**changes)
        result = issue(certify(plan, second_opinion=False), key, requester="tests", issued_at=at)
        return result.statement["predicate"], result.bundle

    return make
