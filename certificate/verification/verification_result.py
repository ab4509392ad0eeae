"""The steps, options, errors and result of a verification.

``bundle_verification`` and ``inclusion_verification`` perform the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from affidavit.certificate.policy.document import Policy
from affidavit.plan import html_table
from affidavit.trust import TrustedKeys, TrustPolicy
from affidavit.trust.log import Consistency


class SeenCheckpoint(NamedTuple):
    """The last checkpoint seen of a log, and when the verifier first saw it, if known."""

    note: str
    at: datetime | None = None


class SeenStatus(NamedTuple):
    """The newest status list seen: its number, its digest and its key, if known."""

    sequence: int
    digest: str
    key_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerificationOptions:
    """A verifier's requirements beyond those for every certificate; none by default.

    ``accountants`` are the lowest accepted versions by engine, ``policies`` the digests of the
    accepted policies, and ``floors`` policies whose rules the certificate must meet, whichever
    policy it was issued under. With ``require_log`` a bundle is rejected that was never logged, or
    whose log cannot be linked to the last checkpoint seen; ``log_origin`` names the only accepted
    log. ``seen`` are the last checkpoints seen, by origin, ``consistency`` is the proof that
    links one of them to the bundle's, and ``remember`` is called with the log's signed note if it
    is the newest. ``status`` is a signed status list, required by
    ``require_status``, and ``status_seen`` are the newest lists seen, by issuer.
    ``used_at`` is the time of a past use, after which the certificate may have expired.
    """

    accountants: Mapping[str, str] = field(default_factory=dict)
    policies: frozenset[str] = frozenset()
    floors: tuple[Policy, ...] = ()
    require_log: bool = False
    log_origin: str | None = None
    seen: Mapping[str, SeenCheckpoint] = field(default_factory=dict)
    consistency: Consistency | None = None
    remember: Callable[[str], None] | None = None
    status: bytes | None = None
    require_status: bool = False
    status_seen: Mapping[str, SeenStatus] = field(default_factory=dict)
    used_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Verifier:
    """The trusted keys, the requirements and the current time of a verification."""

    trusted: TrustedKeys
    options: VerificationOptions
    now: datetime

    @property
    def policy(self) -> TrustPolicy | None:
        """The trust policy under which the keys are trusted."""
        return self.trusted.policy


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class VerifiedCertificate:
    """A bundle that passed every step: its statement and the result of each step.

    ``unchecked`` are the steps that had nothing to check. ``checkpoint`` is the log's signed note
    if it should be stored as the last one seen, or None.
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
