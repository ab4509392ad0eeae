"""Checkpoints: one file that is whole or absent, and that the run's record names.

A checkpoint has the model, the optimiser, what is kept of the noise, and the *next* key; it
is as secret as the data (mode 0600). It is written beside the last one and synchronised;
then its digest goes into the record; then it takes the last one's place, now or, where the
process died before that, when it is loaded: the next one is written where it stood. So whatever
moment the process dies at, and however often, a file that the record names is there, and one that
it does not name (another run's, an altered one) is refused. An older one that the record names
may be resumed from: the steps after it are charged and lost, and their keys are never used again.
The checkpoint of a sharded run is a folder of a new name, to which all ranks write
(``affidavit.trainer.sharded_checkpoint``).

>>> content = packed({"step": 3})
>>> unpacked(content)["step"], digest_of_bytes(content)[:7]
(3, 'sha256:')
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch

from affidavit.certificate import fsync_directory
from affidavit.trainer.errors import RunFailure
from affidavit.trainer.run_log import RunLog, unwritable, write_all

NAME = "checkpoint.pt"
PARTIAL = "checkpoint.pt.part"
FOLDERS = "checkpoint-*"
STATE = "state.pt"
"""Of a checkpoint in a folder: all of it but what is sharded."""
State = dict[str, Any]


def packed(state: State) -> bytes:
    """The content of a checkpoint's file."""
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def unpacked(content: bytes) -> State:
    """The state in ``content``, tensors on the processor; no code in it is ever run."""
    result: State = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return result


def digest_of_bytes(content: bytes) -> str:
    """``sha256:`` and the digest of a file's content."""
    return "sha256:" + hashlib.sha256(content).hexdigest()


def digest_of_folder(folder: Path) -> str:
    """The digest of a folder's files and their names."""
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as stream:
            files[path.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digest_of_bytes(json.dumps(files, sort_keys=True).encode())


def save(run_log: RunLog, state: State, *, step: int, parameters: str) -> None:
    """Make ``state``, before ``step``, the run's checkpoint; raises ``RunFailure``."""
    content = packed(state)
    partial = run_log.folder / PARTIAL
    write(partial, content)
    run_log.append(
        {
            "type": "checkpoint",
            "step": step,
            "checkpoint": digest_of_bytes(content),
            "parameters": parameters,
        }
    )
    put_in_place(partial, run_log.folder / NAME)
    _remove_folders(run_log.folder)


def adopt(run_log: RunLog, folder: str, digest: str, *, step: int, parameters: str) -> None:
    """Make what ranks wrote into ``folder``, before ``step``, the run's checkpoint."""
    entry = {"type": "checkpoint", "step": step, "checkpoint": digest, "parameters": parameters}
    run_log.append(entry)
    remove(run_log.folder, but=folder)


def remove(folder: Path, *, but: str | None = None) -> None:
    """Have no checkpoint any more, but one: a run that ended does not go on."""
    for name in (NAME, PARTIAL):
        (folder / name).unlink(missing_ok=True)
    _remove_folders(folder, but=but)


def _remove_folders(folder: Path, *, but: str | None = None) -> None:
    for path in folder.glob(FOLDERS):
        if path.name != but:
            rmtree(path, ignore_errors=True)


def load(run_log: RunLog) -> tuple[State, str | None]:
    """The newest checkpoint that is whole and that the record names, which is in its place then.

    Beside it the name of its folder, where the rest of it is (``sharded_checkpoint``).
    Raises ``RunFailure``: ``no_checkpoint`` or ``bad_checkpoint``, or ``not_written``.
    """
    candidates = [
        (name, digest_of_bytes(content), content)
        for name in (NAME, PARTIAL)
        if (content := _content(run_log.folder / name)) is not None
    ]
    for path in run_log.folder.glob(FOLDERS):
        if (content := _content(path / STATE)) is not None:
            candidates.append((path.name, digest_of_folder(path), content))
    checkpoints = run_log.progress.checkpoints
    result = [
        (checkpoints[digest]["step"], name, content)
        for name, digest, content in candidates
        if digest in checkpoints
    ]
    if not result:
        raise RunFailure(
            "no_checkpoint",
            f"{run_log.folder} has no checkpoint that its record names: it is damaged, altered or "
            "of another run. Put back the one that the run wrote, or start a new run; the steps "
            "that were charged stay spent.",
        )
    _, name, content = max(result, key=lambda item: item[0])
    if name == PARTIAL:
        put_in_place(run_log.folder / PARTIAL, run_log.folder / NAME)
    try:
        return unpacked(content), None if name in (NAME, PARTIAL) else name
    except (RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise RunFailure(
            "bad_checkpoint", f"the checkpoint cannot be read by this release: {error}."
        ) from None


def write(path: Path, content: bytes) -> None:
    """Write ``path`` and have it on the disk under its name; where that fails nothing is left.

    Raises ``RunFailure`` (``not_written``).
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            write_all(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        fsync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise unwritable(path, error) from None


def put_in_place(partial: Path, path: Path) -> None:
    """Have what was written beside it take the place of ``path``; raises as ``write`` does."""
    try:
        partial.replace(path)
        fsync_directory(path.parent)
    except OSError as error:
        raise unwritable(path, error) from None


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
