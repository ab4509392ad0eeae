"""The last checkpoint seen of each log: the verifier's memory.

A log that was rolled back or forked is found out only by somebody who remembers what it
was. Each verified bundle leaves its log's checkpoint here, one a log, where it continues
the one before it. The file is ``checkpoints.json`` under ``$AFFIDAVIT_HOME``, or what
``--checkpoint-store`` names; several processes may use it at once.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from affidavit.certificate import home, write_atomically
from affidavit.certificate.log import BadNote, read_checkpoint

VERSION = 1


class BadStore(Exception):
    """The file does not hold checkpoints; the message says which and what to do."""


class SeenCheckpoints:
    """Checkpoints, signed notes, by their log's origin."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or home() / "checkpoints.json"

    def notes(self) -> dict[str, str]:
        """All of them; raises ``BadStore``."""
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise self._bad(str(error)) from None
        notes = document.get("checkpoints") if isinstance(document, dict) else None
        if not isinstance(notes, dict) or document.get("version") != VERSION:
            raise self._bad("it is not a store of checkpoints")
        for origin, note in notes.items():
            try:
                if not isinstance(note, str) or read_checkpoint(note).origin != origin:
                    raise self._bad(f"what it holds for {origin!r} is not that log's checkpoint")
            except BadNote as error:
                raise self._bad(f"what it holds for {origin!r} is no checkpoint: {error}") from None
        return notes

    def keep(self, note: str) -> None:
        """Remember ``note``, which continues what is kept of its log; raises ``OSError``.

        What another process kept meanwhile is kept where it is of a larger tree.
        """
        found = read_checkpoint(note)
        with self._alone():
            notes = self.notes()
            known = notes.get(found.origin)
            if known is not None and read_checkpoint(known).size > found.size:
                return
            document = {"version": VERSION, "checkpoints": {**notes, found.origin: note}}
            write_atomically(self.path, (json.dumps(document, indent=1) + "\n").encode())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.path.with_name(self.path.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _bad(self, why: str) -> BadStore:
        return BadStore(
            f"{self.path}: {why}. It is the memory by which a rewritten log is found out: "
            "restore it, or move it away to begin anew."
        )
