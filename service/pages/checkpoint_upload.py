"""Verify a checkpoint that an auditor saved against the log as it is now.

A checkpoint that was saved elsewhere reveals whether the log has been rewritten since: the
current tree must begin with the saved one. The consistency proof (RFC 9162, 2.1.4) is computed
from the stored tree and verified against both roots here. To verify without trusting the
service, request ``/v1/log/proof/consistency`` or run ``affidavit verify``, which remembers the
last checkpoint that it saw.
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
from affidavit.service.log.reader import LogReader
from affidavit.service.log.stored_tree import NotLogged

LONGEST = 10_000
"""Characters of a checkpoint."""


class InvalidCheckpoint(Exception):
    """The text is not a checkpoint of this log; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointComparison:
    """The saved checkpoint of ``then`` entries beside the newest one of ``now``.

    ``extended`` says that the log begins with the saved entries, ``signed`` that a key of this
    service signed the saved checkpoint; ``said`` is the contradiction, empty if there is none.
    """

    then: int
    now: int
    signed_at: datetime | None
    signed: bool
    extended: bool
    said: str


def compare_checkpoint(
    text: str, log: LogReader, keys: Iterable[PublicKey]
) -> CheckpointComparison:
    """Compare the checkpoint in ``text`` with ``log``; raises ``InvalidCheckpoint``."""
    # A form changes line ends, and a text area loses the last one.
    note = text.strip().replace("\r\n", "\n") + "\n"
    try:
        saved = read_checkpoint(note)
        newest = log.latest().checkpoint
    except BadNote as error:
        raise InvalidCheckpoint(f"not a checkpoint: {error}") from None
    except NotLogged:
        raise InvalidCheckpoint("this log has no checkpoint yet to compare with") from None
    if saved.origin != newest.origin:
        raise InvalidCheckpoint(
            f"the checkpoint is of another log, {saved.origin}; this one is {newest.origin}"
        )
    contradiction = _contradiction(saved, newest, log)
    return CheckpointComparison(
        then=saved.size,
        now=newest.size,
        signed_at=saved.signed_at,
        signed=_is_signed(note, keys),
        extended=contradiction == "",
        said=contradiction,
    )


def _contradiction(saved: Checkpoint, newest: Checkpoint, log: LogReader) -> str:
    """Why the log of ``newest`` does not extend the log of ``saved``; empty if it does."""
    if saved.size > newest.size:
        return f"it has {saved.size:,} entries but the log has {newest.size:,}: entries are missing"
    if saved.size == 0:
        return ""
    try:
        verify_consistency(
            first=saved.size,
            second=newest.size,
            first_root=saved.root_hash,
            second_root=newest.root_hash,
            proof=log.consistency(saved.size, newest.size).hashes,
        )
    except ProofError:
        return f"the first {saved.size:,} entries of the log have changed since"
    return ""


def _is_signed(note: str, keys: Iterable[PublicKey]) -> bool:
    try:
        open_checkpoint(note, keys)
    except BadNote:
        return False
    return True
