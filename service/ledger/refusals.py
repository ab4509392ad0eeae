"""What the ledger refuses, beside what is refused everywhere (``affidavit.service.errors``).

>>> OverBudget("the run would pass the budget.", "Run fewer steps.").code
'over_budget'
"""

from __future__ import annotations

from affidavit.service.errors import DomainError


class NoBudget(DomainError):
    """There is no budget for this data set, unit and adjacency."""

    code = "no_budget"


class OverBudget(DomainError):
    """The filter does not admit the run beside what was spent."""

    code = "over_budget"


class CertificateNotUsable(DomainError):
    """The certificate is unknown, not certified, not current, not trusted, or about other data."""

    code = "certificate_not_usable"


class HeldByRun(DomainError):
    """The reservation is of a run, which alone commits, settles and releases it."""

    code = "held_by_run"


class NotAccountable(DomainError):
    """Nothing bounds the run's cost at the filter's orders."""

    code = "not_accountable"


class UnknownReservation(DomainError):
    """There is no reservation of that id."""

    code = "not_found"
    status = 404


class StepsAboveCertificate(DomainError):
    """More steps were run than the certificate is for."""

    code = "steps_above_certificate"


class RecordRequired(DomainError):
    """Fewer steps than certified are believed with a run record only."""

    code = "record_required"
    status = 422
