"""DSSE: an envelope whose signature covers the payload's type as well as its bytes.

What is signed is the pre-authentication encoding

    "DSSEv1" SP LEN(type) SP type SP LEN(payload) SP payload

so that a payload cannot be passed off as one of another type, and is read back verbatim:
verification never serialises anything anew. Base64 has to be the one canonical encoding of
its bytes, or two different files would carry one signature.

Reference: secure-systems-lab/dsse, protocol.md, version 1.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

from affidavit.certificate.keys import SigningPort
from affidavit.plan import digest_of

PAYLOAD_TYPE = "application/vnd.in-toto+json"


class BadEnvelope(Exception):
    """The document is not a DSSE envelope with one signature in canonical form."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """A signed payload: its type, its bytes and one signature."""

    payload_type: str
    payload: bytes
    key_id: str
    signature: bytes

    def as_document(self) -> dict[str, Any]:
        """The envelope as JSON data."""
        return {
            "payload": base64.b64encode(self.payload).decode("ascii"),
            "payloadType": self.payload_type,
            "signatures": [
                {
                    "keyid": self.key_id,
                    "sig": base64.b64encode(self.signature).decode("ascii"),
                }
            ],
        }

    @property
    def digest(self) -> str:
        """sha256 of the envelope's RFC 8785 canonical JSON, by which others refer to it."""
        return digest_of(self.as_document())

    @property
    def signed_bytes(self) -> bytes:
        """What the signature is over."""
        return pre_authentication_encoding(self.payload_type, self.payload)


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """DSSE's PAE.

    >>> pre_authentication_encoding("http://example.com/HelloWorld", b"hello world")
    b'DSSEv1 29 http://example.com/HelloWorld 11 hello world'
    """
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def seal(payload: bytes, key: SigningPort, payload_type: str = PAYLOAD_TYPE) -> Envelope:
    """Sign ``payload``, an in-toto statement unless it is said to be of another type."""
    signature = key.sign(pre_authentication_encoding(payload_type, payload))
    return Envelope(
        payload_type=payload_type, payload=payload, key_id=key.key_id, signature=signature
    )


def read_envelope(document: Any) -> Envelope:
    """The envelope of JSON data; raises ``BadEnvelope`` for any other shape."""
    fields = exactly(document, {"payload", "payloadType", "signatures"}, "the envelope")
    signatures = fields["signatures"]
    if not isinstance(signatures, list) or len(signatures) != 1:
        raise BadEnvelope("the envelope does not have exactly one signature")
    signature = exactly(signatures[0], {"keyid", "sig"}, "the signature")
    return Envelope(
        payload_type=read_text(fields["payloadType"], "payloadType"),
        payload=read_base64(fields["payload"], "payload"),
        key_id=read_text(signature["keyid"], "keyid"),
        signature=read_base64(signature["sig"], "sig"),
    )


def exactly(document: Any, names: set[str], what: str) -> dict[str, Any]:
    """``document`` as an object with exactly those fields.

    Raises ``BadEnvelope``, calling it ``what``.
    """
    if not isinstance(document, dict) or document.keys() != names:
        raise BadEnvelope(f"{what} does not have exactly the fields {', '.join(sorted(names))}")
    return document


def read_text(value: Any, what: str) -> str:
    """``value`` as a string. Raises ``BadEnvelope``, calling it ``what``."""
    if not isinstance(value, str):
        raise BadEnvelope(f"{what} is not a string")
    return value


def read_base64(value: Any, what: str) -> bytes:
    """The bytes of canonical base64. Raises ``BadEnvelope``, calling it ``what``."""
    text = read_text(value, what)
    try:
        decoded = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadEnvelope(f"{what} is not base64") from None
    if base64.b64encode(decoded).decode("ascii") != text:
        raise BadEnvelope(f"{what} is not in canonical base64")
    return decoded
