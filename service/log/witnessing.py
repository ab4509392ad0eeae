"""A witness for other logs: each of their checkpoints must continue the one before it.

Which logs it keeps is the operator's choice: ``AFFIDAVIT_WITNESSED_LOGS`` is a file with a
verifier key (``name+hash+key``) on each line. What was seen is kept in ``log_witnessed``,
and looking at it and adding to it is one step, so that two requests cannot take turns at
rolling a log back.

Reference: C2SP, tlog-witness.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from sqlalchemy import Connection, Engine, insert, select

from affidavit.certificate import SigningPort
from affidavit.certificate.log import (
    Addition,
    Checkpoint,
    NoteKey,
    ProofError,
    UnknownSigner,
    cosign,
    open_note,
    read_checkpoint,
    verify_consistency,
)
from affidavit.service.database import hold, writer
from affidavit.service.log.tables import log_witnessed

log = logging.getLogger("affidavit.service.log")


class UnknownLog(Exception):
    """This witness does not keep that log."""


class NotSigned(Exception):
    """None of the log's keys signed the checkpoint."""


class OtherSize(Exception):
    """The witness has another checkpoint of the log, of ``size`` leaves."""

    def __init__(self, size: int) -> None:
        super().__init__(str(size))
        self.size = size


class Witness:
    """The witness of one service."""

    def __init__(
        self, engine: Engine, key: Callable[[], SigningPort], name: str, logs: Iterable[NoteKey]
    ) -> None:
        self._writer = writer(engine)
        self._key = key
        self._name = name
        self._logs = tuple(logs)

    def add(self, wanted: Addition) -> str:
        """Keep a checkpoint and return the cosignature.

        Raises ``UnknownLog``, ``NotSigned`` (or ``BadNote``, for a false signature),
        ``OtherSize`` and ``ProofError``.
        """
        origin = wanted.checkpoint.origin
        known = [log for log in self._logs if log.name == origin]
        if not known:
            raise UnknownLog(origin)
        try:
            open_note(wanted.note, known)
        except UnknownSigner:
            raise NotSigned(origin) from None
        now = datetime.now(UTC)
        with self._writer.begin() as connection:
            last = _last(connection, origin)
            _require_continues(last, wanted)
            if last is None or last.size < wanted.checkpoint.size:
                connection.execute(
                    insert(log_witnessed).values(
                        origin=origin,
                        tree_size=wanted.checkpoint.size,
                        received_at=now,
                        note=wanted.note,
                    )
                )
        return cosign(wanted.note, self._name, self._key(), now)


def _last(connection: Connection, origin: str) -> Checkpoint | None:
    hold(connection, f"witness {origin}")
    query = select(log_witnessed.c.note).where(log_witnessed.c.origin == origin)
    order = log_witnessed.c.tree_size.desc(), log_witnessed.c.id.desc()
    note = connection.execute(query.order_by(*order).limit(1)).scalar()
    return None if note is None else read_checkpoint(note)


def _require_continues(last: Checkpoint | None, wanted: Addition) -> None:
    size = 0 if last is None else last.size
    if wanted.old != size:
        raise OtherSize(size)
    if last is None or last.size == 0:
        if wanted.proof:
            raise ProofError("there is nothing to prove from the empty log")
        return
    new = wanted.checkpoint
    if new.size == last.size and new.root_hash != last.root_hash:
        log.critical("THE LOG %s WAS FORKED: two roots for %d leaves", new.origin, new.size)
        raise OtherSize(size)
    try:
        verify_consistency(
            first=last.size,
            second=new.size,
            first_root=last.root_hash,
            second_root=new.root_hash,
            proof=wanted.proof,
        )
    except ProofError as error:
        log.critical("THE LOG %s DOES NOT CONTINUE what was seen of it: %s", new.origin, error)
        raise
