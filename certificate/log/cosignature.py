"""Cosignatures and timestamps: witnesses attest that a log only grew, authorities attest a time.

A witness receives a log's new checkpoint with a proof that it extends its last one (C2SP's
``add-checkpoint``)::

    old 900
    base64 hash
    base64 hash

    example.com/log
    1204
    ...

The response is one signature line with a time, which is appended to the checkpoint. The signed text
begins with ``cosignature/v1``, so that it is neither a checkpoint nor a certificate; the key hash
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
import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.x509 import load_pem_x509_certificates

from affidavit.certificate.dsse import encode_base64
from affidavit.certificate.keys.key import SigningPort
from affidavit.certificate.log.merkle_tree import HASH_BYTES, ProofError, verify_consistency
from affidavit.certificate.log.note import (
    BadNote,
    Checkpoint,
    Note,
    NoteKey,
    NoteSignature,
    UnknownSigner,
    VerifierKey,
    bytes_of,
    open_note,
    parse_note,
    read_checkpoint,
)

MAX_HASHES = 63
_OLD = re.compile(r"old (0|[1-9][0-9]{0,15})")

log = logging.getLogger("affidavit.witness")


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


def cosign(note: str, name: str, key: SigningPort, at: datetime) -> str:
    """Return the signature line of a witness with ``name`` for ``note``."""
    seconds = int(at.timestamp())
    signature = key.sign(_message(parse_note(note).text, seconds))
    raw = WitnessKey.of(name, key).key_hash + seconds.to_bytes(8, "big") + signature
    return f"— {name} {encode_base64(raw)}\n"


def _message(text: str, seconds: int) -> bytes:
    return f"cosignature/v1\ntime {seconds}\n{text}".encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Addition:
    """A checkpoint to be witnessed, and the consistency proof from size ``old``."""

    old: int
    proof: tuple[bytes, ...]
    note: str
    checkpoint: Checkpoint


def read_addition(raw: bytes) -> Addition:
    """Parse an ``add-checkpoint`` request; raises ``BadNote``."""
    try:
        head, blank, note = raw.decode().partition("\n\n")
    except UnicodeDecodeError:
        raise BadNote("the request is not UTF-8") from None
    first, *lines = head.split("\n")
    old = _OLD.fullmatch(first)
    if old is None or not blank or len(lines) > MAX_HASHES:
        raise BadNote("the request is not 'old SIZE', a proof, a blank line and a checkpoint")
    proof = tuple(bytes_of(line, "the proof") for line in lines)
    if any(len(item) != HASH_BYTES for item in proof):
        raise BadNote("the proof contains an invalid hash")
    checkpoint = read_checkpoint(note)
    if int(old[1]) > checkpoint.size:
        raise BadNote("the old size exceeds the checkpoint's")
    return Addition(old=int(old[1]), proof=proof, note=note, checkpoint=checkpoint)


class UnknownLog(Exception):
    """This witness is not configured for the log."""


class NotSigned(Exception):
    """None of the log's keys signed the checkpoint."""


class SizeConflict(Exception):
    """The witness's last checkpoint of the log has another size: ``size`` leaves."""

    def __init__(self, size: int) -> None:
        super().__init__(str(size))
        self.size = size


def require_signed(request: Addition, logs: Iterable[NoteKey]) -> None:
    """Require that a key of a witnessed log signed the checkpoint.

    Raises ``UnknownLog``, ``NotSigned``, or ``BadNote`` for an invalid signature.
    """
    origin = request.checkpoint.origin
    keys = [key for key in logs if key.name == origin]
    if not keys:
        raise UnknownLog(origin)
    try:
        open_note(request.note, keys)
    except UnknownSigner:
        raise NotSigned(origin) from None


def require_extension(last: Checkpoint | None, request: Addition) -> None:
    """Require that the checkpoint extends ``last``, the newest that this witness has seen.

    Raises ``SizeConflict`` and ``ProofError``; a fork is logged as critical.
    """
    size = 0 if last is None else last.size
    if request.old != size:
        raise SizeConflict(size)
    if last is None or last.size == 0:
        if request.proof:
            raise ProofError("a proof from the empty log must be empty")
        return
    new = request.checkpoint
    if new.size == last.size and new.root_hash != last.root_hash:
        log.critical("THE LOG %s WAS FORKED: two roots for %d leaves", new.origin, new.size)
        raise SizeConflict(size)
    try:
        verify_consistency(
            first=last.size,
            second=new.size,
            first_root=last.root_hash,
            second_root=new.root_hash,
            proof=request.proof,
        )
    except ProofError as error:
        log.critical(
            "THE LOG %s DOES NOT EXTEND its last witnessed checkpoint: %s", new.origin, error
        )
        raise


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
