"""What was decided agrees with the log; a decision that was slipped in does not."""

from __future__ import annotations

from typing import Any

from affidavit.service.audit.audit import audit
from affidavit.service.core.database import snapshot
from tests.service.certificates.conftest import Company
from tests.service.certificates.test_approvals import insert_approval


def findings(company: Company) -> list[str]:
    with snapshot(company.engine) as connection:
        return [str(item) for item in audit(connection, ())]


def test_every_decision_is_in_the_log_and_a_forged_one_is_found(
    company: Company, plan: Any, pending: dict[str, Any]
) -> None:
    company.decide("bea", pending, comment="ü")
    company.revoke("dan", company.decide("cem", pending).json(), reason="é")
    other = company.submit(plan(steps=11)).json()
    company.decide("bea", other, decision="reject", comment="no")
    assert findings(company) == []
    third = company.submit(plan(steps=12)).json()
    insert_approval(company, third, approver="token:nobody")
    assert len(findings(company)) == 1
