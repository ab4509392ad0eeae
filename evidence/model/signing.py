"""Sign a model's folder: write the certificate, the run record and the signed claim into it.

Nothing is written unless certificate, record and weights support the claim and every file has a
portable name. The claim is written last, so that a folder whose signing was interrupted has either
no claim or one that does not verify.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from affidavit.certificate.verification.verification_result import VerificationOptions
from affidavit.evidence.model.claim import (
    FOLDER,
    STATEMENT_FILE,
    Evidence,
    Training,
    claim_of,
    statement_of,
)
from affidavit.evidence.model.claim_forms import BOM, CARD
from affidavit.evidence.model.exports import (
    BOM_FILE,
    CARD_FILE,
    ExportContent,
    add_to_card,
    bill_of_materials,
    has_section,
)
from affidavit.evidence.model.manifest import (
    SIGNATURE_FILE,
    BadModel,
    Manifest,
    ModelFile,
    manifest_of,
    read_model_file,
    require_portable,
    sign_openssf,
)
from affidavit.evidence.model.training_check import training_of
from affidavit.evidence.model.verification import IGNORED_FILES
from affidavit.plan import canonical_json, printable
from affidavit.trust import (
    SigningPort,
    TrustedKeys,
    format_instant,
    sign_envelope,
    write_atomically,
)

MAX_CARD_BYTES = 16 * 1024 * 1024


def sign_model(
    folder: Path,
    evidence: Evidence,
    key: SigningPort,
    *,
    trusted: TrustedKeys,
    now: datetime,
    openssf_key: EllipticCurvePrivateKey | None = None,
    exports: Iterable[str] = (),
    options: VerificationOptions | None = None,
) -> dict[str, Any]:
    """Write ``evidence`` and the signed claim into ``folder``, and return the claim.

    ``trusted`` are the keys under which the certificate must verify, as ``options`` require; it is
    dated ``now``. ``exports`` are members of
    ``EXPORTS``; existing exports in the folder are rewritten. Raises ``UnsupportedClaim`` if the
    evidence does not support a claim, ``BadModel``, ``KeyFailure`` and ``OSError``.
    """
    before = manifest_of(folder, IGNORED_FILES)
    require_portable(before)
    if openssf_key is None and SIGNATURE_FILE in before.digests():
        raise BadModel(
            "stale_model_signature",
            f"the folder has a {SIGNATURE_FILE}, which does not cover the added files.",
            "Give --openssf-key to sign it anew, or remove the file.",
        )
    training = training_of(
        folder, before, trusted, evidence=evidence, options=options or VerificationOptions()
    )
    of = _build_export_content(folder, before, training, evidence, format_instant(now))
    exported_files = _build_exports(folder, set(exports), of)
    (folder / STATEMENT_FILE).unlink(missing_ok=True)
    (folder / FOLDER).mkdir(exist_ok=True)
    for name, content in evidence.files().items():
        write_atomically(folder / name, content)
    for name, content in exported_files.items():
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


def _build_export_content(
    folder: Path, before: Manifest, training: Training, evidence: Evidence, at: str
) -> ExportContent:
    """Return the content of the exports; ``evidence`` need not be in the folder yet."""
    own = {CARD_FILE, BOM_FILE, SIGNATURE_FILE}
    digests = {name: digest for name, digest in before.digests().items() if name not in own}
    for name, content in evidence.files().items():
        digests[name] = hashlib.sha256(content).hexdigest()
    files = tuple(ModelFile(name=name, sha256=digests[name]) for name in sorted(digests))
    return ExportContent(
        model=printable(folder.resolve().name) or "model",
        claim=claim_of(training, Manifest(files=files)),
        dataset=training.certificate["plan"].get("dataset") or {},
        files=files,
        at=at,
    )


def _build_exports(folder: Path, chosen: set[str], of: ExportContent) -> dict[str, bytes]:
    """Return the content of each export by its file; raises ``BadModel``, ``OSError``."""
    result = {}
    if BOM in chosen or (folder / BOM_FILE).is_file():
        result[BOM_FILE] = bill_of_materials(of)
    card = folder / CARD_FILE
    content = read_model_file(card, MAX_CARD_BYTES) if card.is_file() else b""
    if CARD in chosen or has_section(content):
        result[CARD_FILE] = add_to_card(content, of)
    return result
