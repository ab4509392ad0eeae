"""The run log: a run's record while it is written, with charges on disk before noise is drawn.

One process at a time holds a run's folder, by a lock that the kernel releases when the process
ends. Lines are appended. ``charge`` and everything else that must not be lost is synchronised to
disk before it returns. A line without a newline was cut off when the process died. It was never
acted upon, and is removed when the run resumes.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     run_log = RunLog.create(Path(folder))
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

from affidavit.evidence import (
    START,
    BrokenLine,
    RecordEntry,
    decode_line,
    encode_line,
)
from affidavit.trainer.errors import RunFailure
from affidavit.trust import fsync_directory, write_all

RECORD_FILE = "record.jsonl"
LOCK_FILE = "lock"


@dataclass
class RecordProgress:
    """The state of a record after its lines so far; ``checkpoints`` maps digests to entries.

    Only checkpoints that lead to the keys of the last charge are kept. A resumed run changes its
    key, so its first checkpoint after that invalidates the earlier ones.
    """

    head: str = START
    header: RecordEntry | None = None
    charged: int = 0
    released: int = 0
    ended: str | None = None
    checkpoints: dict[str, RecordEntry] = field(default_factory=dict)
    _superseded: frozenset[str] = frozenset()

    @property
    def has_started(self) -> bool:
        """Whether the run may have used a key: it has a checkpoint or a charge.

        A run that died between its header and its first checkpoint has used no key.
        """
        return bool(self.checkpoints) or self.charged > 0

    def apply(self, entry: RecordEntry, digest: str) -> None:
        """Apply one more line."""
        self.head = digest
        match entry["type"]:
            case "header":
                self.header = entry
            case "charge":
                self.charged += 1
            case "release":
                self.released += 1
            case "resumed":
                self._superseded = frozenset(self.checkpoints)
            case "checkpoint":
                for before in self._superseded:
                    self.checkpoints.pop(before, None)
                self._superseded = frozenset()
                self.checkpoints[entry["checkpoint"]] = entry
            case "final":
                self.ended = entry["ended"]


class RunLog:
    """The open record of a run."""

    def __init__(self, folder: Path, lock: int, stream: int, progress: RecordProgress) -> None:
        self.folder, self.progress = folder, progress
        self.lock, self._stream = lock, stream
        self._length = os.fstat(stream).st_size

    @classmethod
    def create(cls, folder: Path) -> RunLog:
        """Create the record of a new run, and its folder, which must not contain a run.

        Raises ``RunFailure``.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise write_failure(folder, error) from None
        lock = _lock_folder(folder)
        try:
            if has_run(folder):
                raise RunFailure(
                    "run_exists",
                    f"{folder} already contains a run. Resume it with --resume, or choose another "
                    "folder.",
                )
            return cls(
                folder, lock, _open_record(folder, os.O_CREAT | os.O_TRUNC), RecordProgress()
            )
        except BaseException:
            os.close(lock)
            raise

    @classmethod
    def reopen(cls, folder: Path) -> RunLog:
        """Open the record of a run to resume; raises ``RunFailure`` if it is broken."""
        if not (folder / RECORD_FILE).is_file():
            raise RunFailure("no_run", f"{folder} contains no run to resume.")
        lock = _lock_folder(folder)
        try:
            progress, length = _read_progress(folder / RECORD_FILE)
            stream = _open_record(folder, 0)
            os.ftruncate(stream, length)
            os.fsync(stream)
            return cls(folder, lock, stream, progress)
        except BaseException:
            os.close(lock)
            raise

    def append(self, entry: RecordEntry, *, durable: bool = True) -> None:
        """Write one line, and synchronise it if ``durable``.

        Raises ``RunFailure`` if it cannot be written; then no part of the line remains.
        """
        line, digest = encode_line(entry, self.progress.head)
        try:
            write_all(self._stream, line)
            if durable:
                os.fsync(self._stream)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._stream, self._length)
            raise write_failure(self.folder / RECORD_FILE, error) from None
        self._length += len(line)
        self.progress.apply(entry, digest)

    def close(self) -> None:
        """Release the folder's lock."""
        os.close(self._stream)
        os.close(self.lock)


def has_run(folder: Path) -> bool:
    """Return whether ``folder`` has a run to resume; an unreadable record counts as one.

    A run that died before its first checkpoint has charged nothing, and starts again.
    """
    if not (folder / RECORD_FILE).exists():
        return False
    try:
        _read_progress(folder / RECORD_FILE)
    except RunFailure as failure:
        return failure.code != "no_run"
    return True


def _read_progress(path: Path) -> tuple[RecordProgress, int]:
    """Return the progress after the complete lines, and their length in bytes."""
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
        progress.apply(entry, entry["digest"])
    if not progress.has_started:
        raise RunFailure("no_run", f"{path.parent} contains no run. Start without --resume.")
    return progress, sum(len(line) + 1 for line in lines)


def _lock_folder(folder: Path) -> int:
    try:
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise write_failure(folder, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise RunFailure(
            "run_in_use",
            f"{folder} is in use by a training process. Wait for it to end or, if it is this "
            "process, close its run with close().",
        ) from None
    return lock


def _open_record(folder: Path, flags: int) -> int:
    try:
        stream = os.open(folder / RECORD_FILE, os.O_WRONLY | os.O_APPEND | flags, 0o600)
        fsync_directory(folder)
        return stream
    except OSError as error:
        raise write_failure(folder / RECORD_FILE, error) from None


def write_failure(path: Path, error: Exception) -> RunFailure:
    """Return the failure for a file of the run that could not be written."""
    why = error.strerror if isinstance(error, OSError) else error
    return RunFailure(
        "not_written",
        f"cannot write {path}: {why}. Fix this and run it again, with --resume if it has begun.",
    )
