"""A checkpoint that an auditor kept, held to the log as it is now.

Whoever keeps a checkpoint somewhere else finds out by it whether the log was rewritten since:
the tree of now must begin with the tree of then. The proof of that (RFC 9162, 2.1.4) is made from
the stored tree and followed up to both roots here, so that a page says only what holds. Whoever
does not trust the service asks ``/v1/log/proof/consistency`` for it, or runs ``affidavit verify``,
which remembers the last checkpoint that it saw.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from affidavit.certificate import PublicKey
from affidavit.certificate.log import (
    BadNote,
    Checkpoint,
    ProofError,
    open_checkpoint,
    read_checkpoint,
    verify_consistency,
)
from affidavit.service.log.reader import LogReader, NotLogged

LONGEST = 10_000
"""Characters of a checkpoint."""


class NoCheckpoint(Exception):
    """What was given is no checkpoint of this log; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The checkpoint of ``then`` entries beside the one of ``now``.

    ``extended`` says that the log of now begins with that of then, ``signed`` that a key of
    this service signed it; ``said`` is what is wrong where it was not extended.
    """

    then: int
    now: int
    signed_at: datetime | None
    signed: bool
    extended: bool
    said: str


def hold(text: str, log: LogReader, keys: Iterable[PublicKey]) -> Held:
    """Hold the checkpoint in ``text`` to ``log``; raises ``NoCheckpoint``."""
    # A form ends its lines as it likes, and a text area loses the last one.
    note = text.strip().replace("\r\n", "\n") + "\n"
    try:
        kept = read_checkpoint(note)
        newest = log.latest().checkpoint
    except BadNote as error:
        raise NoCheckpoint(f"this is no checkpoint: {error}") from None
    except NotLogged:
        raise NoCheckpoint("nothing is signed here yet that it could be held to") from None
    if kept.origin != newest.origin:
        raise NoCheckpoint(f"it is of another log, {kept.origin}; this one is {newest.origin}")
    said = _contradiction(kept, newest, log)
    return Held(
        then=kept.size,
        now=newest.size,
        signed_at=kept.signed_at,
        signed=_is_signed(note, keys),
        extended=said == "",
        said=said,
    )


def _contradiction(kept: Checkpoint, newest: Checkpoint, log: LogReader) -> str:
    """Why the log of ``newest`` is not that of ``kept`` with more; empty where it is."""
    if kept.size > newest.size:
        return f"it has {kept.size:,} entries and the log {newest.size:,}: some are gone"
    if kept.size == 0:
        return ""
    try:
        verify_consistency(
            first=kept.size,
            second=newest.size,
            first_root=kept.root_hash,
            second_root=newest.root_hash,
            proof=log.consistency(kept.size, newest.size).hashes,
        )
    except ProofError:
        return f"the first {kept.size:,} entries are others now than they were then"
    return ""


def _is_signed(note: str, keys: Iterable[PublicKey]) -> bool:
    try:
        open_checkpoint(note, keys)
    except BadNote:
        return False
    return True
