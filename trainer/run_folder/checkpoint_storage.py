"""Checkpoints: one file that is complete or absent, and that the run's record names.

A checkpoint has the model, the optimiser, the stored noise, and the *next* key. It
is as secret as the data (mode 0600). It is written beside the previous one and synchronised;
then its digest is written to the record; then it replaces the previous one, at once or, if the
process died before that, when it is loaded, because the next one is written to the same place. So
whenever and however often the process dies, a file that the record names exists, and a file that
it does not name (another run's, an altered one) is refused. A run may resume from an older
checkpoint that the record names: the steps after it are charged and lost, and their keys are never
used again. The checkpoint of a sharded run is a folder with a new name, to which all ranks write.

>>> content = serialize_state({"step": 3})
>>> deserialize_state(content)["step"], digest_of_bytes(content)[:7]
(3, 'sha256:')

In such a folder, ``state.pt`` has the whole state, with empty tensors in the place of sharded ones;
PyTorch's Distributed Checkpoint (DCP) writes those beside it. Any number of ranks, or a single
process, may read them: each reads its own rows. All ranks must see the folder, which is as secret
as the data (mode 0700).

One digest, over the digest of each file, names the content of a folder. Neither ``state.pt`` nor
DCP's files are read in a way that could run code in them.

``CheckpointSchedule`` decides how often to repeat what only costs time, such as a checkpoint: every
given number of steps or, by default, so that it takes ``MAX_TIME_SHARE`` of the time. After a
repetition that took a second, the next one is due after twenty seconds.

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

from affidavit.plan import digest_of_bytes
from affidavit.trainer.distributed.peers import Peers, lost_ranks_reported
from affidavit.trainer.distributed.shards import Shards, is_sharded, local_tensor
from affidavit.trainer.errors import RunFailure
from affidavit.trainer.run_folder.run_log import RunLog, write_failure
from affidavit.trust import fsync_directory, write_all

CHECKPOINT_FILE = "checkpoint.pt"
PARTIAL_FILE = "checkpoint.pt.part"
FOLDER_PATTERN = "checkpoint-*"
STATE_FILE = "state.pt"
"""The part of a checkpoint in a folder that is not sharded."""
State = dict[str, Any]


def serialize_state(state: State) -> bytes:
    """Return the content of a checkpoint's file."""
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def deserialize_state(content: bytes) -> State:
    """Return the state in ``content``, with tensors on the CPU, without running code in it."""
    result: State = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return result


