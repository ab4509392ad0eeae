"""DSSE envelopes: a signature covers the payload's type as well as its bytes.

The signed bytes are the pre-authentication encoding

    "DSSEv1" SP LEN(type) SP type SP LEN(payload) SP payload

so a payload cannot pass as one of another type. Verification reads the bytes as signed and
never serialises anything again. Base64 must be canonical, or two different files could carry
one signature.

A ``CosignedEnvelope`` collects signatures one after another, where each private key is kept; a
key signs at most once, so a threshold counts keys. An ``Envelope`` has exactly one.

Reference: secure-systems-lab/dsse, protocol.md, version 1.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

from affidavit.certificate.keys import PublicKey, SigningPort, by_id
from affidavit.plan import digest_of

PAYLOAD_TYPE = "application/vnd.in-toto+json"
MOST_SIGNATURES = 64


class BadEnvelope(Exception):
    """The document is not a DSSE envelope in canonical form."""


@dataclass(frozen=True, slots=True)
class EnvelopeSignature:
    """One key's signature."""

    key_id: str
    signature: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class CosignedEnvelope:
    """A payload with as many signatures as were added so far, possibly none."""

    payload_type: str
    payload: bytes
    signatures: tuple[EnvelopeSignature, ...] = ()

    def signed_by(self, key: SigningPort) -> Self:
        """This envelope with the signature of ``key``, which replaces an earlier one of it."""
        created = EnvelopeSignature(key.key_id, key.sign(self.signed_bytes))
        others = [signature for signature in self.signatures if signature.key_id != key.key_id]
        return replace(self, signatures=(*others, created))

    def signers(self, keys: Iterable[PublicKey]) -> frozenset[str]:
        """The ids of the ``keys`` with a valid signature on this envelope."""
        known = by_id(keys)
        return frozenset(
            signature.key_id
            for signature in self.signatures
            if signature.key_id in known
            and known[signature.key_id].accepts(signature.signature, self.signed_bytes)
        )

    @property
    def signed_bytes(self) -> bytes:
        """The bytes that every signature covers."""
        return pre_authentication_encoding(self.payload_type, self.payload)

    def as_document(self) -> dict[str, Any]:
        """The envelope as JSON data."""
        return {
            "payload": base64.b64encode(self.payload).decode("ascii"),
            "payloadType": self.payload_type,
            "signatures": [
                {
                    "keyid": signature.key_id,
                    "sig": base64.b64encode(signature.signature).decode("ascii"),
                }
                for signature in self.signatures
            ],
        }


class Envelope(CosignedEnvelope):
    """A payload with one signature."""

    __slots__ = ()

    @property
    def key_id(self) -> str:
        """The id of the key that signed."""
        return self.signatures[0].key_id

    @property
    def signature(self) -> bytes:
        """The signature."""
        return self.signatures[0].signature

    @property
    def digest(self) -> str:
        """sha256 of the envelope's RFC 8785 canonical JSON, by which others refer to it."""
        return digest_of(self.as_document())


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """DSSE's PAE.

    >>> pre_authentication_encoding("http://example.com/HelloWorld", b"hello world")
    b'DSSEv1 29 http://example.com/HelloWorld 11 hello world'
    """
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def sign_envelope(payload: bytes, key: SigningPort, payload_type: str = PAYLOAD_TYPE) -> Envelope:
    """Sign ``payload``, an in-toto statement unless it is said to be of another type."""
    return Envelope(payload_type=payload_type, payload=payload).signed_by(key)


def read_envelope(document: Any) -> Envelope:
    """The envelope of JSON data; raises ``BadEnvelope`` for any other shape."""
    fields = _fields(document)
    if len(fields["signatures"]) != 1:
        raise BadEnvelope("the envelope must have exactly one signature")
    return Envelope(**fields)


def read_cosigned(document: Any) -> CosignedEnvelope:
    """The envelope of JSON data; raises ``BadEnvelope`` for any other shape."""
    return CosignedEnvelope(**_fields(document))


def statement_in(bundle: bytes) -> dict[str, Any]:
    """The statement in a bundle that was verified or written before; not verified here."""
    statement: dict[str, Any] = json.loads(read_envelope(json.loads(bundle)["envelope"]).payload)
    return statement


def _fields(document: Any) -> dict[str, Any]:
    fields = _exactly(document, {"payload", "payloadType", "signatures"}, "the envelope")
    listed = fields["signatures"]
    if not isinstance(listed, list) or len(listed) > MOST_SIGNATURES:
        raise BadEnvelope(f"the envelope does not have a list of at most {MOST_SIGNATURES}")
    parts = [_exactly(item, {"keyid", "sig"}, "a signature") for item in listed]
    signatures = tuple(
        EnvelopeSignature(_text(part["keyid"], "keyid"), _base64(part["sig"], "sig"))
        for part in parts
    )
    if len({signature.key_id for signature in signatures}) != len(signatures):
        raise BadEnvelope("a key signed more than once")
    return {
        "payload_type": _text(fields["payloadType"], "payloadType"),
        "payload": _base64(fields["payload"], "payload"),
        "signatures": signatures,
    }


def _exactly(document: Any, names: set[str], what: str) -> dict[str, Any]:
    if not isinstance(document, dict) or document.keys() != names:
        raise BadEnvelope(f"{what} does not have exactly the fields {', '.join(sorted(names))}")
    return document


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BadEnvelope(f"{what} is not a string")
    return value


def _base64(value: Any, what: str) -> bytes:
    text = _text(value, what)
    try:
        decoded = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadEnvelope(f"{what} is not base64") from None
    if base64.b64encode(decoded).decode("ascii") != text:
        raise BadEnvelope(f"{what} is not in canonical base64")
    return decoded
