"""Verification of a model's folder, offline: everything that does not fit is named.

1. statement: the claim is an in-toto statement that a trusted key signed inside its window
2. files: each file is as it was signed; none is missing, added, or something else than a file
3. certificate: it verifies under the trusted keys, and allows what was trained
4. record: its chain is unbroken, and the run did what the certificate allows
5. weights: the trained tensors are those with whose digest the record ends
6. audit: the canaries are those that the record committed to, and falsify nothing
7. claim: it says what follows from these files, and nothing else
8. signature of the manifest: ``model.sig``, where there is one, lists the same files

A step that cannot be taken, because what it reads was altered, is passed over: its file is named
already. The last step compares what ``model.sig`` lists; its signature is for ``model-signing``.

Guarantees
    * Only files below the folder are opened, none through a link, and nothing in them is executed.
    * A file that was changed, added, removed or replaced since the signing is a finding by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from affidavit.certificate.conformance import check_conformance
from affidavit.certificate.dsse import PAYLOAD_TYPE, BadEnvelope, Envelope, read_envelope
from affidavit.certificate.evidence.audit import (
    AUDITABLE,
    MOST_BYTES,
    Audit,
    BadCanaries,
    audit_canaries,
    read_canaries,
    read_losses,
)
from affidavit.certificate.evidence.claim import (
    CANARIES_FILE,
    CERTIFICATE_FILE,
    CLAIM_TYPE,
    FOLDER,
    LOSSES_FILE,
    RECORD_FILE,
    STATEMENT_FILE,
    Evidence,
    Training,
    claim_of,
)
from affidavit.certificate.evidence.manifest import (
    BadModel,
    Manifest,
    manifest_of,
    printable,
    read_model_file,
)
from affidavit.certificate.evidence.openssf import SIGNATURE_FILE, openssf_digests
from affidavit.certificate.evidence.weights import SUFFIX, digest_of_weights
from affidavit.certificate.keys import KeyRole, PublicKey, by_id, parse_instant
from affidavit.certificate.run_record import START, RecordEntry, decode_line, is_guarded
from affidavit.certificate.statement import STATEMENT_TYPE
from affidavit.certificate.status import check_status
from affidavit.certificate.verification import MAX_BUNDLE_BYTES, verify
from affidavit.certificate.verification_options import VerificationError, VerificationOptions
from affidavit.plan import MalformedPlan, PlanError, canonical_json, load_json

IGNORED_FILES: tuple[str, ...] = (STATEMENT_FILE,)
"""Files that the statement cannot list: itself."""
MOST_STATEMENT = 128 * 1024 * 1024
MOST_RECORD = 1024 * 1024 * 1024
FETCH = "Fetch the model again from whoever signed it."

STEPS = (
    "statement",
    "files",
    "certificate",
    "record",
    "weights",
    "audit",
    "claim",
    "manifest signature",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFinding:
    """One thing that does not fit: the file, a stable code, and what to do."""

    file: str
    code: str
    message: str
    remedy: str = FETCH

    def as_dict(self) -> dict[str, str]:
        """The finding as JSON data."""
        return {
            "file": self.file,
            "code": self.code,
            "message": self.message,
            "remedy": self.remedy,
        }


@dataclass(kw_only=True)
class ModelReport:
    """What the steps saw (name, detail), what does not fit, and ``claim``, the predicate."""

    claim: dict[str, Any] = field(default_factory=dict)
    steps: list[tuple[str, str]] = field(default_factory=list)
    findings: list[ModelFinding] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        """Whether everything fits, and every step was taken."""
        return not self.findings and len(self.steps) == len(STEPS)

    def passed(self, step: int, detail: str) -> None:
        """Note what ``step``, counted from 1, saw."""
        self.steps.append((STEPS[step - 1], detail))

    def add(self, file: str, code: str, message: str, remedy: str = FETCH) -> None:
        """Note what does not fit in ``file``."""
        self.findings.append(
            ModelFinding(file=printable(file), code=code, message=message, remedy=remedy)
        )


class NotTrained(Exception):
    """Certificate and record do not support a claim; ``finding`` names the file."""

    def __init__(self, file: str, code: str, message: str, remedy: str = FETCH) -> None:
        self.finding = ModelFinding(file=file, code=code, message=message, remedy=remedy)
        super().__init__(f"{file}: {message} {remedy}")


def verify_model(
    folder: Path,
    trusted: Iterable[PublicKey],
    *,
    now: datetime | None = None,
    options: VerificationOptions | None = None,
) -> ModelReport:
    """Hold ``folder`` against the claim in it, under ``trusted`` keys.

    Raises ``BadModel`` for a folder that cannot be read at all.
    """
    trusted, now = tuple(trusted), now or datetime.now(UTC)
    options, report = options or VerificationOptions(), ModelReport()
    manifest = manifest_of(folder, IGNORED_FILES)
    try:
        statement = _statement(folder, trusted, now)
    except NotTrained as failure:
        report.findings.append(failure.finding)
        return report
    report.claim = statement["predicate"]
    report.passed(1, f"signed at {report.claim['signed_at']}")
    _files(manifest, statement["subject"], report)
    signed = {item["name"]: item["digest"]["sha256"] for item in statement["subject"]}
    try:
        bundle, record, canaries, losses = (
            _content(folder, name, most, signed.get(name))
            for name, most in (
                (CERTIFICATE_FILE, MAX_BUNDLE_BYTES),
                (RECORD_FILE, MOST_RECORD),
                (CANARIES_FILE, MOST_BYTES),
                (LOSSES_FILE, MOST_BYTES),
            )
        )
        if bundle is None or record is None:
            return report
        evidence = Evidence(bundle=bundle, record=record, canaries=canaries, losses=losses)
        training = training_of(
            folder, manifest, trusted, evidence=evidence, now=now, options=options
        )
    except NotTrained as failure:
        report.findings.append(failure.finding)
        return report
    guarantee = training.certificate["guarantee"]
    report.passed(3, f"ε ≤ {guarantee['epsilon']['upper']} at δ = {guarantee['delta']['upper']}")
    steps = training.conformance
    report.passed(4, f"{steps.steps_charged} of {steps.steps_certified} certified steps charged")
    checked = training.weights_checked
    report.passed(5, "those of the record" if checked else "declared: not in safetensors")
    measured = training.audit
    report.passed(
        6,
        "the run had no canaries"
        if measured is None
        else f"{measured.right} of {measured.guesses} guesses right: ε ≥ {measured.epsilon:.4g} "
        f"with confidence {measured.confidence:g}",
    )
    _compare(report, claim_of(training, manifest))
    _openssf(folder, manifest, report)
    return report


def _statement(folder: Path, trusted: tuple[PublicKey, ...], now: datetime) -> dict[str, Any]:
    """Step 1; raises ``NotTrained``."""
    try:
        if (folder / FOLDER).is_symlink():
            raise OSError(0, f"{FOLDER} is a symbolic link")
        raw = read_model_file(folder / STATEMENT_FILE, MOST_STATEMENT)
        envelope = read_envelope(load_json(raw, MOST_STATEMENT).data)
    except OSError as error:
        raise NotTrained(
            STATEMENT_FILE,
            "no_claim",
            f"the model's claim cannot be read: {error.strerror}.",
            "Nothing is claimed about this model; ask its publisher for a signed one.",
        ) from None
    except (BadEnvelope, MalformedPlan, BadModel) as error:
        raise NotTrained(STATEMENT_FILE, "bad_claim", f"{error}") from None
    key = _signer(envelope, trusted)
    try:
        statement = load_json(envelope.payload, MOST_STATEMENT).data
        if (statement["_type"], statement["predicateType"]) != (STATEMENT_TYPE, CLAIM_TYPE):
            raise ValueError("another type")
        signed_at = parse_instant(statement["predicate"]["signed_at"])
        listed = {str(item["name"]): str(item["digest"]["sha256"]) for item in statement["subject"]}
        if len(listed) != len(statement["subject"]):
            raise ValueError("a file is listed twice")
    except (MalformedPlan, KeyError, TypeError, ValueError):
        raise NotTrained(
            STATEMENT_FILE, "bad_claim", "it is not a claim of the type dp-training/v1."
        ) from None
    if not key.covers(signed_at) or key.revoked_at(now) or signed_at > now:
        raise NotTrained(
            STATEMENT_FILE,
            "signer_outside_window",
            "its key might not sign when it was signed, or was revoked since.",
            "Have the model signed again with a current key.",
        )
    result: dict[str, Any] = statement
    return result


def _signer(envelope: Envelope, trusted: tuple[PublicKey, ...]) -> PublicKey:
    key = by_id(trusted).get(envelope.key_id)
    if key is None or key.development or not key.may(KeyRole.RUN):
        raise NotTrained(
            STATEMENT_FILE,
            "untrusted_signer",
            f"the key {printable(envelope.key_id[:16])} is not one that you trust to sign runs.",
            "Get the signer's keys or root keys over a channel that you trust.",
        )
    if envelope.payload_type != PAYLOAD_TYPE or not key.accepts(
        envelope.signature, envelope.signed_bytes
    ):
        raise NotTrained(
            STATEMENT_FILE, "altered_claim", "the signature does not fit: it was changed since."
        )
    return key


def _files(manifest: Manifest, subjects: list[Any], report: ModelReport) -> None:
    """Step 2."""
    signed = {str(item["name"]): item["digest"]["sha256"] for item in subjects}
    present = manifest.digests()
    altered = {name for name in signed.keys() & present.keys() if signed[name] != present[name]}
    for name in sorted(altered):
        report.add(name, "altered", "it is not as it was signed.")
    for obstacle in manifest.obstacles:
        report.add(obstacle.name, "not_a_file", f"{obstacle.reason}.", "Remove it.")
    others = {obstacle.name for obstacle in manifest.obstacles}
    for name in sorted(signed.keys() - present.keys() - others):
        report.add(name, "missing", "it was signed, and is not there.")
    for name in sorted(present.keys() - signed.keys()):
        report.add(name, "added", "it was not there when the model was signed.", "Remove it.")
    if not report.findings:
        report.passed(2, f"{len(present)} files as signed")


def training_of(
    folder: Path,
    manifest: Manifest,
    trusted: Iterable[PublicKey],
    *,
    evidence: Evidence,
    now: datetime,
    options: VerificationOptions,
) -> Training:
    """Steps 3 to 6: what certificate, record, weights and canaries prove; raises ``NotTrained``."""
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
        audit=_audited(evidence, header, predicate["guarantee"]),
    )


def _audited(evidence: Evidence, header: RecordEntry, guarantee: Mapping[str, Any]) -> Audit | None:
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
    except BadCanaries as error:
        raise NotTrained(CANARIES_FILE, "other_canaries", f"{error}") from None
    try:
        delta = float(guarantee["delta"]["upper"])
        result = audit_canaries(canaries, read_losses(evidence.losses), delta=delta)
    except BadCanaries as error:
        raise NotTrained(LOSSES_FILE, "bad_losses", f"{error}") from None
    if result.epsilon > float(guarantee["epsilon"]["upper"]):
        raise NotTrained(
            LOSSES_FILE,
            "falsified",
            f"{result.right} of {result.guesses} guesses are right: with confidence "
            f"{result.confidence:g} ε is at least {result.epsilon:.4g}, above the "
            f"{guarantee['epsilon']['upper']} certified.",
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


def _compare(report: ModelReport, derived: Mapping[str, Any]) -> None:
    """Step 7: what was signed is what follows from the files."""
    stated = {key: value for key, value in report.claim.items() if key != "signed_at"}
    if report.findings:
        return
    names = sorted(stated.keys() | derived.keys())
    wrong = [
        name
        for name in names
        if name not in stated
        or name not in derived
        or canonical_json(stated[name]) != canonical_json(derived[name])
    ]
    if wrong:
        report.add(
            STATEMENT_FILE,
            "other_claim",
            f"{', '.join(map(printable, wrong))}: it claims something else than follows from the "
            "certificate, the record and the files.",
            "Do not rely on the claim; ask its signer.",
        )
    else:
        report.passed(7, "follows from the files")


def _openssf(folder: Path, manifest: Manifest, report: ModelReport) -> None:
    """Step 8; a manifest without ``model.sig`` has nothing to compare."""
    present = manifest.digests()
    if SIGNATURE_FILE not in present:
        report.passed(8, f"there is no {SIGNATURE_FILE}")
        return
    try:
        content = read_model_file(folder / SIGNATURE_FILE, MOST_STATEMENT)
        listed = openssf_digests(content)
    except OSError as error:
        report.add(SIGNATURE_FILE, "unreadable", f"it cannot be read: {error.strerror}.")
        return
    except BadModel as error:
        report.add(SIGNATURE_FILE, error.code, error.message, error.remedy)
        return
    if listed != manifest.without(SIGNATURE_FILE).digests():
        report.add(SIGNATURE_FILE, "other_files", "it lists other files, or other digests.")
    else:
        report.passed(8, f"{SIGNATURE_FILE} lists the same {len(listed)} files")


def _content(folder: Path, name: str, most: int, sha256: str | None) -> bytes | None:
    """A file as it was signed, or None, where step 2 has named it; raises ``NotTrained``."""
    try:
        content = read_model_file(folder / name, most)
    except OSError:
        return None
    except BadModel as error:
        raise NotTrained(name, error.code, error.message, error.remedy) from None
    return content if hashlib.sha256(content).hexdigest() == sha256 else None
