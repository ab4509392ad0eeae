"""What the ledger refuses, with a code that stays and what to do about it.

>>> OverBudget("the run would pass the budget.", "Run fewer steps.").code
'over_budget'
"""

from __future__ import annotations

from typing import ClassVar


class LedgerRefusal(Exception):
    """Base of all of them; ``status`` is that of the HTTP answer."""

    code: ClassVar[str] = "refused"
    status: ClassVar[int] = 409

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message} {remedy}")
        self.message = message
        self.remedy = remedy


class NoBudget(LedgerRefusal):
    """There is no budget for this data set, unit and adjacency."""

    code = "no_budget"


class OverBudget(LedgerRefusal):
    """The filter does not admit the run beside what was spent."""

    code = "over_budget"


class CertificateNotUsable(LedgerRefusal):
    """The certificate is unknown, not certified, not current, not trusted, or about other data."""

    code = "certificate_not_usable"


class NotAccountable(LedgerRefusal):
    """Nothing bounds the run's cost at the filter's orders."""

    code = "not_accountable"


class UnknownReservation(LedgerRefusal):
    """There is no reservation of that id."""

    code = "not_found"
    status = 404


class WrongState(LedgerRefusal):
    """The reservation was already released, committed or settled, or not committed yet."""

    code = "wrong_state"


class StepsAboveCertificate(LedgerRefusal):
    """More steps were run than the certificate is for."""

    code = "steps_above_certificate"


class RecordRequired(LedgerRefusal):
    """Fewer steps than certified are believed with a run record only."""

    code = "record_required"
    status = 422


class IdempotencyKeyReused(LedgerRefusal):
    """The key came before, with another request."""

    code = "idempotency_key_reused"
    status = 422