def digest_of_folder(folder: Path) -> str:
    """Return the digest of a folder's files and their names."""
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as stream:
            files[path.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digest_of_bytes(json.dumps(files, sort_keys=True).encode())


def save(run_log: RunLog, state: State, *, step: int, parameters: str) -> None:
    """Make ``state``, before ``step``, the run's checkpoint; raises ``RunFailure``."""
    content = serialize_state(state)
    partial = run_log.folder / PARTIAL_FILE
    write(partial, content)
    _record_checkpoint(run_log, digest_of_bytes(content), step, parameters)
    put_in_place(partial, run_log.folder / CHECKPOINT_FILE)
    _remove_folders(run_log.folder)


def commit_folder(run_log: RunLog, folder: str, digest: str, *, step: int, parameters: str) -> None:
    """Make the folder that the ranks wrote, before ``step``, the run's checkpoint."""
    _record_checkpoint(run_log, digest, step, parameters)
    remove(run_log.folder, but=folder)


def _record_checkpoint(run_log: RunLog, digest: str, step: int, parameters: str) -> None:
    run_log.append(
        {"type": "checkpoint", "step": step, "checkpoint": digest, "parameters": parameters}
    )


def remove(folder: Path, *, but: str | None = None) -> None:
    """Remove all checkpoints except the folder ``but``: a run that ended cannot continue."""
    for name in (CHECKPOINT_FILE, PARTIAL_FILE):
        (folder / name).unlink(missing_ok=True)
    _remove_folders(folder, but=but)


def _remove_folders(folder: Path, *, but: str | None = None) -> None:
    for path in folder.glob(FOLDER_PATTERN):
        if path.name != but:
            rmtree(path, ignore_errors=True)


def load(run_log: RunLog) -> tuple[State, str | None]:
    """Load the newest complete checkpoint that the record names, and put it in its place.

    Also returns the name of its folder, which has sharded tensors (``load_sharded``), or None.
    Raises ``RunFailure``: ``no_checkpoint``, ``bad_checkpoint`` or ``not_written``.
    """
    candidates = [
        (name, digest_of_bytes(content), content)
        for name in (CHECKPOINT_FILE, PARTIAL_FILE)
        if (content := _read_or_none(run_log.folder / name)) is not None
    ]
    for path in run_log.folder.glob(FOLDER_PATTERN):
        if (content := _read_or_none(path / STATE_FILE)) is not None:
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
    if name == PARTIAL_FILE:
        put_in_place(run_log.folder / PARTIAL_FILE, run_log.folder / CHECKPOINT_FILE)
    try:
        return deserialize_state(content), None if name in (CHECKPOINT_FILE, PARTIAL_FILE) else name
    except (RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise RunFailure(
            "bad_checkpoint", f"this release cannot read the checkpoint: {error}."
        ) from None


def write(path: Path, content: bytes) -> None:
    """Write ``path`` and synchronise it with its name; a failed write leaves nothing.

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
        raise write_failure(path, error) from None


def put_in_place(partial: Path, path: Path) -> None:
    """Replace ``path`` by the file written beside it; raises like ``write``."""
    try:
        partial.replace(path)
        fsync_directory(path.parent)
    except OSError as error:
        raise write_failure(path, error) from None


def _read_or_none(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


INDEX_FILE = ".metadata"
DCP = "torch.distributed.checkpoint"
"""Imported late: it is slow, and only sharded runs need it."""

ALLOWED_INDEX_CLASSES = frozenset(
    {
        "pathlib.PosixPath",
        "torch.Size",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.serialization._get_layout",
    }
)
"""Allowed classes in DCP's index, in addition to dtypes and the classes of ``metadata``."""


def save_sharded(folder: Path, state: State, peers: Peers) -> str:
    """Write ``state`` with its ``DTensor``s to ``folder`` and return the folder's digest.

    All ranks must call it. Raises ``RunFailure``.
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
        raise write_failure(folder, error) from None

    def finish() -> str:
        write(folder / STATE_FILE, serialize_state(rest))  # it also synchronises the folder
        fsync_directory(folder.parent)
        return digest_of_folder(folder)

    return peers.run_on_leader(finish)


def load_sharded(folder: Path, state: State, shards: Shards | None) -> State:
    """Return ``state``, read from ``state.pt``, with the local rows of each sharded tensor.

    Without ``shards``, and in tensor parallelism, these are all rows. Raises ``RunFailure``.
    """
    dcp: Any = import_module(DCP)

    _require_safe_index(folder / INDEX_FILE)
    leaves, spec = tree_flatten(state)
    missing = {
        str(at): _allocate(item, shards) for at, item in enumerate(leaves) if _is_empty(item)
    }
    with lost_ranks_reported(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it loads in one process, which is intended
        dcp.load(missing, storage_reader=dcp.FileSystemReader(folder), no_dist=shards is None)
    filled = [
        local_tensor(missing[str(at)]) if str(at) in missing else of for at, of in enumerate(leaves)
    ]
    result: State = tree_unflatten(filled, spec)
    return result


def _is_empty(item: Any) -> bool:
    return isinstance(item, Tensor) and item.device.type == "meta"


def _allocate(item: Tensor, shards: Shards | None) -> Tensor:
    if shards is None or shards.layout is None:
        return torch.empty(item.shape, dtype=item.dtype)
    from torch.distributed.tensor import empty

    mesh, placements = shards.layout
    result: Tensor = empty(*item.shape, dtype=item.dtype, device_mesh=mesh, placements=placements)
    return result


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles only what DCP's index consists of."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class; raises ``pickle.UnpicklingError`` for any other."""
        metadata = import_module(f"{DCP}.metadata")
        if f"{module}.{name}" in ALLOWED_INDEX_CLASSES:
            return super().find_class(module, name)
        item = getattr(metadata if module == metadata.__name__ else torch, name, None)
        if isinstance(item, torch.dtype) or getattr(item, "__module__", "") == metadata.__name__:
            return item
        raise pickle.UnpicklingError(f"{module}.{name} is not part of an index")


def _require_safe_index(path: Path) -> None:
    try:
        _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
        raise RunFailure("bad_checkpoint", f"this release cannot read {path}: {error}.") from None


MAX_TIME_SHARE = 0.05
"""Share of a run's time."""


class CheckpointSchedule:
    """When to write checkpoints: ``due`` decides, ``timed`` measures their duration."""

    def __init__(self, every: int | None) -> None:
        self._every, self._cost, self._last = every, 0.0, monotonic()

    def due(self, done: int) -> bool:
        """Return whether a checkpoint is due after ``done`` steps."""
        if self._every is not None:
            return done % self._every == 0
        return monotonic() - self._last >= self._cost / MAX_TIME_SHARE

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the duration of the block."""
        begun = monotonic()
        yield
        self._last = monotonic()
        self._cost = self._last - begun
