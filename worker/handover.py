"""Hand-over: what a worker needs of another's folder to go on with a run.

Every attempt at a run has a folder of its own, ``RUN-FENCE``, and nobody writes into another's:
a trainer that still lives there does no harm to what goes on here. What is taken over is the
record, the checkpoint that it names and the secret that opens it. The checkpoint is
copied before the record, and both again when it changed meanwhile, so that the record
names it.

Workers know by the name of their *place* who has the folder: ``.place`` in the folder below which
runs are kept, the same for all workers that share it.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     place_of(Path(folder)) == place_of(Path(folder))
True
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from affidavit.certificate import synchronise, write_whole

RECORD = "record.jsonl"
KEPT = "checkpoint.pt"
CHECKPOINTS = ("checkpoint.pt.part", KEPT)
OPENING = "opening.json"
"""The trainer's names, which it does not share with who may not import it."""
MOST_TRIES = 10
PLACE = re.compile(r"[0-9a-f]{32}")

Changed = tuple[tuple[int, int, int] | None, ...]


def place_of(outputs: Path) -> str:
    """The name of the place ``outputs``, made where there is none; raises ``OSError``."""
    outputs.mkdir(mode=0o700, parents=True, exist_ok=True)
    path, made = outputs / ".place", secrets.token_hex(16)
    draft = outputs / f".place-{made}"
    write_whole(draft, made.encode())
    with suppress(FileExistsError):
        os.link(draft, path)  # whole or not at all, whoever else does the same
    draft.unlink()
    synchronise(outputs)  # the service is told of it next
    found = path.read_text("ascii")
    if PLACE.fullmatch(found) is None:
        raise OSError(f"{path} does not hold the name of a place; remove it.")
    return found


def take_over(before: Path, run: Path) -> bool:
    """Copy the run in the folder ``before`` to ``run``, which is made.

    Returns False, and leaves nothing, where there is no run to go on with. Raises ``OSError``.
    """
    if not (before / RECORD).is_file():
        return False
    run.mkdir(mode=0o700)
    for _ in range(MOST_TRIES):
        was = _changed(before)
        for name in (*CHECKPOINTS, OPENING, RECORD):
            _copy(before / name, run / name)
        if _changed(before) == was:
            break
    if has_checkpoint((run / RECORD).read_bytes()):
        return True
    shutil.rmtree(run)
    return False


def has_checkpoint(record: bytes) -> bool:
    """Whether there is something to go on from."""
    return b'"type":"checkpoint"' in record


def has_ended(record: Path) -> bool:
    """Whether a record has its last line."""
    try:
        with record.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 64 * 1024))
            lines = stream.read().split(b"\n")
    except OSError:
        return False
    return len(lines) > 1 and b'"type":"final"' in lines[-2] and not lines[-1]


def forget(folder: Path, run: str) -> None:
    """Remove the checkpoints of all attempts at a run that is over; they are secret."""
    for name in CHECKPOINTS:
        for path in folder.glob(f"{run}-*/run/{name}"):
            with suppress(OSError):
                path.unlink()


def _changed(folder: Path) -> Changed:
    found: list[tuple[int, int, int] | None] = []
    for name in CHECKPOINTS:
        try:
            said = (folder / name).stat()
        except FileNotFoundError:
            found.append(None)
        else:
            found.append((said.st_ino, said.st_mtime_ns, said.st_size))
    return tuple(found)


def _copy(source: Path, target: Path) -> None:
    """Copy a file that may be written meanwhile, or be gone, and have it on the disk.

    A checkpoint in its place is never written again, only replaced: a second name is enough,
    however large it is.
    """
    target.unlink(missing_ok=True)
    if source.name == KEPT:
        try:
            os.link(source, target)
        except FileNotFoundError:
            return
        except OSError:  # this file system has none
            pass
        else:
            return
    try:
        reading = source.open("rb")
    except FileNotFoundError:
        return
    with reading, open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        shutil.copyfileobj(reading, out, 1024 * 1024)
        out.flush()
        os.fsync(out.fileno())
