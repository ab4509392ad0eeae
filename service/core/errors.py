"""Errors of the domain, and malformed request bodies.

::

    DomainError            status, code, message and remedy; answered as a problem document
    ├── WrongState         409
    └── ...                each resource has its own, beside the code that raises them
    AccountingUnavailable  503
    ├── AccountingTimeout
    ├── AccountingFailed
    └── TooBusy
    MalformedRequest       400 (413 if too large), with a reason for each mistake
    OperatorError          ends a command with one line
    └── SettingsError      ...

>>> WrongState("The run is settled.", "Settled runs cannot be stopped.").code
'wrong_state'

Routes need not catch them: the application converts them to problem documents
(``affidavit.service.core.problems``).
"""

from __future__ import annotations

from typing import ClassVar

from affidavit.plan import PlanError, Reason


class OperatorError(Exception):
    """An error that only the operator can fix, in a message that says how; it ends a command."""


class SettingsError(OperatorError):
    """An invalid setting; the message names it and describes valid values."""


class DomainError(Exception):
    """Base of errors of well-formed requests that cannot be carried out.

    ``code`` is stable and part of the API; ``status`` is the status of the HTTP response.
    """

    code: str = "refused"
    status: ClassVar[int] = 409

    def __init__(
        self, message: str, remedy: str, *, code: str | None = None, pointer: str = ""
    ) -> None:
        super().__init__(f"{message} {remedy}")
        self.message = message
        self.remedy = remedy
        self.pointer = pointer
        self.code = code or self.code

    @property
    def reason(self) -> Reason:
        """The error as the reason of a problem document; ``pointer`` names the field."""
        return Reason(
            code=self.code, pointer=self.pointer, message=self.message, remedy=self.remedy
        )


class WrongState(DomainError):
    """The resource's state no longer allows the change, or does not allow it yet."""

    code = "wrong_state"


class IdempotencyKeyReused(DomainError):
    """The key was already used for a different request."""

    code = "idempotency_key_reused"
    status = 422


class OtherTeam(DomainError):
    """The request names a team that does not own this, or that the caller is not in."""

    code = "other_team"


class AccountingUnavailable(Exception):
    """Base of errors of accounting that did not finish; nothing was stored."""


class AccountingTimeout(AccountingUnavailable):
    """The accounting exceeded its time limit and was killed."""


class AccountingFailed(AccountingUnavailable):
    """The accounting process died."""


class TooBusy(AccountingUnavailable):
    """Too many plans are waiting."""


class MalformedRequest(PlanError):
    """The request body is not well formed; ``code`` is the problem's code."""

    def __init__(self, *reasons: Reason, code: str = "malformed_request") -> None:
        super().__init__(*reasons)
        self.code = code


class NotLogged(Exception):
    """The log has no checkpoint yet, or lacks the leaf or size that the text names."""


class LogDamaged(Exception):
    """The stored log contradicts itself or a checkpoint, as the text says.

    Nothing is signed until it is repaired: restore the database from a backup that is at least as
    new as the last checkpoint, and run ``affidavit audit verify``.
    """


class PolicyTampered(Exception):
    """A policy or waiver in the database does not match its signature."""
