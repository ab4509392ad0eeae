"""DSSE with several signatures: one payload that each of several keys signs by itself.

Everything of ``envelope`` holds: the signatures are over the payload's type and its bytes
as they stand, in canonical base64. A key signs at most once, so that a threshold counts
keys; signatures are added one after another, where each private key is kept, and none of
them covers another.

Reference: secure-systems-lab/dsse, protocol.md, version 1, "multi-signatures".
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from affidavit.certificate.envelope import (
    BadEnvelope,
    exactly,
    pre_authentication_encoding,
    read_base64,
    read_text,
)
from affidavit.certificate.keys import PublicKey, SigningPort, by_id

MOST_SIGNATURES = 64


@dataclass(frozen=True, slots=True)
class Cosignature:
    """One key's signature."""

    key_id: str
    signature: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Cosigned:
    """A payload with as many signatures as were added so far, possibly none."""

    payload_type: str
    payload: bytes
    signatures: tuple[Cosignature, ...] = ()

    def signed_by(self, key: SigningPort) -> Cosigned:
        """This, with the signature of ``key`` in place of any that it made before."""
        made = Cosignature(key.key_id, key.sign(self.signed_bytes))
        others = [signature for signature in self.signatures if signature.key_id != key.key_id]
        return replace(self, signatures=(*others, made))

    def signers(self, keys: Iterable[PublicKey]) -> frozenset[str]:
        """The ids of those of ``keys`` whose signature is here and fits."""
        known = by_id(keys)
        return frozenset(
            signature.key_id
            for signature in self.signatures
            if signature.key_id in known
            and known[signature.key_id].accepts(signature.signature, self.signed_bytes)
        )

    @property
    def signed_bytes(self) -> bytes:
        """What every signature is over."""
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


def read_cosigned(document: Any) -> Cosigned:
    """The envelope of JSON data; raises ``BadEnvelope`` for any other shape."""
    fields = exactly(document, {"payload", "payloadType", "signatures"}, "the envelope")
    listed = fields["signatures"]
    if not isinstance(listed, list) or len(listed) > MOST_SIGNATURES:
        raise BadEnvelope(f"the envelope does not have a list of at most {MOST_SIGNATURES}")
    parts = [exactly(item, {"keyid", "sig"}, "a signature") for item in listed]
    signatures = tuple(
        Cosignature(read_text(part["keyid"], "keyid"), read_base64(part["sig"], "sig"))
        for part in parts
    )
    if len({signature.key_id for signature in signatures}) != len(signatures):
        raise BadEnvelope("a key has signed more than once")
    return Cosigned(
        payload_type=read_text(fields["payloadType"], "payloadType"),
        payload=read_base64(fields["payload"], "payload"),
        signatures=signatures,
    )
