"""The exporter: a thread that brings each new checkpoint to the places outside the database.

It is a thread of its own, because a network that hangs must not keep the log from growing.
What cannot be delivered is said in the service's log and tried again; a checkpoint that is
overtaken meanwhile need not be, for the next one covers it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from affidavit.service.log.exports import Export, ExportFailed
from affidavit.service.log.stored_tree import Kept

PERIOD = 0.5
RETRY = 10.0
"""Seconds between two tries of what failed."""
STOP_SECONDS = 15.0

log = logging.getLogger("affidavit.service.log")


class Exporter:
    """The exports of one process; ``newest`` is the newest checkpoint that it knows."""

    def __init__(self, exports: Sequence[Export], newest: Callable[[], Kept | None]) -> None:
        self._exports = exports
        self._newest = newest
        self._sent: dict[int, str] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, in a thread of its own, if there is anywhere to export to."""
        if self._exports:
            self._thread = threading.Thread(target=self._run, name="exporter", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Deliver the newest checkpoint, and end."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
            self._thread = None

    def round(self) -> bool:
        """Bring the newest checkpoint everywhere; whether all places have it."""
        kept = self._newest()
        if kept is None:
            return True
        all_well = True
        for number, export in enumerate(self._exports):
            if self._sent.get(number) == kept.note:
                continue
            try:
                export.send(kept)
                self._sent[number] = kept.note
            except ExportFailed as failure:
                log.error("a checkpoint was not exported to %s: %s", export.name, failure)
                all_well = False
            except Exception:
                log.exception("the exporter met a fault of its own; it tries again")
                all_well = False
        return all_well

    def _run(self) -> None:
        pause = PERIOD
        while not self._stopped.wait(pause):
            pause = PERIOD if self.round() else RETRY
        self.round()
