"""Verify a model's folder offline and name every mismatch.

1. statement: the claim is an in-toto statement that a trusted key signed inside its window
2. files: every file is as it was signed; none is missing or added, and all are regular files
3. certificate: it verifies under the trusted keys
4. record: its chain is unbroken, and the run conforms to the certificate
5. weights: the trained tensors have the digest at the end of the record
6. audit: the canaries are those that the record committed to, and do not refute the guarantee
7. claim: it is exactly what follows from these files
8. signature of the manifest: ``model.sig``, if there is one, lists the same files

A step is skipped if its file was altered: step 2 has named it. The last step compares the files
that ``model.sig`` lists; ``model-signing`` verifies its signature.

Guarantees
    * Only files below the folder are opened, none through a link, and nothing in them is executed.
    * A file that was changed, added, removed or replaced since the signing is a finding by name.
      Git's own files are not signed, and a step reports their presence.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from affidavit.certificate.verification.bundle_verification import MAX_BUNDLE_BYTES
from affidavit.certificate.verification.verification_result import VerificationOptions
from affidavit.evidence.model.canary_audit import MAX_BYTES
from affidavit.evidence.model.claim import (
    CANARIES_FILE,
    CERTIFICATE_FILE,
    CLAIM_TYPE,
    FOLDER,
    LOSSES_FILE,
    RECORD_FILE,
    STATEMENT_FILE,
    Evidence,
    claim_of,
)
from affidavit.evidence.model.manifest import (
    IGNORED,
    SIGNATURE_FILE,
    BadModel,
    Manifest,
    manifest_of,
    openssf_digests,
    read_model_file,
)
from affidavit.evidence.model.training_check import (
    FETCH_REMEDY,
    ModelFinding,
    UnsupportedClaim,
    training_of,
)
from affidavit.plan import MalformedPlan, canonical_json, load_json, printable
from affidavit.trust import (
    BadEnvelope,
    KeyRole,
    PublicKey,
    TrustedKeys,
    parse_instant,
    read_envelope,
)
from affidavit.trust.dates import fault_of_signature
from affidavit.trust.dsse import (
    PAYLOAD_TYPE,
    STATEMENT_TYPE,
    Envelope,
)

IGNORED_FILES: tuple[str, ...] = (STATEMENT_FILE,)
"""The file that the statement cannot list: itself."""
MAX_STATEMENT_BYTES = 128 * 1024 * 1024
MAX_RECORD_BYTES = 1024 * 1024 * 1024

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


@dataclass(kw_only=True)
class ModelReport:
    """The results of the steps as (name, detail), the mismatches, and the ``claim``."""

    claim: dict[str, Any] = field(default_factory=dict)
    steps: list[tuple[str, str]] = field(default_factory=list)
    findings: list[ModelFinding] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        """Whether every step was performed without a mismatch."""
        return not self.findings and len(self.steps) == len(STEPS)

    def add_step(self, step: int, detail: str) -> None:
        """Add the result of ``step``, counted from 1."""
        self.steps.append((STEPS[step - 1], detail))

    def add_finding(self, file: str, code: str, message: str, remedy: str = FETCH_REMEDY) -> None:
        """Add a mismatch in ``file``."""
        self.findings.append(
            ModelFinding(file=printable(file), code=code, message=message, remedy=remedy)
        )


def verify_model(
    folder: Path, trusted: TrustedKeys, *, options: VerificationOptions | None = None
) -> ModelReport:
    """Verify ``folder`` against its claim, under ``trusted`` keys and their policy.

    The training lies in the past, so that its certificate's checkpoint may have any age.
    Raises ``BadModel`` if the folder cannot be read.
    """
    options, report = options or VerificationOptions(), ModelReport()
    manifest = manifest_of(folder, IGNORED_FILES)
    try:
        statement = _read_statement(folder, trusted)
    except UnsupportedClaim as failure:
        report.findings.append(failure.finding)
        return report
    report.claim = statement["predicate"]
    report.add_step(1, f"signed at {report.claim['signed_at']}")
    unsigned = [name for name in IGNORED if os.path.lexists(folder / name)]
    signed = {item["name"]: item["digest"]["sha256"] for item in statement["subject"]}
    _compare_files(manifest, signed, unsigned, report)
    try:
        bundle, record, canaries, losses = (
            _read_signed(folder, name, max_bytes, signed.get(name))
            for name, max_bytes in (
                (CERTIFICATE_FILE, MAX_BUNDLE_BYTES),
                (RECORD_FILE, MAX_RECORD_BYTES),
                (CANARIES_FILE, MAX_BYTES),
                (LOSSES_FILE, MAX_BYTES),
            )
        )
        if bundle is None or record is None:
            return report
        evidence = Evidence(bundle=bundle, record=record, canaries=canaries, losses=losses)
        training = training_of(folder, manifest, trusted, evidence=evidence, options=options)
    except UnsupportedClaim as failure:
        report.findings.append(failure.finding)
        return report
    guarantee = training.certificate["guarantee"]
    report.add_step(3, f"ε ≤ {guarantee['epsilon']['upper']} at δ = {guarantee['delta']['upper']}")
    run = training.conformance
    report.add_step(4, f"{run.steps_charged} of {run.steps_certified} certified steps charged")
    checked = training.weights_checked
    report.add_step(5, "those of the record" if checked else "declared: not all in safetensors")
    audit = training.audit
    report.add_step(
        6,
        "the run had no canaries"
        if audit is None
        else f"{audit.right} of {audit.guesses} guesses right: ε ≥ {audit.epsilon:.4g} "
        f"with confidence {audit.confidence:g}",
    )
    _compare_claim(report, claim_of(training, manifest))
    _compare_model_signature(folder, manifest, report)
    return report


def _read_statement(folder: Path, trusted: TrustedKeys) -> dict[str, Any]:
    """Read and verify the signed claim (step 1); raises ``UnsupportedClaim``."""
    try:
        if (folder / FOLDER).is_symlink():
            raise OSError(0, f"{FOLDER} is a symbolic link")
        raw = read_model_file(folder / STATEMENT_FILE, MAX_STATEMENT_BYTES)
        envelope = read_envelope(load_json(raw, MAX_STATEMENT_BYTES).data)
        if canonical_json(envelope.as_document()) != raw:  # no digest covers other bytes
            raise BadEnvelope("it is not in the format of `affidavit sign-model`.")
    except OSError as error:
        raise UnsupportedClaim(
            STATEMENT_FILE,
            "no_claim",
            f"the model's claim cannot be read: {error.strerror}.",
            "Nothing is claimed about this model; ask its publisher for a signed one.",
        ) from None
    except (BadEnvelope, MalformedPlan, BadModel) as error:
        raise UnsupportedClaim(STATEMENT_FILE, "bad_claim", f"{error}") from None
    key = _find_signer(envelope, trusted)
    try:
        statement = load_json(envelope.payload, MAX_STATEMENT_BYTES).data
        if (statement["_type"], statement["predicateType"]) != (STATEMENT_TYPE, CLAIM_TYPE):
            raise ValueError("another type")
        signed_at = parse_instant(statement["predicate"]["signed_at"])
        listed = [(item["name"], item["digest"]["sha256"]) for item in statement["subject"]]
        if not all(isinstance(text, str) for item in listed for text in item):
            raise TypeError("a name or a digest is no text")
        if len(dict(listed)) != len(listed):
            raise ValueError("a file is listed twice")
    except (MalformedPlan, KeyError, TypeError, ValueError):
        raise UnsupportedClaim(
            STATEMENT_FILE, "bad_claim", "it is not a dp-training/v1 claim."
        ) from None
    if fault_of_signature(key, signed_at, now=trusted.now()) is not None:
        raise UnsupportedClaim(
            STATEMENT_FILE,
            "signer_outside_window",
            "its key was not allowed to sign at that time, or has been revoked since, or its date "
            "is in the future.",
            "Check this machine's clock; if it is right, have the model signed again with a "
            "current key.",
        )
    result: dict[str, Any] = statement
    return result


def _find_signer(envelope: Envelope, trusted: TrustedKeys) -> PublicKey:
    key = trusted.key(envelope.key_id)
    if key is None or key.development or not key.has_role(KeyRole.RUN):
        raise UnsupportedClaim(
            STATEMENT_FILE,
            "untrusted_signer",
            f"the key {printable(envelope.key_id[:16])} is not trusted to sign runs.",
            "Get the signer's keys or root keys over a channel that you trust.",
        )
    if envelope.payload_type != PAYLOAD_TYPE or not key.accepts(
        envelope.signature, envelope.signed_bytes
    ):
        raise UnsupportedClaim(
            STATEMENT_FILE,
            "altered_claim",
            "the signature does not match: the claim was changed after signing.",
        )
    return key


def _compare_files(
    manifest: Manifest, signed: Mapping[str, str], unsigned: list[str], report: ModelReport
) -> None:
    """Compare the files with the signed ones (step 2); ``unsigned`` are git's own."""
    present = manifest.digests()
    altered = {name for name in signed.keys() & present.keys() if signed[name] != present[name]}
    for name in sorted(altered):
        report.add_finding(name, "altered", "it has changed since it was signed.")
    for obstacle in manifest.obstacles:
        report.add_finding(obstacle.name, "not_a_file", f"{obstacle.reason}.", "Remove it.")
    others = {obstacle.name for obstacle in manifest.obstacles}
    for name in sorted(signed.keys() - present.keys() - others):
        report.add_finding(name, "missing", "it was signed but is missing.")
    for name in sorted(present.keys() - signed.keys()):
        report.add_finding(name, "added", "it was added after the model was signed.", "Remove it.")
    if not report.findings:
        git = f"; git's own are not signed: {', '.join(unsigned)}" if unsigned else ""
        report.add_step(2, f"{len(present)} files as signed{git}")


