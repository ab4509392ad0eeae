"""Copy the record and checkpoints of an earlier attempt, so that another worker resumes a run.

Every attempt at a run has its own folder, ``RUN-FENCE``, and only that attempt writes to it, so
a stale trainer cannot interfere with the new attempt. Checkpoints are copied before the record
that names them, and all again if a checkpoint changed meanwhile.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

RECORD = "record.jsonl"
CHECKPOINTS = "checkpoint*"
"""Files, or the folders of a sharded run."""
RESUMED = (CHECKPOINTS, "opening.json", RECORD)
"""File names of the trainer, which the worker must not import."""
MAX_TRIES = 10


def copy_attempt(previous: Path, run: Path) -> bool:
    """Copy the attempt in the folder ``previous`` to the new folder ``run``.

    Returns False, and leaves nothing, if there is nothing to resume. Raises ``OSError``.
    """
    for _ in range(MAX_TRIES):
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(mode=0o700)
        versions = _versions(previous)
        for path in (path for name in RESUMED for path in previous.glob(name)):
            with suppress(FileNotFoundError):  # a later checkpoint took its place
                (shutil.copytree if path.is_dir() else shutil.copy2)(path, run / path.name)
        if _versions(previous) == versions:
            break
    record = run / RECORD
    if record.exists() and has_checkpoint(record.read_bytes()):
        os.sync()
        return True
    shutil.rmtree(run)
    return False


def has_checkpoint(record: bytes) -> bool:
    """Whether the record names a checkpoint to resume from."""
    return b'"type":"checkpoint"' in record


def delete_checkpoints(folder: Path, run: str) -> None:
    """Delete the checkpoints of all attempts at a finished run; they are secret."""
    for path in folder.glob(f"{run}-*/run/{CHECKPOINTS}"):
        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            path.unlink()


def _versions(folder: Path) -> list[tuple[str, int, int]]:
    """What tells the checkpoints of a folder from later ones."""
    versions = []
    for path in sorted(folder.glob(CHECKPOINTS)):
        with suppress(FileNotFoundError):
            stat = path.stat()
            versions.append((path.name, stat.st_ino, stat.st_mtime_ns))
    return versions
