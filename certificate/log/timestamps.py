"""RFC 3161 timestamps under a checkpoint: a third party's word on when it existed.

A time-stamping authority signs the hash of a checkpoint, as its log signed it, together with
its own time. Under a signed note its reply is one more signature line, which others pass over::

    — timestamp base64(key hash || DER TimeStampResp)

where the key hash is the first four bytes of ``SHA-256("timestamp" || 0x0A || 0xFF || "rfc3161")``.
An authority stamps whatever it gets: its word is about a time alone, and not, as a witness's, that
the log only grew. Needs ``pip install 'affidavit[timestamps]'``.

References: RFC 3161; C2SP, signed-note.md.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from cryptography.x509 import load_pem_x509_certificates

from affidavit.certificate.log.note import Note, NoteSignature, parse_note

NAME = "timestamp"
KEY_HASH = hashlib.sha256(f"{NAME}\n".encode() + b"\xffrfc3161").digest()[:4]


class BadTimestamp(Exception):
    """The timestamp is not one of these bytes by a trusted authority."""


def verify_timestamp(content: bytes, reply: bytes, roots: bytes) -> datetime:
    """The time of a valid timestamp of ``content`` by an authority below a root in ``roots``.

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
    """The line of an authority's reply, to be put under the checkpoint that it is of."""
    return str(Note("", (NoteSignature(NAME, KEY_HASH, reply),))).lstrip("\n")


def stamped_at(note: str, roots: bytes) -> datetime | None:
    """When an authority below ``roots`` first stamped the checkpoint ``note``; None if none did.

    A stamp of anything else, or by anybody else, counts for nothing. Raises ``BadNote``.
    """
    parsed = parse_note(note)
    origin = parsed.text.partition("\n")[0]
    signed = Note(parsed.text, tuple(line for line in parsed.signatures if line.name == origin))
    times = []
    for line in parsed.signatures:
        if (line.name, line.key_hash) == (NAME, KEY_HASH):
            try:
                times.append(verify_timestamp(str(signed).encode(), line.signature, roots))
            except BadTimestamp:
                continue
    return min(times, default=None)
