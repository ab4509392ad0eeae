"""Policies and waivers as they are stored: DSSE envelopes over in-toto statements.

The subject is the document by its digest, the predicate the document itself, and the
predicate's type says which kind, so that a waiver cannot pass for a policy. Every read checks
digest, form and signature.
"""

from __future__ import annotations

from typing import Any, Literal

from affidavit.certificate.dsse import PAYLOAD_TYPE, BadEnvelope, read_envelope, sign_envelope
from affidavit.certificate.keys import KeyRole, PublicKey, SigningPort
from affidavit.plan import MalformedPlan, canonical_json, digest_of, load_json

Kind = Literal["policy", "waiver"]

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPES: dict[Kind, str] = {
    "policy": "https://affidavit.dev/dp-policy/v1",
    "waiver": "https://affidavit.dev/dp-waiver/v1",
}
LARGEST = 1024 * 1024


class BadSignedDocument(Exception):
    """The envelope is not signed, or does not contain the expected document."""


def sign_document(kind: Kind, document: dict[str, Any], key: SigningPort) -> bytes:
    """The envelope of ``document``, signed by ``key``, as bytes to store."""
    payload = canonical_json(_statement(kind, document))
    return canonical_json(sign_envelope(payload, key).as_document())


def open_document(kind: Kind, envelope: bytes, key: PublicKey) -> dict[str, Any]:
    """The document that ``key`` signed in ``envelope``; raises ``BadSignedDocument``."""
    try:
        result = read_envelope(load_json(envelope, LARGEST).data)
        if result.payload_type != PAYLOAD_TYPE or result.key_id != key.key_id:
            raise BadSignedDocument("the envelope is of another type or key")
        if not key.may(KeyRole.CERTIFICATE):
            raise BadSignedDocument("the key is not for certificates and policies")
        if not key.accepts(result.signature, result.signed_bytes):
            raise BadSignedDocument("the signature does not fit")
        statement = load_json(result.payload, LARGEST).data
    except (BadEnvelope, MalformedPlan) as error:
        raise BadSignedDocument(str(error)) from None
    if not isinstance(statement, dict) or not isinstance(statement.get("predicate"), dict):
        raise BadSignedDocument(f"the statement is not about a {kind}")
    document: dict[str, Any] = statement["predicate"]
    if statement != _statement(kind, document):
        raise BadSignedDocument(f"the statement is not about this {kind}")
    return document


def _statement(kind: Kind, document: dict[str, Any]) -> dict[str, Any]:
    algorithm, _, value = digest_of(document).partition(":")
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": kind, "digest": {algorithm: value}}],
        "predicateType": PREDICATE_TYPES[kind],
        "predicate": document,
    }
