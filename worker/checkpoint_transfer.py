"""Copy the record and checkpoint of an earlier attempt, so that another worker can resume a run.

Every attempt at a run has its own folder, ``RUN-FENCE``, and only that attempt writes to it, so
a stale trainer cannot interfere with the new attempt. The copy has the record, the checkpoint
that it names and the secret that decrypts it. The checkpoint is copied before the record, and
both again if the checkpoint changed meanwhile, so that the record names the copied checkpoint.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

RECORD = "record.jsonl"
CHECKPOINT = "checkpoint.pt"
CHECKPOINTS = ("checkpoint.pt.part", CHECKPOINT)
OPENING = "opening.json"
"""File names of the trainer, which the worker must not import."""
MAX_TRIES = 10


def copy_attempt(previous: Path, run: Path) -> bool:
    """Copy the attempt in the folder ``previous`` to the new folder ``run``.

    Returns False, and leaves nothing, if there is nothing to resume. Raises ``OSError``.
    """
    if not (previous / RECORD).is_file():
        return False
    run.mkdir(mode=0o700)
    for _ in range(MAX_TRIES):
        versions = _versions(previous)
        for name in (*CHECKPOINTS, OPENING, RECORD):
            _copy(previous / name, run / name)
        if _versions(previous) == versions:
            break
    if has_checkpoint((run / RECORD).read_bytes()):
        return True
    shutil.rmtree(run)
    return False


def has_checkpoint(record: bytes) -> bool:
    """Whether the record names a checkpoint to resume from."""
    return b'"type":"checkpoint"' in record


def delete_checkpoints(folder: Path, run: str) -> None:
    """Delete the checkpoints of all attempts at a finished run; they are secret."""
    for name in CHECKPOINTS:
        for path in folder.glob(f"{run}-*/run/{name}"):
            with suppress(OSError):
                path.unlink()


def _versions(folder: Path) -> list[tuple[int, int]]:
    """What tells the checkpoints of a folder from later ones."""
    versions = []
    for name in CHECKPOINTS:
        with suppress(FileNotFoundError):
            stat = (folder / name).stat()
            versions.append((stat.st_ino, stat.st_mtime_ns))
    return versions


def _copy(source: Path, target: Path) -> None:
    """Copy a file that may be changing or missing, and sync the copy to disk."""
    target.unlink(missing_ok=True)
    with suppress(FileNotFoundError), source.open("rb") as reading:
        target.touch(mode=0o600)
        with target.open("wb") as out:
            shutil.copyfileobj(reading, out, 1024 * 1024)
            out.flush()
            os.fsync(out.fileno())
