"""Witnessing another log: what it sends, and the cosignature that it gets.

A log sends its new checkpoint with the proof that it continues the one that the witness
has (C2SP's ``add-checkpoint``)::

    old 900
    base64 hash
    base64 hash

    example.com/log
    1204
    ...

The witness signs, with the time, that as far as it has seen the log has only grown. What
it signs begins with ``cosignature/v1``, so that it is neither a checkpoint of its own log
nor a certificate, although one key signs all three; the key hash is computed with 0x04.

References: C2SP, tlog-witness.md and tlog-cosignature.md.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, datetime

from affidavit.certificate.keys import PublicKey, SigningPort
from affidavit.certificate.log.checkpoint import Checkpoint, read_checkpoint
from affidavit.certificate.log.note import (
    BadNote,
    NoteSignature,
    decoded,
    parse_note,
    require_name,
    written,
)
from affidavit.certificate.log.tree import HASH_BYTES

COSIGNATURE = b"\x04"
MOST_HASHES = 63
_OLD = re.compile(r"old (0|[1-9][0-9]{0,15})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Addition:
    """A checkpoint that a log wants witnessed, and the proof since size ``old``."""

    old: int
    proof: tuple[bytes, ...]
    note: str
    checkpoint: Checkpoint


def read_addition(raw: bytes) -> Addition:
    """What ``raw`` asks for; raises ``BadNote``."""
    try:
        head, blank, note = raw.decode().partition("\n\n")
    except UnicodeDecodeError:
        raise BadNote("the request is not UTF-8") from None
    first, *lines = head.split("\n")
    old = _OLD.fullmatch(first)
    if old is None or not blank or len(lines) > MOST_HASHES:
        raise BadNote("the request is not 'old SIZE', a proof, a blank line and a checkpoint")
    proof = tuple(decoded(line, "the proof") for line in lines)
    if any(len(item) != HASH_BYTES for item in proof):
        raise BadNote("the proof holds what is no hash")
    checkpoint = read_checkpoint(note)
    if int(old[1]) > checkpoint.size:
        raise BadNote("the old size is larger than the checkpoint's")
    return Addition(old=int(old[1]), proof=proof, note=note, checkpoint=checkpoint)


def cosign(note: str, name: str, key: SigningPort, at: datetime) -> str:
    """The signature line of a witness of that name under ``note``."""
    require_name(name)
    seconds = int(at.timestamp())
    signature = key.sign(_message(parse_note(note).text, seconds))
    raw = _key_hash(name, key.public) + seconds.to_bytes(8, "big") + signature
    return f"— {name} {written(raw)}\n"


def cosigned(note: str, name: str, key: PublicKey) -> datetime | None:
    """When the witness of that name cosigned ``note``; None if it did not.

    Raises ``BadNote`` for a line that says it is this witness's and is not.
    """
    found = parse_note(note)
    for line in found.signatures:
        if (line.name, line.key_hash) == (name, _key_hash(name, key)):
            return _checked(line, found.text, key)
    return None


def _checked(line: NoteSignature, text: str, key: PublicKey) -> datetime:
    seconds = int.from_bytes(line.signature[:8], "big")
    if len(line.signature) != 72 or not key.accepts(line.signature[8:], _message(text, seconds)):
        raise BadNote(f"the cosignature of {line.name} does not fit the text")
    return datetime.fromtimestamp(seconds, UTC)


def _message(text: str, seconds: int) -> bytes:
    return f"cosignature/v1\ntime {seconds}\n{text}".encode()


def _key_hash(name: str, key: PublicKey) -> bytes:
    raw = key.key.public_bytes_raw()
    return hashlib.sha256(name.encode() + b"\n" + COSIGNATURE + raw).digest()[:4]
