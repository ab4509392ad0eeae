"""A witness for other logs: each of their checkpoints must extend the previous one.

The operator chooses the logs: ``AFFIDAVIT_WITNESSED_LOGS`` is a file with one verifier key
(``name+hash+key``) per line. Accepted checkpoints are stored in ``log_witnessed``; the last
one is read and the next one written under one lock, so that concurrent requests cannot roll
a log back.

Reference: C2SP, tlog-witness.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from sqlalchemy import Connection, Engine, insert, select

from affidavit.certificate import SigningPort
from affidavit.certificate.log import (
    Addition,
    Checkpoint,
    NoteKey,
    cosign,
    read_checkpoint,
    require_extension,
    require_signed,
)
from affidavit.service.database import hold, writer
from affidavit.service.log.log_tables import log_witnessed


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
        require_signed(request, self._logs)
        origin = request.checkpoint.origin
        now = datetime.now(UTC)
        with self._writer.begin() as connection:
            last = _last(connection, origin)
            require_extension(last, request)
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
