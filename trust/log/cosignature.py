"""Cosignatures and timestamps: witnesses attest that a log only grew, authorities attest a time.

A witness cosigns a log's new checkpoint if it extends the last one that it saw. Its cosignature is
one signature line with a time, which is appended to the checkpoint. The signed text begins with
``cosignature/v1``, so that it is neither a checkpoint nor a certificate; the key hash
is computed with 0x04. A witness's verifier key is written ``name+hash+base64(0x04 || key)``.

A time-stamping authority (RFC 3161) signs the hash of a checkpoint with its log's signature,
together with its own time. In a signed note its reply is one more signature line, which other
verifiers ignore::

    — timestamp base64(key hash || DER TimeStampResp)

where the key hash is the first four bytes of ``SHA-256("timestamp" || 0x0A || 0xFF || "rfc3161")``.
An authority stamps anything: it attests only a time, and not, like a witness, that the log only
grew. Needs ``pip install 'affidavit[timestamps]'``.

References: C2SP, tlog-witness.md, tlog-cosignature.md and signed-note.md; RFC 3161.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from datetime import UTC, datetime

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.x509 import load_pem_x509_certificates

from affidavit.trust.key import SigningPort
from affidavit.trust.log.note import (
    BadNote,
    Note,
    NoteSignature,
    VerifierKey,
    parse_note,
)


class WitnessKey(VerifierKey):
    """A key that cosigns notes."""

    __slots__ = ()
    kind = b"\x04"

    @classmethod
    def of(cls, name: str, key: SigningPort) -> WitnessKey:
        """Return the key of a witness that signs with ``key``."""
        return cls(name, key.public.key.public_bytes_raw())

    def cosigned(self, note: Note) -> datetime | None:
        """Return when this witness first cosigned ``note``, or None.

        Raises ``BadNote`` for an invalid cosignature in its name.
        """
        times = [
            self._verify(line, note.text)
            for line in note.signatures
            if (line.name, line.key_hash) == (self.name, self.key_hash)
        ]
        return min(times, default=None)

    def _verify(self, line: NoteSignature, text: str) -> datetime:
        try:
            seconds = int.from_bytes(line.signature[:8], "big")
            key = Ed25519PublicKey.from_public_bytes(self.raw)
            key.verify(line.signature[8:], _message(text, seconds))
            return datetime.fromtimestamp(seconds, UTC)
        except (InvalidSignature, ValueError, OverflowError, OSError):
            raise BadNote(f"the cosignature of {line.name} does not match the text") from None


def _message(text: str, seconds: int) -> bytes:
    return f"cosignature/v1\ntime {seconds}\n{text}".encode()


TIMESTAMP_NAME = "timestamp"
TIMESTAMP_KEY_HASH = hashlib.sha256(f"{TIMESTAMP_NAME}\n".encode() + b"\xffrfc3161").digest()[:4]


class BadTimestamp(Exception):
    """The timestamp is not a trusted authority's of the content."""


def verify_timestamp(content: bytes, reply: bytes, roots: bytes) -> datetime:
    """Return the time of a timestamp of ``content`` by an authority below a root in ``roots``.

    ``roots`` are certificates in PEM. Raises ``BadTimestamp``.
    """
    from rfc3161_client import VerificationError, VerifierBuilder, decode_timestamp_response

    try:
        response = decode_timestamp_response(reply)
        builder = VerifierBuilder()
        for certificate in load_pem_x509_certificates(roots):
            builder = builder.add_root_certificate(certificate)
        builder.build().verify_message(response, content)
    except (ValueError, VerificationError) as error:
        raise BadTimestamp(f"the timestamp is not valid: {error}") from None
    moment: datetime = response.tst_info.gen_time
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def timestamp_line(reply: bytes) -> str:
    """Return the signature line of an authority's reply, to append to its checkpoint."""
    line = NoteSignature(TIMESTAMP_NAME, TIMESTAMP_KEY_HASH, reply)
    return str(Note("", (line,))).lstrip("\n")


def stamped_at(note: str, roots: bytes) -> datetime | None:
    """Return when an authority below ``roots`` first stamped the checkpoint ``note``, or None.

    Invalid and untrusted timestamps are ignored. Raises ``BadNote``.
    """
    parsed = parse_note(note)
    origin = parsed.text.partition("\n")[0]
    signed = Note(parsed.text, tuple(line for line in parsed.signatures if line.name == origin))
    times = []
    for line in parsed.signatures:
        if (line.name, line.key_hash) == (TIMESTAMP_NAME, TIMESTAMP_KEY_HASH):
            with suppress(BadTimestamp):
                times.append(verify_timestamp(str(signed).encode(), line.signature, roots))
    return min(times, default=None)
