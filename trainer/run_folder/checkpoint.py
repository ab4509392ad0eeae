"""Checkpoints: one file that is whole or absent, and that the run's record names.

A checkpoint has the model, the optimiser, what is kept of the noise, and the *next* key; it
is as secret as the data (mode 0600). It is written beside the last one and synchronised;
then its digest goes into the record; then it takes the last one's place, now or, where the
process died before that, when it is loaded: the next one is written where it stood. So whatever
moment the process dies at, and however often, a file that the record names is there, and one that
it does not name (another run's, an altered one) is refused. An older one that the record names
may be resumed from: the steps after it are charged and lost, and their keys are never used again.
The checkpoint of a sharded run is a folder of a new name, to which all ranks write.

>>> content = packed({"step": 3})
>>> unpacked(content)["step"], digest_of_bytes(content)[:7]
(3, 'sha256:')

In such a folder ``state.pt`` has the whole state, with an empty tensor in the place of each that
is sharded; those are beside it, as PyTorch's Distributed Checkpoint (DCP) writes them. Any number
of ranks may read them again, one process as well: each reads the rows that it has from then on.
The folder must be one that all ranks see. It is as secret as the data (mode 0700).

What a folder holds is named by one digest, over the digest of every file. Neither ``state.pt`` nor
DCP's files are read in a way that could run code in them.

``CheckpointSchedule`` says how often to do again what only costs time, such as a checkpoint: every
so many steps where the user says so; else as often as takes ``SHARE`` of the time: after something
that took a second, not before twenty have passed.

>>> often = CheckpointSchedule(every=3)
>>> [often.due(done) for done in range(1, 7)]
[False, False, True, False, False, True]
>>> CheckpointSchedule(every=None).due(1)
True
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from affidavit.certificate import fsync_directory, write_all
from affidavit.trainer.distributed.peers import Peers, lost_ranks_reported
from affidavit.trainer.distributed.shards import Shards, is_sharded, local
from affidavit.trainer.errors import RunFailure
from affidavit.trainer.run_folder.run_log import RunLog, unwritable

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
    _name(run_log, digest_of_bytes(content), step, parameters)
    put_in_place(partial, run_log.folder / NAME)
    _remove_folders(run_log.folder)


def adopt(run_log: RunLog, folder: str, digest: str, *, step: int, parameters: str) -> None:
    """Make what the ranks wrote to ``folder``, before ``step``, the run's checkpoint."""
    _name(run_log, digest, step, parameters)
    remove(run_log.folder, but=folder)


def _name(run_log: RunLog, digest: str, step: int, parameters: str) -> None:
    run_log.append(
        {"type": "checkpoint", "step": step, "checkpoint": digest, "parameters": parameters}
    )


def remove(folder: Path, *, but: str | None = None) -> None:
    """Remove all checkpoints, except the folder ``but``: a run that ended cannot continue."""
    for name in (NAME, PARTIAL):
        (folder / name).unlink(missing_ok=True)
    _remove_folders(folder, but=but)


def _remove_folders(folder: Path, *, but: str | None = None) -> None:
    for path in folder.glob(FOLDERS):
        if path.name != but:
            rmtree(path, ignore_errors=True)


def load(run_log: RunLog) -> tuple[State, str | None]:
    """The newest checkpoint that is whole and that the record names, which is in its place then.

    Beside it the name of its folder, where the rest of it is (``load_sharded``).
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
            f"{run_log.folder} has no checkpoint that its record names: the checkpoint is damaged, "
            "altered or from another run. Restore the run's own, or start a new run. Charged steps "
            "stay spent.",
        )
    _, name, content = max(result, key=lambda item: item[0])
    if name == PARTIAL:
        put_in_place(run_log.folder / PARTIAL, run_log.folder / NAME)
    try:
        return unpacked(content), None if name in (NAME, PARTIAL) else name
    except (RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise RunFailure(
            "bad_checkpoint", f"this release cannot read the checkpoint: {error}."
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
    """Replace ``path`` by the file written beside it; raises as ``write`` does."""
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


METADATA = ".metadata"
DCP = "torch.distributed.checkpoint"
"""Loaded late: it takes a while, and only sharded runs need it."""

INDEX = frozenset(
    {
        "pathlib.PosixPath",
        "torch.Size",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.serialization._get_layout",
    }
)
"""What DCP's index has objects of, beside dtypes and the classes of its module ``metadata``."""


