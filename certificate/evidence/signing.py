"""Signing a model's folder: certificate and run record go into it, and the claim about all of it.

Nothing is written unless certificate, record and weights support the claim and every file has a
portable name. The claim is written last, so that a folder in which the signing was interrupted
has either no claim or one that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from affidavit.certificate.atomic_write import write_atomically
from affidavit.certificate.dsse import sign_envelope
from affidavit.certificate.evidence.claim import (
    FOLDER,
    STATEMENT_FILE,
    Evidence,
    claim_of,
    statement_of,
)
from affidavit.certificate.evidence.manifest import BadModel, manifest_of, require_portable
from affidavit.certificate.evidence.openssf import SIGNATURE_FILE, sign_openssf
from affidavit.certificate.evidence.training import training_of
from affidavit.certificate.evidence.verification import IGNORED_FILES
from affidavit.certificate.keys import PublicKey, SigningPort, format_instant
from affidavit.certificate.verification_options import VerificationOptions
from affidavit.plan import canonical_json


def sign_model(
    folder: Path,
    evidence: Evidence,
    key: SigningPort,
    *,
    trusted: Iterable[PublicKey],
    now: datetime,
    openssf_key: EllipticCurvePrivateKey | None = None,
) -> dict[str, Any]:
    """Write ``evidence`` and the signed claim into ``folder``; returns the claim.

    ``trusted`` are the keys under which the certificate must verify. Raises ``BadModel``,
    ``NotTrained`` where the evidence does not support a claim, ``KeyFailure`` and ``OSError``.
    """
    before = manifest_of(folder, IGNORED_FILES)
    require_portable(before)
    if openssf_key is None and SIGNATURE_FILE in before.digests():
        raise BadModel(
            "stale_model_signature",
            f"the folder has a {SIGNATURE_FILE}, which does not cover what is added now.",
            "Give --openssf-key to sign it anew, or remove the file.",
        )
    training = training_of(
        folder,
        before,
        trusted,
        evidence=evidence,
        now=now,
        options=VerificationOptions(),
    )
    (folder / STATEMENT_FILE).unlink(missing_ok=True)
    (folder / FOLDER).mkdir(exist_ok=True)
    for name, content in evidence.files().items():
        write_atomically(folder / name, content)
    if openssf_key is not None:
        listed = manifest_of(folder, (*IGNORED_FILES, SIGNATURE_FILE))
        name = folder.resolve().name
        signature = sign_openssf(listed, name, (*IGNORED_FILES, SIGNATURE_FILE), openssf_key)
        write_atomically(folder / SIGNATURE_FILE, signature)
    manifest = manifest_of(folder, IGNORED_FILES)
    claim = claim_of(training, manifest)
    statement = statement_of(claim, manifest.files, format_instant(now))
    envelope = sign_envelope(canonical_json(statement), key)
    write_atomically(folder / STATEMENT_FILE, canonical_json(envelope.as_document()))
    return claim
