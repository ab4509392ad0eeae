"""Plans and certificates that these tests share."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from affidavit.assessment import certify
from affidavit.certificate.issuance import Certificate, issue
from affidavit.plan import Plan, plan_from
from affidavit.trust import SigningKey

MakePlan = Callable[..., Plan]


@pytest.fixture
def make_plan() -> MakePlan:
    """A shuffled plan of one epoch of all records, which takes moments, with fields changed."""

    def make(**changes: Any) -> Plan:
        document = {
            "version": 1,
            "name": "shuffled",
            "dataset": {"name": "e2e-nlg", "size": 41 * 1024},
            "adjacency": "zero_out",
            "sampling": {"scheme": "shuffled", "lot_size": 1024},
            "steps": 41,
            "releases": [
                {"name": "hidden", "count": 48, "clip_norm": 0.1, "noise_multiplier": 2.3395},
                {"name": "auxiliary", "clip_norm": 0.1, "noise_multiplier": 2.3395},
            ],
            "target": {"epsilon": 8, "delta": 8e-6},
        }
        document |= changes
        return plan_from({key: value for key, value in document.items() if value is not ...})

    return make


@pytest.fixture
def plan(make_plan: MakePlan) -> Plan:
    return make_plan()


@pytest.fixture(scope="session")
def key() -> SigningKey:
    return SigningKey.generate("test")


@pytest.fixture
def certificate(plan: Plan, key: SigningKey) -> Certificate:
    now = datetime.now(UTC).replace(microsecond=0)
    return issue(certify(plan, second_opinion=False), key, requester="tests", issued_at=now)
