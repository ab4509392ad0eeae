"""C2SP checkpoints: the log's origin, size and root hash, in a signed note.

::

    affidavit.example.com/log
    1204
    qINS1GRFhWHwdkUeqLEoP4yEMkTBBzxBkGwGQlVlVcs=
    time 2026-11-21T10:00:00Z

    — affidavit.example.com/log Az3grl...

The first line, the origin, names the log and its key's signatures. The fourth is an extension
line: the time of signing, in UTC, because a key counts only within its window.

A key that is for every role signs certificates too. Neither passes for the other: a certificate's
signed bytes begin with ``DSSEv1`` and a space, which no origin may contain.

Reference: C2SP, tlog-checkpoint.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from affidavit.certificate.keys import (
    KeyRole,
    PublicKey,
    SigningPort,
    format_instant,
    parse_instant,
)
from affidavit.certificate.log.note import (
    BadNote,
    NoteKey,
    decode_base64,
    encode_base64,
    open_note,
    parse_note,
    require_name,
    sign_note,
)
from affidavit.certificate.log.tree import HASH_BYTES, MOST_LEAVES

_SIZE = re.compile(r"0|[1-9][0-9]{0,15}")
_TIME = "time "


class BadCheckpoint(BadNote):
    """The note is not a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What a log was at a moment: ``size`` leaves under ``root_hash``."""

    origin: str
    size: int
    root_hash: bytes
    extensions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_name(self.origin)
        if not 0 <= self.size <= MOST_LEAVES or len(self.root_hash) != HASH_BYTES:
            raise BadCheckpoint("a checkpoint has a size and a hash of 32 bytes")

    @property
    def signed_at(self) -> datetime | None:
        """What the checkpoint itself says of when it was signed.

        Raises ``BadCheckpoint`` for what is no time.
        """
        for line in self.extensions:
            if line.startswith(_TIME):
                try:
                    return parse_instant(line[len(_TIME) :])
                except ValueError:
                    raise BadCheckpoint("the checkpoint's time cannot be read") from None
        return None

    def __str__(self) -> str:
        lines = (self.origin, str(self.size), encode_base64(self.root_hash), *self.extensions)
        return "".join(f"{line}\n" for line in lines)

    @classmethod
    def parse(cls, text: str) -> Checkpoint:
        """The checkpoint that a note's text is; raises ``BadNote``."""
        lines = text.split("\n")
        if len(lines) < 4 or lines.pop() != "" or not all(lines):
            raise BadCheckpoint("a checkpoint has three lines or more, none of them empty")
        origin, size, root, *extensions = lines
        if _SIZE.fullmatch(size) is None:
            raise BadCheckpoint("a checkpoint's second line is its size, in decimal")
        return cls(
            origin=origin,
            size=int(size),
            root_hash=decode_base64(root, "the root hash"),
            extensions=tuple(extensions),
        )


def note_key(origin: str, key: PublicKey) -> NoteKey:
    """``key`` as the log of that origin signs with it; ``str`` of it is the verifier key."""
    return NoteKey(origin, key.key.public_bytes_raw())


def sign_checkpoint(
    key: SigningPort, *, origin: str, size: int, root_hash: bytes, at: datetime
) -> str:
    """The signed note of a log that has ``size`` leaves at the time ``at``."""
    stated = f"{_TIME}{format_instant(at)}"
    result = Checkpoint(origin=origin, size=size, root_hash=root_hash, extensions=(stated,))
    return str(sign_note(str(result), note_key(origin, key.public), key.sign))


def read_checkpoint(note: str | bytes) -> Checkpoint:
    """The checkpoint in ``note``, by whomever it is signed; raises ``BadNote``."""
    return Checkpoint.parse(parse_note(note).text)


def open_checkpoint(
    note: str | bytes, trusted: Iterable[PublicKey]
) -> tuple[Checkpoint, tuple[PublicKey, ...]]:
    """The checkpoint in ``note`` and which trusted keys for checkpoints signed it in its name.

    Raises ``BadNote`` when it is none, or none of them did.
    """
    result = read_checkpoint(note)
    known = {
        note_key(result.origin, item): item for item in trusted if item.may(KeyRole.CHECKPOINT)
    }
    _, signers = open_note(note, known)
    return result, tuple(known[signer] for signer in signers)
