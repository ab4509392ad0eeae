"""What the queue of runs refuses, beside what the ledger does.

>>> LeaseLost("the lease is lost.", "Stop.").code
'lease_lost'
"""

from __future__ import annotations

from affidavit.service.errors import DomainError


class UnknownRun(DomainError):
    """There is no run of that id."""

    code = "not_found"
    status = 404


class LeaseLost(DomainError):
    """The run is held under another fencing token, by another, or is over."""

    code = "lease_lost"


class RunNotStarted(DomainError):
    """What held when the run was asked for does not hold any more; the run is over."""

    code = "run_not_started"


class ReservationNotUsable(DomainError):
    """The reservation is of another certificate, not open any more, or another run's."""

    code = "reservation_not_usable"


class RecordRefused(DomainError):
    """A part of a run's record that does not follow the one before, or is too much."""

    code = "record_refused"


class BadProvenance(DomainError):
    """The provenance is unsigned, signed by nobody known, or about something else."""

    code = "bad_provenance"
    status = 422
