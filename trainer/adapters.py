"""Adapters: the interfaces of models and data.

A ``DataAdapter`` has numbered records 0..N-1. A record is what one unit of the plan's
``dataset`` protects. Samplers choose numbers, ``collate`` turns numbers into a batch, and
``digest`` identifies the data set, content and order, in the run record. ``collate`` must
treat each record by itself: padding to the longest record is allowed if the loss ignores it,
packing two records into one row is not.

A ``ModelAdapter`` has a module, its loss for each record by itself, and ``blocks``: the groups of
parameters of each release of the plan. A release of ``count`` K has K groups. Each
group is clipped together to the release's clip norm, and every trainable tensor of the
module is in exactly one group (freeze the others with ``requires_grad_(False)``). The release
of tensors that are no hidden matrices, which DP-Muon leaves to AdamW, has a name that begins
with "aux". ``made_up`` makes a batch of records that belong to no data set and differ from each
other; the trainer probes the model with them before it reads any data.

A batch is a tensor, or tuples, lists and dicts of tensors, on the CPU; the trainer
moves it to its device. No method may store anything of a batch, and none may depend on data:
weights come from a seed or a public file.

docs/how-to/models-and-data.md has an example. A new built-in adapter is a file in
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
    """Parameters that are clipped together: one block of a release.

    ``uses`` is for a tied tensor whose uses are clipped separately: the layers that use
    it, each with its share of the release's clip norm; the shares add to at most 1.
    """

    names: tuple[str, ...]
    uses: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class ModelAdapter(Protocol):
    """A model that can be trained record by record."""

    module: nn.Module

    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of each record of ``batch``, shape (n,), from that record alone."""

    def blocks(self) -> Mapping[str, Sequence[Group]]:
        """Return the groups of each release, by the release's name."""

    def made_up(self, records: int) -> Batch:
        """Return a batch of ``records`` made-up records, all different."""


@runtime_checkable
class DataAdapter(Protocol):
    """Numbered records; ``digest`` is ``sha256:`` and 64 hexadecimal digits.

    A plan of users with several records also needs ``most_of_a_user``, the largest number of
    records of a user, and ``most_users_of_a_record`` if it is more than 1. ``own_parts`` is true if
    records are groups of which some users own a part (``PartOwners``). ``digest_is_given`` is true
    if the digest was not taken from the records.
    """

    @property
    def digest(self) -> str:
        """The digest of all records in their order."""

    def __len__(self) -> int:
        """Return N, the number of records."""

    def collate(self, indices: Tensor) -> Batch:
        """Return the records at ``indices``, a sorted int64 tensor (n,) that is not empty."""


def digest_of_tensors(*tensors: Tensor | Iterable[Tensor]) -> str:
    """Return the sha256 digest of the types, shapes and little-endian bytes of ``tensors``.

    An iterable of tensors is read one by one, so that not all are in memory at once.
    >>> digest_of_tensors(torch.arange(3))[:23]
    'sha256:e0eb7780825780e8'
    """
    result = hashlib.sha256()
    for tensor in chain.from_iterable([t] if isinstance(t, Tensor) else t for t in tensors):
        values = tensor.detach().cpu().contiguous()
        result.update(f"{values.dtype} {list(values.shape)}\n".encode())
        result.update(values.view(-1).view(torch.uint8).numpy().tobytes())
    return f"sha256:{result.hexdigest()}"


def move_to_device(batch: Batch, device: torch.device) -> Batch:
    """Move all tensors of ``batch`` to ``device``."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    return map_parts(batch, lambda part: move_to_device(part, device))


def select_records(batch: Batch, rows: Tensor) -> Batch:
    """Return the records of ``batch`` with the numbers ``rows``, shape (n,).

    Raises ``UnsupportedModel`` for a part without a first dimension.
    """
    if isinstance(batch, Tensor) and batch.dim():
        return batch[rows]
    if isinstance(batch, tuple | list) and batch and all(map(_is_plain, batch)):
        return [batch[row] for row in rows.tolist()]  # one value per record, for example a string
    if parts_of(batch) is not None:
        return map_parts(batch, lambda part: select_records(part, rows))
    if _is_plain(batch):
        return batch
    what = "a tensor without dimensions" if isinstance(batch, Tensor) else type(batch).__name__
    raise UnsupportedModel(
        f"a batch has {what}, whose records are unknown. Make batches of tensors with the records "
        "in the first dimension, in tuples, lists, dicts or dataclasses."
    )


def has_rows(batch: Batch, records: int) -> bool:
    """Return whether each part of ``batch`` has one row for each of ``records``, or is plain."""
    if isinstance(batch, Tensor):
        return batch.dim() > 0 and not batch.is_nested and len(batch) == records
    if isinstance(batch, tuple | list) and batch and all(map(_is_plain, batch)):
        return len(batch) == records
    parts = parts_of(batch)
    return _is_plain(batch) if parts is None else all(has_rows(part, records) for part in parts)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | bytes | Number)


def parts_of(batch: Batch) -> list[Batch] | None:
    """Return the parts of a tuple, list, mapping (by sorted keys) or dataclass, otherwise None."""
    if isinstance(batch, Mapping):
        return [batch[key] for key in sorted(batch)]
    if isinstance(batch, tuple | list):
        return list(batch)
    if is_dataclass(batch):
        return [getattr(batch, item.name) for item in fields(batch)]
    return None


def map_parts(batch: Batch, function: Callable[[Batch], Batch]) -> Batch:
    """Apply ``function`` to each part of a batch; a batch without parts stays."""
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
