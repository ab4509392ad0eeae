"""Adapters: what the trainer asks of a model and of data, and nothing more.

A ``DataAdapter`` is numbered records 0..N-1. A record is what one unit of the plan's
``dataset`` protects; the samplers choose numbers, ``collate`` turns numbers into a batch, and
``digest`` says which data set that was, content and order, in the run record. ``collate`` must
treat each record by itself: padding to the longest record is fine where the loss ignores it,
packing two records into one row is not.

A ``ModelAdapter`` is a module, its loss for each record by itself, and ``blocks``: for every
release of the plan its groups of parameters. A release of ``count`` K has K groups; each
group is clipped together to the release's clip norm, and every trainable tensor of the
module is in exactly one group (freeze the others with ``requires_grad_(False)``). The release
of tensors that are no hidden matrices, which DP-Muon leaves to AdamW, has a name that begins
with "aux". ``made_up`` makes a batch of records that are of no data set and differ from each
other; the trainer probes the model with them before it reads any data.

A batch is a tensor, or tuples, lists and dicts of tensors, on the processor; the trainer
moves it to its device. No method may keep anything of a batch, and none may draw from data:
weights come from a seed or a file that is public.

docs/models-and-data.md has an example. A new built-in adapter is a file in
``affidavit.trainer.data`` or ``affidavit.trainer.models`` and one line in the registry of
``sources``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import chain
from numbers import Number
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from affidavit.trainer.errors import UnsupportedModel

Batch = Any
"""A tensor, or tuples, lists, mappings and dataclasses of tensors with the records first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Parameters clipped together: one block of a release.

    ``uses`` is for a tied tensor of which every use is clipped by itself: the layers that use
    it, each with its share of the release's clip norm; the shares add to at most 1.
    """

    names: tuple[str, ...]
    uses: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class ModelAdapter(Protocol):
    """A model that can be trained record by record."""

    module: nn.Module

    def losses(self, batch: Batch) -> Tensor:
        """The loss of each record of ``batch``, shape (n,), from that record alone."""

    def blocks(self) -> Mapping[str, Sequence[Group]]:
        """The groups of every release, by the release's name."""

    def made_up(self, records: int) -> Batch:
        """A batch of ``records`` made-up records, all different."""


@runtime_checkable
class DataAdapter(Protocol):
    """Numbered records; ``digest`` is ``sha256:`` and 64 hexadecimal digits.

    A plan of users with several records needs ``most_of_a_user`` as well, the most that one has.
    """

    @property
    def digest(self) -> str:
        """The digest of all records in their order."""

    def __len__(self) -> int:
        """N, how many records there are."""

    def collate(self, indices: Tensor) -> Batch:
        """The records at ``indices``, a sorted int64 tensor that is not empty. Shape (n,)."""


def digest_of_tensors(*tensors: Tensor | Iterable[Tensor]) -> str:
    """sha256 over the types, shapes and little-endian bytes of ``tensors`` in turn.

    Several tensors may come one after the other, so that not all are there at a time.

    >>> digest_of_tensors(torch.arange(3))[:23]
    'sha256:e0eb7780825780e8'
    """
    result = hashlib.sha256()
    for tensor in chain.from_iterable([t] if isinstance(t, Tensor) else t for t in tensors):
        held = tensor.detach().cpu().contiguous()
        result.update(f"{held.dtype} {list(held.shape)}\n".encode())
        result.update(held.view(-1).view(torch.uint8).numpy().tobytes())
    return f"sha256:{result.hexdigest()}"


def on_device(batch: Batch, device: torch.device) -> Batch:
    """``batch`` with all its tensors moved to ``device``."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    return mapped(batch, lambda part: on_device(part, device))


def picked_records(batch: Batch, rows: Tensor) -> Batch:
    """The records of ``batch`` with the numbers ``rows``, shape (n,).

    Raises ``UnsupportedModel`` for what has no first dimension.
    """
    if isinstance(batch, Tensor) and batch.dim():
        return batch[rows]
    if isinstance(batch, tuple | list) and batch and all(map(_is_plain, batch)):
        return [batch[row] for row in rows.tolist()]  # one value a record: strings, say
    if parts_of(batch) is not None:
        return mapped(batch, lambda part: picked_records(part, rows))
    if _is_plain(batch):
        return batch
    what = "a tensor without dimensions" if isinstance(batch, Tensor) else type(batch).__name__
    raise UnsupportedModel(
        f"a batch has {what}, whose records are unknown. Make batches of tensors with the records "
        "in the first dimension, in tuples, lists, dicts or dataclasses."
    )


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | bytes | Number)


def parts_of(batch: Batch) -> list[Batch] | None:
    """What a tuple, list, mapping or dataclass has, by its sorted keys; None of anything else."""
    if isinstance(batch, Mapping):
        return [batch[key] for key in sorted(batch)]
    if isinstance(batch, tuple | list):
        return list(batch)
    if is_dataclass(batch):
        return [getattr(batch, item.name) for item in fields(batch)]
    return None


def mapped(batch: Batch, function: Callable[[Batch], Batch]) -> Batch:
    """A batch of the same form with ``function`` of each part; itself if it has no parts."""
    if isinstance(batch, Mapping):
        parts = {key: function(value) for key, value in batch.items()}
        if isinstance(batch, dict) or not isinstance(batch, MutableMapping):
            return parts
        result = copy(batch)
        result.update(parts)
        return result
    if isinstance(batch, tuple | list):
        values = tuple(function(value) for value in batch)
        return type(batch)(*values) if hasattr(batch, "_fields") else values
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(
            batch, **{item.name: function(getattr(batch, item.name)) for item in fields(batch)}
        )
    return batch
