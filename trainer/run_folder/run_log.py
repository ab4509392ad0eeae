"""The run log: a run's record as it is written, and charges that are on disk before noise is.

One process at a time holds a run's folder (a lock that the kernel drops when the process
ends). Lines are appended; ``charge`` and everything that must not be lost is synchronised to
the disk before it returns. A line that was cut off when the process died has no end; it was
never acted upon, and is taken off when the run goes on.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     run_log = RunLog.begun(Path(folder))
...     run_log.append({"type": "checkpoint", "step": 0, "checkpoint": "", "parameters": ""})
...     list(run_log.progress.checkpoints)
['']
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from affidavit.certificate import (
    START,
    BrokenLine,
    RecordEntry,
    decode_line,
    encode_line,
    fsync_directory,
    write_all,
)
from affidavit.trainer.errors import RunFailure

NAME = "record.jsonl"
LOCK = "lock"


@dataclass
class RecordProgress:
    """The state of a record after the lines so far; ``checkpoints`` maps digests to entries.

    Only those that lead to the keys of the last charge: where a run went on it reseeded its key,
    and its first checkpoint after that puts an end to those from before.
    """

    head: str = START
    header: RecordEntry | None = None
    charged: int = 0
    released: int = 0
    ended: str | None = None
    checkpoints: dict[str, RecordEntry] = field(default_factory=dict)
    _before: frozenset[str] = frozenset()

    @property
    def begun(self) -> bool:
        """Whether the run may have used a key: it has a checkpoint to go on from, or a charge.

        One that died between its header and its first checkpoint has used none.
        """
        return bool(self.checkpoints) or self.charged > 0

    def take(self, entry: RecordEntry, digest: str) -> None:
        """One more line."""
        self.head = digest
        match entry["type"]:
            case "header":
                self.header = entry
            case "charge":
                self.charged += 1
            case "release":
                self.released += 1
            case "resumed":
                self._before = frozenset(self.checkpoints)
            case "checkpoint":
                for before in self._before:
                    self.checkpoints.pop(before, None)
                self._before = frozenset()
                self.checkpoints[entry["checkpoint"]] = entry
            case "final":
                self.ended = entry["ended"]


class RunLog:
    """The open record of a run."""

    def __init__(self, folder: Path, lock: int, stream: int, progress: RecordProgress) -> None:
        self.folder, self.progress = folder, progress
        self._lock, self._stream = lock, stream
        self._length = os.fstat(stream).st_size

    @classmethod
    def begun(cls, folder: Path) -> RunLog:
        """The record of a new run; the folder is made, and must not hold a run.

        Raises ``RunFailure``.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(folder, error) from None
        lock = _locked(folder)
        try:
            if holds_a_run(folder):
                raise RunFailure(
                    "run_exists",
                    f"{folder} already contains a run. Resume it with --resume, or choose another "
                    "folder.",
                )
            return cls(folder, lock, _opened(folder, os.O_CREAT | os.O_TRUNC), RecordProgress())
        except BaseException:
            os.close(lock)
            raise

    @classmethod
    def resumed(cls, folder: Path) -> RunLog:
        """The record of a resumed run; raises ``RunFailure`` if it is broken."""
        if not (folder / NAME).is_file():
            raise RunFailure("no_run", f"{folder} contains no run to resume.")
        lock = _locked(folder)
        try:
            progress, length = _read(folder / NAME)
            stream = _opened(folder, 0)
            os.ftruncate(stream, length)
            os.fsync(stream)
            return cls(folder, lock, stream, progress)
        except BaseException:
            os.close(lock)
            raise

    def append(self, entry: RecordEntry, *, durable: bool = True) -> None:
        """Write one line, and unless ``durable`` is false have it on the disk.

        Raises ``RunFailure`` where it cannot be written; then nothing of the line is left.
        """
        line, digest = encode_line(entry, self.progress.head)
        try:
            write_all(self._stream, line)
            if durable:
                os.fsync(self._stream)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._stream, self._length)
            raise unwritable(self.folder / NAME, error) from None
        self._length += len(line)
        self.progress.take(entry, digest)

    def close(self) -> None:
        """Release the folder's lock."""
        os.close(self._stream)
        os.close(self._lock)


def holds_a_run(folder: Path) -> bool:
    """Whether ``folder`` has a run to resume; a record that cannot be read is taken to say so.

    One that died before its first checkpoint has charged nothing, and begins again.
    """
    if not (folder / NAME).exists():
        return False
    try:
        _read(folder / NAME)
    except RunFailure as failure:
        return failure.code != "no_run"
    return True


def _read(path: Path) -> tuple[RecordProgress, int]:
    """What the whole lines come to, and how many bytes they have."""
    *lines, _cut_off = path.read_bytes().split(b"\n")
    progress = RecordProgress()
    for number, line in enumerate(lines, start=1):
        try:
            entry = decode_line(line + b"\n", progress.head)
        except BrokenLine as error:
            raise RunFailure(
                "broken_record",
                f"{path}, line {number}: {error} The run cannot be resumed; start a new one in "
                "another folder. Every certified step of this one is spent.",
            ) from None
        progress.take(entry, entry["digest"])
    if not progress.begun:
        raise RunFailure("no_run", f"{path.parent} contains no run. Start without --resume.")
    return progress, sum(len(line) + 1 for line in lines)


def _locked(folder: Path) -> int:
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise unwritable(folder, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise RunFailure(
            "run_in_use",
            f"a process is training in {folder}. Wait for it to end; if it is this one, call "
            "close() of its run.",
        ) from None
    return lock


def _opened(folder: Path, flags: int) -> int:
    try:
        stream = os.open(folder / NAME, os.O_WRONLY | os.O_APPEND | flags, 0o600)
        fsync_directory(folder)
        return stream
    except OSError as error:
        raise unwritable(folder / NAME, error) from None


def unwritable(path: Path, error: Exception) -> RunFailure:
    """A file of the run that could not be written."""
    why = error.strerror if isinstance(error, OSError) else error
    return RunFailure(
        "not_written",
        f"cannot write {path}: {why}. Fix this and run it again, with --resume if it has begun.",
    )
