"""What certificate, run record, weights and canaries prove together about a training.

Signing and verifying a model both begin here, so that nothing is signed that does not verify.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from affidavit.certificate.conformance import check_conformance
from affidavit.certificate.dsse import read_envelope
from affidavit.certificate.evidence.audit import (
    AUDITABLE,
    Audit,
    BadCanaries,
    Canaries,
    audit_canaries,
    read_canaries,
    read_losses,
)
from affidavit.certificate.evidence.claim import (
    CANARIES_FILE,
    CERTIFICATE_FILE,
    LOSSES_FILE,
    RECORD_FILE,
    Evidence,
    Training,
)
from affidavit.certificate.evidence.manifest import BadModel, Manifest
from affidavit.certificate.evidence.weights import SUFFIX, digest_of_weights
from affidavit.certificate.execution import certified_plan
from affidavit.certificate.keys import PublicKey, parse_instant
from affidavit.certificate.run_record import START, RecordEntry, decode_line, is_guarded
from affidavit.certificate.status import check_status
from affidavit.certificate.verification import MAX_BUNDLE_BYTES, verify
from affidavit.certificate.verification_options import VerificationError, VerificationOptions
from affidavit.plan import AuditCanaries, PlanError, load_json

FETCH = "Fetch the model again from whoever signed it."


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFinding:
    """One thing that does not fit: the file, a stable code, and what to do."""

    file: str
    code: str
    message: str
    remedy: str = FETCH

    def as_dict(self) -> dict[str, str]:
        """The finding as JSON data."""
        return asdict(self)


class NotTrained(Exception):
    """Certificate and record do not support a claim; ``finding`` names the file."""

    def __init__(self, file: str, code: str, message: str, remedy: str = FETCH) -> None:
        self.finding = ModelFinding(file=file, code=code, message=message, remedy=remedy)
        super().__init__(f"{file}: {message} {remedy}")


def training_of(
    folder: Path,
    manifest: Manifest,
    trusted: Iterable[PublicKey],
    *,
    evidence: Evidence,
    now: datetime,
    options: VerificationOptions,
) -> Training:
    """Steps 3 to 6 of the verification; raises ``NotTrained``."""
    trusted, bundle, record = tuple(trusted), evidence.bundle, evidence.record
    try:
        header = decode_line(record.split(b"\n", 1)[0] + b"\n", START)
        started_at = parse_instant(header["started_at"])
    except (ValueError, KeyError, TypeError):
        raise NotTrained(RECORD_FILE, "bad_record", "it does not begin as a run record.") from None
    try:
        predicate = _certified(bundle, trusted, started_at, now, options)
    except VerificationError as error:
        raise NotTrained(CERTIFICATE_FILE, error.code, error.message, error.remedy) from None
    try:
        report = check_conformance(record, predicate)
    except (PlanError, ValueError) as error:
        raise NotTrained(CERTIFICATE_FILE, "unreadable_plan", f"{error}") from None
    if not report.conformant:
        first = next(item for item in report.findings if not item.noted)
        raise NotTrained(
            RECORD_FILE,
            first.code,
            f"line {first.line}: {first.message}",
            "The certificate's guarantee is not that of this run: train it again as certified.",
        )
    checked, untrained = _weights(folder, manifest, header, record)
    return Training(
        certificate=predicate,
        conformance=report,
        weights_checked=checked,
        untrained=untrained,
        audit=_audited(
            evidence, header, predicate["guarantee"], certified_plan(predicate).canaries
        ),
    )


def _audited(
    evidence: Evidence,
    header: RecordEntry,
    guarantee: Mapping[str, Any],
    planned: AuditCanaries | None,
) -> Audit | None:
    """What the run's canaries prove; raises ``NotTrained``, also where they are left out."""
    committed = header.get("canaries")
    if committed is None and evidence.canaries is None and evidence.losses is None:
        return None
    if evidence.canaries is None or evidence.losses is None:
        raise NotTrained(
            CANARIES_FILE if evidence.canaries is None else LOSSES_FILE,
            "no_canaries",
            "the run was begun with canaries, and what they prove is not here.",
            "Give the canaries and the losses that the run left: --canaries, --losses.",
        )
    if guarantee["adjacency"] not in AUDITABLE:
        raise NotTrained(
            CANARIES_FILE,
            "not_auditable",
            f"under {guarantee['adjacency']} neighbours differ in more than a record's presence.",
            "Audit a plan under add_remove or zero_out.",
        )
    try:
        canaries = read_canaries(evidence.canaries)
        if canaries.commitment != committed:
            raise BadCanaries("they are not the canaries that the run record committed to.")
        if planned is not None and canaries != Canaries.of(
            canaries.nonce, planned.count, planned.guesses
        ):
            raise BadCanaries("they are not as many, or as many guesses, as the plan says.")
    except BadCanaries as error:
        raise NotTrained(CANARIES_FILE, "other_canaries", f"{error}") from None
    try:
        delta = float(guarantee["delta"]["upper"])
        result = audit_canaries(canaries, read_losses(evidence.losses), delta=delta)
    except BadCanaries as error:
        raise NotTrained(LOSSES_FILE, "bad_losses", f"{error}") from None
    if result.falsifies(guarantee):
        raise NotTrained(
            LOSSES_FILE,
            "falsified",
            f"{result.right} of {result.guesses} guesses are right: with confidence "
            f"{result.confidence:g} ε is at least {result.epsilon:.4g} and, of Gaussian noise, μ "
            f"at least {result.mu:.4g}. Certified is ε ≤ {guarantee['epsilon']['upper']}"
            + ("." if guarantee["mu"] is None else f", μ ≤ {guarantee['mu']}."),
            "Do not use the model: the training did not keep its certificate.",
        )
    return result


def _certified(
    bundle: bytes,
    trusted: tuple[PublicKey, ...],
    started_at: datetime,
    now: datetime,
    options: VerificationOptions,
) -> dict[str, Any]:
    """The predicate of a certificate that verifies now, or did until it expired after the run.

    Raises ``VerificationError``.
    """
    try:
        return verify(bundle, trusted, now=now, options=options).predicate
    except VerificationError as error:
        if error.code != "expired":
            raise
    # Its key counts today; its status is that of today, what follows the dates that of the run.
    then = replace(options, status=None, require_status=False)
    predicate = verify(bundle, trusted, now=started_at, options=then).predicate
    envelope = read_envelope(load_json(bundle, MAX_BUNDLE_BYTES).data["envelope"])
    check_status(envelope, predicate, trusted, options, now)
    return predicate


def _weights(
    folder: Path, manifest: Manifest, header: RecordEntry, record: bytes
) -> tuple[bool, tuple[str, ...]]:
    """Whether the weights are the record's, and the tensors beside them; raises ``NotTrained``."""
    files = [item.name for item in manifest.files if item.name.endswith(SUFFIX)]
    if not files or is_guarded(header):  # a guard's digest of the weights is its framework's
        return False, ()
    last = load_json(record.rstrip(b"\n").rpartition(b"\n")[2]).data
    try:
        result = digest_of_weights([folder / name for name in files], header["tensors"])
    except OSError as error:
        raise NotTrained(files[0], "unreadable", f"it cannot be read: {error.strerror}.") from None
    except BadModel as error:
        raise NotTrained(files[0], error.code, error.message, error.remedy) from None
    if result.digest != last["parameters"]:
        raise NotTrained(
            files[0],
            "other_weights",
            "the trained tensors are not those with whose digest the run record ends.",
            "Put the weights of this run into the folder.",
        )
    return True, result.others
