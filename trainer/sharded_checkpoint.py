"""Checkpoints of sharded runs: a folder to which each rank writes what it has, in DCP's format.

``state.pt`` has the whole state, with an empty tensor in the place of each that is sharded; those
are beside it, as PyTorch's Distributed Checkpoint (DCP) writes them. Any number of ranks may read
them again, one process as well: each reads the rows that it has from then on. The folder must be
one that all ranks see. It is as secret as the data (mode 0700).

What a folder holds is named by one digest, over the digest of every file. Neither ``state.pt`` nor
DCP's files are read in a way that could run code in them.
"""

from __future__ import annotations

import io
import pickle
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from affidavit.certificate import fsync_directory
from affidavit.trainer.checkpoint import STATE, State, digest_of_folder, packed, write
from affidavit.trainer.distributed import Peers, while_all_live
from affidavit.trainer.errors import RunFailure
from affidavit.trainer.shards import Shards, is_sharded, local

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


def save(folder: Path, state: State, peers: Peers) -> str:
    """Write ``state``, in which what is sharded are ``DTensor``s, and return the folder's digest.

    All ranks call it. Raises ``RunFailure``.
    """
    dcp: Any = import_module(DCP)

    leaves, spec = tree_flatten(state)
    sharded = {str(at): item for at, item in enumerate(leaves) if is_sharded(item)}
    rest = tree_unflatten([_emptied(item) if is_sharded(item) else item for item in leaves], spec)
    try:
        with while_all_live():
            dcp.save(sharded, storage_writer=dcp.FileSystemWriter(folder))
    except (dcp.CheckpointException, OSError) as error:
        raise RunFailure("not_written", f"{folder} could not be written: {error}.") from None

    def finish() -> str:
        write(folder / STATE, packed(rest))  # which has the whole folder on the disk
        fsync_directory(folder.parent)
        return digest_of_folder(folder)

    return peers.led(finish)


def load(folder: Path, state: State, shards: Shards | None) -> State:
    """``state``, as ``state.pt`` has it, with the rows of every sharded tensor that are here.

    Without ``shards``, and in tensor parallelism, they are all rows. Raises ``RunFailure``.
    """
    dcp: Any = import_module(DCP)

    _require_plain(folder / METADATA)
    leaves, spec = tree_flatten(state)
    missing = {str(at): _room(item, shards) for at, item in enumerate(leaves) if _is_empty(item)}
    with while_all_live(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it loads in one process, which is meant
        dcp.load(missing, storage_reader=dcp.FileSystemReader(folder), no_dist=shards is None)
    filled = [local(missing[str(at)]) if str(at) in missing else of for at, of in enumerate(leaves)]
    result: State = tree_unflatten(filled, spec)
    return result


def _emptied(item: Any) -> Tensor:
    return torch.empty(item.shape, dtype=item.dtype, device="meta")


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
        raise pickle.UnpicklingError(f"{module}.{name} is no part of an index")


def _require_plain(path: Path) -> None:
    try:
        _Plain(io.BytesIO(path.read_bytes())).load()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
        raise RunFailure(
            "bad_checkpoint", f"{path} cannot be read by this release: {error}."
        ) from None
