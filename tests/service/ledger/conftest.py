"""A ledger with certified plans to reserve for, on a database of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Engine

from affidavit.accountants.privacy_filter import Cost
from affidavit.assessment import certify
from affidavit.plan import Plan
from affidavit.service.certificates.store import CertificateStore, PlanRequest, StoredCertificate
from affidavit.service.certificates.submit_plan import sign
from affidavit.service.core.database import writer
from affidavit.service.identity.actor import CommandContext
from affidavit.service.ledger.service import RunCost, cost_of_bundle
from affidavit.service.ledger.state import LedgerScope, StoredReservation
from affidavit.service.ledger.store import (
    CostedRun,
    LedgerStore,
    LockedReservation,
    get_reservation,
    lock_reservation,
)
from affidavit.trust import SigningKey

TOY = LedgerScope(dataset="toy", unit="example", adjacency="add_remove")
KEY = SigningKey.generate()


def call(key: str | None = None, actor: str = "ada", digest: str = "same") -> CommandContext:
    """A call now, with an idempotency key if one is given."""
    return CommandContext(
        actor=actor, at=datetime.now(UTC), idempotency_key=key, request_digest=digest
    )


def claim_of(certificate: StoredCertificate, **changes: Any) -> CostedRun:
    """The run of a certificate with its cost, as the ledger service computes it."""
    result = cost_of_bundle(certificate.bundle)
    assert isinstance(result, RunCost), result
    return CostedRun(
        **{
            "scope": LedgerScope(
                dataset=certificate.dataset or "",
                unit=result.unit,
                adjacency=result.adjacency,
            ),
            "certificate": certificate,
            "steps": result.steps,
            "cost": result.cost,
            "event": result.event,
            "certain": result.certain,
            **changes,
        }
    )


@dataclass
class Bench:
    """A ledger, the store beside it, and the plans to certify."""

    engine: Engine
    ledger: LedgerStore
    store: CertificateStore
    plan_of: Callable[..., Plan]

    def certified(self, key: SigningKey = KEY, **changes: Any) -> StoredCertificate:
        """The quick plan, with some fields changed, certified and kept."""
        plan = self.plan_of(**changes)
        assessment = certify(plan, second_opinion=False)
        now = datetime.now(UTC)
        created = sign(assessment, key, requester="ada", issued_at=now, previous=None)
        request = PlanRequest(requester="ada", received_at=now, content_type="json", body=b"{}")
        return self.store.add(created, key.public.as_record(), request)[0]

    def claim(self, **changes: Any) -> CostedRun:
        """A claim for the quick plan, certified."""
        return claim_of(self.certified(**changes))

    def commit(self, reservation_id: str) -> tuple[StoredReservation, bool]:
        """A reservation committed by hand."""
        return self.ledger.change(reservation_id, call(), LockedReservation.commit_usable)

    def settle(
        self, reservation_id: str, steps: int | None, record: str | None
    ) -> tuple[StoredReservation, bool]:
        """A reservation settled by hand."""
        settle = LockedReservation.settle_by_hand
        return self.ledger.change(reservation_id, call(), settle, steps, record)

    def release(self, reservation_id: str, reason: str) -> tuple[StoredReservation, bool]:
        """A reservation released."""
        return self.ledger.change(reservation_id, call(), LockedReservation.release, reason)

    def settled_by_record(
        self, reservation_id: str, steps: int, record: str, cost: Cost
    ) -> StoredReservation:
        """A reservation settled as by a run whose record the service has judged."""
        with writer(self.engine).begin() as connection:
            held = lock_reservation(connection, reservation_id, call())
            held.settle(steps, record, cost)
            return get_reservation(connection, reservation_id)

    def budget(self, epsilon: str = "8", delta: str = "0.0001", scope: LedgerScope = TOY) -> None:
        """Set a version of the budget."""
        self.ledger.set_budget(scope, epsilon, delta, "", call())


@pytest.fixture
def bench(engine: Engine, plan_of: Callable[..., Plan]) -> Bench:
    """A ledger without a budget yet."""
    return Bench(engine, LedgerStore(engine), CertificateStore(engine), plan_of)