def _compare_claim(report: ModelReport, derived: Mapping[str, Any]) -> None:
    """Compare the signed claim with the ``derived`` one (step 7)."""
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
        report.add_finding(
            STATEMENT_FILE,
            "other_claim",
            f"{', '.join(map(printable, wrong))}: the claim does not follow from the certificate, "
            "the record and the files.",
            "Do not rely on the claim; ask its signer.",
        )
    else:
        report.add_step(7, "follows from the files")


def _compare_model_signature(folder: Path, manifest: Manifest, report: ModelReport) -> None:
    """Compare the files with those of ``model.sig``, if it exists (step 8)."""
    if SIGNATURE_FILE not in manifest.digests():
        report.add_step(8, f"{SIGNATURE_FILE} not found")
        return
    try:
        content = read_model_file(folder / SIGNATURE_FILE, MAX_STATEMENT_BYTES)
        listed = openssf_digests(content)
    except OSError as error:
        report.add_finding(SIGNATURE_FILE, "unreadable", f"it cannot be read: {error.strerror}.")
        return
    except BadModel as error:
        report.add_finding(SIGNATURE_FILE, error.code, error.message, error.remedy)
        return
    if listed != manifest.without(SIGNATURE_FILE).digests():
        report.add_finding(SIGNATURE_FILE, "other_files", "its list of files or digests differs.")
    else:
        report.add_step(8, f"{SIGNATURE_FILE} lists the same {len(listed)} files")


def _read_signed(folder: Path, name: str, max_bytes: int, sha256: str | None) -> bytes | None:
    """Read a file, or return None if it is not as signed; raises ``UnsupportedClaim``."""
    try:
        content = read_model_file(folder / name, max_bytes)
    except OSError:
        return None
    except BadModel as error:
        raise UnsupportedClaim(name, error.code, error.message, error.remedy) from None
    return content if hashlib.sha256(content).hexdigest() == sha256 else None
