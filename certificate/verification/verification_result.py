"""A verification: its numbered steps, a verifier's further requirements, and its outcome.

``bundle_verification`` has the steps; those about the log are with what they check, and use this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from affidavit.certificate.assessment import html_table
from affidavit.certificate.keys.key import PublicKey, by_id
from affidavit.certificate.log.entry import Consistency
from affidavit.certificate.policy.document import Policy
from affidavit.certificate.verification.trust_policy import TrustPolicy
from affidavit.plan import CodedError

STEPS = (
    "size and form",
    "payload type",
    "key",
    "signature",
    "statement",
    "key window",
    "plan",
    "accountants and policy",
    "validity",
    "inclusion",
    "checkpoint",
    "consistency",
    "status",
)


class VerificationError(CodedError):
    """The step that rejected a bundle, by number and name."""

    def __init__(self, step: int, code: str, message: str, remedy: str) -> None:
        super().__init__(code, message, remedy)
        self.step = step
        self.step_name = STEPS[step - 1]

    def __str__(self) -> str:
        return f"step {self.step} ({self.step_name}): {self.message} {self.remedy}"


class SeenCheckpoint(NamedTuple):
    """The last checkpoint seen of a log, and when the verifier first saw it, where it knows."""

    note: str
    at: datetime | None = None


class SeenStatus(NamedTuple):
    """The newest status list seen: its number, its digest and its key, where that is known."""

    sequence: int
    digest: str
    key_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerificationOptions:
    """A verifier's requirements beyond those for every certificate; none by default.

    ``accountants`` are the lowest versions accepted, by engine; ``policies`` the digests
    of the policies accepted, and ``floors`` policies whose every rule the certificate must
    keep, whichever it was issued under. With ``require_log`` a bundle that was never logged, or
    whose log cannot be linked to the last checkpoint seen, is rejected; ``log_origin``
    names the only log accepted. ``seen`` are the last checkpoints seen, by origin, and
    ``consistency`` the proof that links one of them to the bundle's.
    ``status`` is a signed status list and ``status_seen`` the newest lists seen before, by issuer.
    With ``require_status`` it cannot be left out. ``trust`` says which log counts, who witnesses
    it, and how fresh all of it has to be; under it nothing of that is left unchecked. A use
    that is over was at ``used_at``: the certificate may have expired since.
    """

    accountants: Mapping[str, str] = field(default_factory=dict)
    policies: frozenset[str] = frozenset()
    floors: tuple[Policy, ...] = ()
    require_log: bool = False
    log_origin: str | None = None
    seen: Mapping[str, SeenCheckpoint] = field(default_factory=dict)
    consistency: Consistency | None = None
    status: bytes | None = None
    require_status: bool = False
    status_seen: Mapping[str, SeenStatus | tuple[int, str]] = field(default_factory=dict)
    trust: TrustPolicy | None = None
    used_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Verifier:
    """Who verifies: the keys that they trust, what they require, and when it is."""

    trusted: tuple[PublicKey, ...]
    options: VerificationOptions
    now: datetime

    def key(self, key_id: str) -> PublicKey | None:
        """The trusted key of that id."""
        return by_id(self.trusted).get(key_id)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class VerifiedCertificate:
    """A bundle that passed every step: its statement and what each step saw.

    ``unchecked`` are the steps that had nothing to look at. ``checkpoint`` is the log's
    signed note where it is consistent with the last one seen and should now be kept
    instead of it; None where there is none to keep.
    """

    statement: dict[str, Any]
    steps: tuple[tuple[int, str, str], ...]
    unchecked: tuple[int, ...] = ()
    checkpoint: str | None = None

    def __repr__(self) -> str:
        return f"<verified: {self.predicate['verdict']}, {self.predicate['certificate_id']}>"

    def _repr_html_(self) -> str:
        return html_table(self.steps, headings=("", "step", "what it saw"), title=repr(self)[1:-1])

    @property
    def predicate(self) -> dict[str, Any]:
        """The certificate's content."""
        predicate: dict[str, Any] = self.statement["predicate"]
        return predicate
