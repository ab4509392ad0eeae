"""The sequencer: a thread of the service that keeps the log's tree up with its entries.

It looks every quarter of a second whether entries wait, and gives them their places, batch
after batch. While entries come there is thus a signed checkpoint at least every second. Any
number of processes may run one; ``sequencing`` sees to it that they take turns.

A log that contradicts itself is not signed any more. That is said at once and then every
minute in the service's log, and ``problem`` is what ``/readyz`` answers until it is mended;
plans are still certified meanwhile, and their entries wait.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from affidavit.certificate import KeyFailure, SigningPort
from affidavit.certificate.log import BadNote, Checkpoint
from affidavit.plan import Reason
from affidavit.service.database import reader, writer
from affidavit.service.log.sequencing import has_work, sequence
from affidavit.service.log.stored_tree import (
    Kept,
    LogDamaged,
    last_checkpoint,
    require_superset,
)

PERIOD = 0.25
"""Seconds between two looks."""
REPEATED_EVERY = 60.0
"""Seconds after which a problem that stays is said again."""
STOP_SECONDS = 10.0

log = logging.getLogger("affidavit.service.log")


class OtherOrigin(LogDamaged):
    """The setting names another log than the one in the database."""


@dataclass(slots=True)
class _Trouble:
    text: str
    said_at: float


class Sequencer:
    """The sequencer of one process.

    ``origin`` names the log, None lets it name itself. ``kept_elsewhere`` are checkpoints
    that lie outside the database.
    """

    def __init__(
        self,
        engine: Engine,
        key: Callable[[], SigningPort],
        *,
        origin: str | None = None,
        kept_elsewhere: Callable[[], Sequence[Checkpoint]] = tuple,
    ) -> None:
        self._reader = reader(engine)
        self._writer = writer(engine)
        self._key = key
        self._origin = origin
        self._kept_elsewhere = kept_elsewhere
        self._held = False
        self._newest: Kept | None = None
        self._trouble: _Trouble | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def problem(self) -> Reason | None:
        """Why the log does not grow; None while all is well."""
        trouble = self._trouble
        if trouble is None:
            return None
        return Reason(
            code="log_damaged",
            pointer="",
            message=f"{trouble.text}.",
            remedy="Nothing is signed into the log until it is mended; run: affidavit audit verify",
        )

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="sequencer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take up what still waits, a batch at most, and end."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
            self._thread = None

    def newest(self) -> Kept | None:
        """The newest checkpoint that this process signed or saw."""
        return self._newest

    def step(self) -> bool:
        """One look and at most one batch; whether more entries wait."""
        seen = None if self._newest is None else self._newest.checkpoint
        key = self._key()  # which may look into the database too: one connection at a time
        with self._reader.connect() as connection:
            self._hold_to_what_was_kept(connection)
            if not has_work(connection, key, seen):
                return False
        with self._writer.begin() as connection:
            batch = sequence(connection, self._key, self._named, seen=seen)
        if batch is None:
            return False
        self._newest = batch.kept or self._newest
        return batch.more

    def _hold_to_what_was_kept(self, connection: Connection) -> None:
        """Once, before anything is signed: the log continues the checkpoints kept elsewhere."""
        if self._held:
            return
        kept = self._kept_elsewhere()
        last = last_checkpoint(connection) if kept else None
        for item in kept:
            require_superset(connection, item, None if last is None else last.checkpoint)
        self._held = True

    def _run(self) -> None:
        last = False
        while not last:
            # What was entered before the end is still taken up.
            last = self._stopped.wait(PERIOD)
            more = True
            while more:
                more = self._try()

    def _try(self) -> bool:
        try:
            more = self.step()
        except LogDamaged as damage:
            self._say(str(damage))
            return False
        except SQLAlchemyError as error:
            log.warning("the log waits for the database: %s", str(error).splitlines()[0])
            return False
        except (KeyFailure, BadNote) as failure:
            log.error("the log cannot be signed: %s", failure)
            return False
        except Exception:
            # A thread that ended would be missed by nobody until a proof is.
            log.exception("the sequencer met a fault of its own; it tries again")
            return False
        self._trouble = None
        return more and not self._stopped.is_set()

    def _say(self, text: str) -> None:
        now = time.monotonic()
        trouble = self._trouble
        if trouble is not None and trouble.text == text and now < trouble.said_at + REPEATED_EVERY:
            return
        self._trouble = _Trouble(text, now)
        log.critical("THE LOG IS DAMAGED: %s; nothing is signed into it until it is mended", text)

    def _named(self, last: Checkpoint | None) -> str:
        """The log's origin: that of its last checkpoint, else the setting or a random name."""
        if last is None:
            return self._origin or f"affidavit.invalid/{secrets.token_hex(8)}"
        if self._origin not in (None, last.origin):
            raise OtherOrigin(
                f"the setting AFFIDAVIT_LOG_ORIGIN is {self._origin}, and the log is {last.origin}"
            )
        return last.origin
