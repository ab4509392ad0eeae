"""``model.sig``: the manifest of a model, signed as the package ``model-signing`` reads it.

The file is a Sigstore bundle around a DSSE envelope around the manifest's in-toto statement.
``model-signing`` takes ECDSA keys on the curves P-256, P-384 and P-521, and no Ed25519, so that
this signature has a key of its own beside the one that signs certificates:

    openssl ecparam -name prime256v1 -genkey -noout -out model-key.pem
    model_signing verify key FOLDER --signature FOLDER/model.sig --public_key model-key.pub

Affidavit's own statement lists ``model.sig`` among its files, so that a changed one is noticed by
``affidavit verify-model`` too, which does not need its key.

References: Sigstore bundle v0.3; DSSE v1; model_signing 1.1.1, ``sign_ec_key.py``.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256, SHA384, SHA512, HashAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from affidavit.certificate.dsse import PAYLOAD_TYPE, pre_authentication_encoding
from affidavit.certificate.evidence.manifest import OPENSSF_TYPE, BadModel, Manifest
from affidavit.certificate.key_store import require_private
from affidavit.certificate.keys import KeyFailure
from affidavit.plan import MalformedPlan, canonical_json, load_json

SIGNATURE_FILE = "model.sig"
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
MOST_BYTES = 64 * 1024 * 1024
HASHES: dict[str, HashAlgorithm] = {
    "secp256r1": SHA256(),
    "secp384r1": SHA384(),
    "secp521r1": SHA512(),
}
"""The hash that belongs to a curve's signatures."""


def read_ec_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The private key of a PEM file, on a curve that ``model-signing`` takes.

    Raises ``KeyFailure``.
    """
    try:
        require_private(path)
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise KeyFailure(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError):
        raise KeyFailure(f"{path} is not an unencrypted private key in PEM.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in HASHES:
        raise KeyFailure(
            f"{path}: model-signing takes keys on the curves P-256, P-384 and P-521; make one with "
            "openssl ecparam -name prime256v1 -genkey -noout."
        )
    return key


def sign_openssf(
    manifest: Manifest, model: str, ignored: tuple[str, ...], key: ec.EllipticCurvePrivateKey
) -> bytes:
    """The bytes of ``model.sig``; ``ignored`` are paths that the manifest leaves out."""
    payload = canonical_json(manifest.as_openssf(model, ignored))
    signature = key.sign(
        pre_authentication_encoding(PAYLOAD_TYPE, payload), ec.ECDSA(HASHES[key.curve.name])
    )
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    bundle = {
        "mediaType": BUNDLE_TYPE,
        "verificationMaterial": {
            "publicKey": {"hint": hashlib.sha256(pem).hexdigest()},
            "tlogEntries": [],
        },
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode("ascii"),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode("ascii"), "keyid": ""}],
        },
    }
    return json.dumps(bundle).encode()


def openssf_digests(content: bytes) -> dict[str, str]:
    """The files that a ``model.sig`` lists, with their sha256; its signature is not checked.

    Raises ``BadModel`` for anything that is not such a file.
    """
    try:
        envelope = load_json(content, MOST_BYTES).data["dsseEnvelope"]
        payload = base64.b64decode(envelope["payload"], validate=True)
        return _resources(load_json(payload, MOST_BYTES).data)
    except (MalformedPlan, KeyError, TypeError, ValueError):
        raise BadModel(
            "bad_model_signature",
            f"{SIGNATURE_FILE} is not a signature of model-signing over files and their sha256.",
            "Sign the model again with --openssf-key, or remove the file before signing.",
        ) from None


def _resources(statement: Any) -> dict[str, str]:
    if statement["predicateType"] != OPENSSF_TYPE:
        raise ValueError("another predicate")
    resources = statement["predicate"]["resources"]
    result = {item["name"]: item["digest"] for item in resources if item["algorithm"] == "sha256"}
    if len(result) != len(resources):
        raise ValueError("another digest, or a file that is listed twice")
    return result
