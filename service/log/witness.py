"""A witness for other logs: each of their checkpoints must extend the previous one.

The operator chooses the logs: ``AFFIDAVIT_WITNESSED_LOGS`` is a file with one verifier key
(``name+hash+key``) per line. Accepted checkpoints are stored in ``log_witnessed``; the last
one is read and the next one written under one lock, so that concurrent requests cannot roll
a log back.

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
from affidavit.service.log.log_tables import log_witnessed

log = logging.getLogger("affidavit.service.log")


class UnknownLog(Exception):
    """This witness is not configured for that log."""


class NotSigned(Exception):
    """None of the log's keys signed the checkpoint."""


class SizeConflict(Exception):
    """The witness's last checkpoint of the log has another size, ``size`` leaves."""

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

    def add(self, request: Addition) -> str:
        """Store a checkpoint and return the cosignature.

        Raises ``UnknownLog``, ``NotSigned`` (or ``BadNote``, for an invalid signature),
        ``SizeConflict`` and ``ProofError``.
        """
        origin = request.checkpoint.origin
        keys = [key for key in self._logs if key.name == origin]
        if not keys:
            raise UnknownLog(origin)
        try:
            open_note(request.note, keys)
        except UnknownSigner:
            raise NotSigned(origin) from None
        now = datetime.now(UTC)
        with self._writer.begin() as connection:
            last = _last(connection, origin)
            _require_extension(last, request)
            if last is None or last.size < request.checkpoint.size:
                connection.execute(
                    insert(log_witnessed).values(
                        origin=origin,
                        tree_size=request.checkpoint.size,
                        received_at=now,
                        note=request.note,
                    )
                )
        return cosign(request.note, self._name, self._key(), now)


def _last(connection: Connection, origin: str) -> Checkpoint | None:
    hold(connection, f"witness {origin}")
    query = select(log_witnessed.c.note).where(log_witnessed.c.origin == origin)
    order = log_witnessed.c.tree_size.desc(), log_witnessed.c.id.desc()
    note = connection.execute(query.order_by(*order).limit(1)).scalar()
    return None if note is None else read_checkpoint(note)


def _require_extension(last: Checkpoint | None, request: Addition) -> None:
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