def save_sharded(folder: Path, state: State, peers: Peers) -> str:
    """Write ``state``, in which what is sharded are ``DTensor``s, and return the folder's digest.

    All ranks call it. Raises ``RunFailure``.
    """
    dcp: Any = import_module(DCP)

    leaves, spec = tree_flatten(state)
    sharded = {str(at): item for at, item in enumerate(leaves) if is_sharded(item)}
    emptied = [
        torch.empty(item.shape, dtype=item.dtype, device="meta") if is_sharded(item) else item
        for item in leaves
    ]
    rest = tree_unflatten(emptied, spec)
    try:
        with lost_ranks_reported():
            dcp.save(sharded, storage_writer=dcp.FileSystemWriter(folder))
    except (dcp.CheckpointException, OSError) as error:
        raise unwritable(folder, error) from None

    def finish() -> str:
        write(folder / STATE, packed(rest))  # which has the whole folder on the disk
        fsync_directory(folder.parent)
        return digest_of_folder(folder)

    return peers.run_on_leader(finish)


def load_sharded(folder: Path, state: State, shards: Shards | None) -> State:
    """``state``, as ``state.pt`` has it, with the rows of every sharded tensor that are here.

    Without ``shards``, and in tensor parallelism, they are all rows. Raises ``RunFailure``.
    """
    dcp: Any = import_module(DCP)

    _require_plain(folder / METADATA)
    leaves, spec = tree_flatten(state)
    missing = {str(at): _room(item, shards) for at, item in enumerate(leaves) if _is_empty(item)}
    with lost_ranks_reported(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it loads in one process, which is meant
        dcp.load(missing, storage_reader=dcp.FileSystemReader(folder), no_dist=shards is None)
    filled = [local(missing[str(at)]) if str(at) in missing else of for at, of in enumerate(leaves)]
    result: State = tree_unflatten(filled, spec)
    return result


def _is_empty(item: Any) -> bool:
    return isinstance(item, Tensor) and item.device.type == "meta"


def _room(item: Tensor, shards: Shards | None) -> Tensor:
    if shards is None or shards.room is None:
        return torch.empty(item.shape, dtype=item.dtype)
    from torch.distributed.tensor import empty

    mesh, placements = shards.room
    result: Tensor = empty(*item.shape, dtype=item.dtype, device_mesh=mesh, placements=placements)
    return result


class _Plain(pickle.Unpickler):
    """Reads nothing but what DCP's index is made of."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises ``pickle.UnpicklingError`` for anything else."""
        metadata = import_module(f"{DCP}.metadata")
        if f"{module}.{name}" in INDEX:
            return super().find_class(module, name)
        item = getattr(metadata if module == metadata.__name__ else torch, name, None)
        if isinstance(item, torch.dtype) or getattr(item, "__module__", "") == metadata.__name__:
            return item
        raise pickle.UnpicklingError(f"{module}.{name} is not part of an index")


def _require_plain(path: Path) -> None:
    try:
        _Plain(io.BytesIO(path.read_bytes())).load()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
        raise RunFailure("bad_checkpoint", f"this release cannot read {path}: {error}.") from None


SHARE = 0.05
"""Of the time of a run."""


class CheckpointSchedule:
    """When to write checkpoints: ``due`` decides, ``timed`` measures how long one takes."""

    def __init__(self, every: int | None) -> None:
        self._every, self._cost, self._last = every, 0.0, monotonic()

    def due(self, done: int) -> bool:
        """Whether one is due after ``done`` steps."""
        if self._every is not None:
            return done % self._every == 0
        return monotonic() - self._last >= self._cost / SHARE

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the block."""
        begun = monotonic()
        yield
        self._last = monotonic()
        self._cost = self._last - begun
