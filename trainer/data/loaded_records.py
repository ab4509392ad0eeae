"""The records of a loader's map-style data set, read by its workers.

A run draws its lots; the loader's sampler is not used. Its workers read the microbatches of drawn
lots ahead, while a step runs, as many as they prefetch in PyTorch. A microbatch is the same by
whomever it is read: its random draws by torch have a seed of their own.

The digest of the data covers the tensors of each record. Workers take it before the first step, and
what they have is kept in a file of the run's folder until it is whole, so that it goes on after an
interruption. A digest that is given is not compared with the records.

Guarantees
    * Lots that are read ahead are those that the run draws, in their order; none is skipped.
    * Workers do not hold the lock of the run's folder, so a run that died can be resumed at once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from affidavit.trainer.adapters import Batch, digest_of_tensors, parts_of
from affidavit.trainer.clipping.probe import fixed_draws, random_state, seed_torch
from affidavit.trainer.errors import UnsupportedModel

Collate = Callable[[list[Any]], Batch]

DIGEST_FILE = "digest.partial"
"""Digests of the first records; like the checkpoint, it is as secret as the data."""
DIGEST_BYTES = 32
CHUNK = 64
"""Records of which a worker takes the digests at a time."""


class LoadedRecords:
    """The records of a map-style data set, as a ``DataAdapter``; ``folder`` is that of the run."""

    def __init__(self, loader: DataLoader[Any], digest: str | None, folder: Path) -> None:
        self._loader, self._dataset = loader, loader.dataset
        self._collate: Collate = loader.collate_fn
        self._digest, self._file = digest, folder / DIGEST_FILE
        self.digest_is_given = digest is not None
        self._stream: Iterator[Batch] | None = None

    @property
    def digest(self) -> str:
        """The given digest, or else a digest of each record's tensors."""
        if self._digest is None:
            self._digest = self._take_digest()
        return self._digest

    def __len__(self) -> int:
        dataset: Any = self._dataset
        return len(dataset)

    def collate(self, indices: Tensor) -> Batch:
        """Return the next microbatch of ``read_ahead``, whose records are ``indices``, (n,).

        Raises ``RuntimeError`` if it has others.
        """
        assert self._stream is not None
        places, batch = next(self._stream)
        if places != indices.tolist():
            raise RuntimeError("the microbatches that were read are not those of the run")
        return batch

    def read_ahead(self, microbatches: Iterable[tuple[int, list[int]]], lock: int | None) -> None:
        """Read ``microbatches`` for ``collate``: a seed and the numbers of records of each.

        Workers take them from the iterable as they have room. They close the file ``lock``.
        """
        read = _Microbatches(self._dataset, self._collate)
        self._stream = iter(self._load(read, microbatches, lock))

    def close(self) -> None:
        """Stop the workers."""
        self._stream = None

    def _load(self, dataset: Dataset[Any], items: Iterable[Any], lock: int | None) -> Any:
        """Load ``items`` of ``dataset`` in their order, with the settings of the user's loader."""
        of = self._loader
        return DataLoader(
            dataset,
            batch_size=None,
            sampler=items,
            collate_fn=_keep,
            num_workers=of.num_workers,
            prefetch_factor=of.prefetch_factor,
            pin_memory=of.pin_memory and torch.cuda.is_available(),
            timeout=of.timeout,
            multiprocessing_context=of.multiprocessing_context,
            worker_init_fn=_Worker(of.worker_init_fn, lock) if of.num_workers else None,
        )

    def _take_digest(self) -> str:
        digests = _Digests(self._dataset, self._collate)
        known = self._file.read_bytes() if self._file.exists() else b""
        known = known[: len(known) // (CHUNK * DIGEST_BYTES) * CHUNK * DIGEST_BYTES]
        first = len(known) // DIGEST_BYTES
        if known and digests[range(first - CHUNK, first)] != known[-CHUNK * DIGEST_BYTES :]:
            known, first = b"", 0  # of other data
        chunks = [range(at, min(at + CHUNK, len(self))) for at in range(first, len(self), CHUNK)]
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(os.open(self._file, flags, 0o600), "wb") as file:
            for part in [known], self._load(digests, chunks, None):
                for content in part:
                    file.write(content)
                    file.flush()
        result = self._digest_of_file()
        self._file.unlink()
        return result

    def _digest_of_file(self) -> str:
        """Return the digest of all records' digests as one tensor of bytes, like in a batch."""
        length = len(self) * len(f"sha256:{bytes(DIGEST_BYTES).hex()}")
        result = hashlib.sha256(f"torch.uint8 [{length}]\n".encode())
        with self._file.open("rb") as file:
            while content := file.read(DIGEST_BYTES):
                result.update(f"sha256:{content.hex()}".encode())
        return f"sha256:{result.hexdigest()}"

    def pick_different(self) -> Tensor:
        """Return the numbers of three of the first records, the largest last; shape (3,)."""
        with fixed_draws(0):
            sizes = [
                sum(item.numel() for item in tensors_of(self._batch([place])))
                for place in range(min(64, len(self)))
            ]
        order = torch.tensor(sizes).argsort(stable=True)
        return order[[0, len(order) // 2, -1]] if len(order) > 2 else order

    def collate_fixed(self, indices: Tensor, seed: int = 0) -> Batch:
        """Collate (n,) records; each record has the same random draws at any place."""
        items = self._items(indices)
        with fixed_draws(seed):
            return self._collate(items)

    def collate_draws(self, indices: Tensor) -> bool:
        """Return whether ``collate_fn`` draws random numbers for these records; shape (n,)."""
        items = self._items(indices)
        with fixed_draws(0):
            before = random_state()
            self._collate(items)
            return bool(random_state() != before)

    def _items(self, indices: Tensor) -> list[Any]:
        items = []
        for place in indices.tolist():
            with fixed_draws(place):
                items.append(self._dataset[place])
        return items

    def _batch(self, places: Sequence[int]) -> Batch:
        return self._collate([self._dataset[place] for place in places])


class _Microbatches(Dataset[tuple[list[int], Batch]]):
    """Microbatches by their seed and the numbers of their records."""

    def __init__(self, dataset: Dataset[Any], collate: Collate) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitem__(self, item: tuple[int, list[int]]) -> tuple[list[int], Batch]:
        seed, places = item
        seed_torch(seed)
        return places, self._collate([self._dataset[place] for place in places])


class _Digests(Dataset[bytes]):
    """Digests of records by the range of their numbers."""

    def __init__(self, dataset: Dataset[Any], collate: Collate) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitem__(self, places: range) -> bytes:
        result = b""
        for place in places:
            with fixed_draws(place):
                text = digest_of_batch(self._collate([self._dataset[place]]))
            result += bytes.fromhex(text.removeprefix("sha256:"))
        return result


class _Worker:
    """Begins a worker: it leaves the run's lock, then does what the user's loader asks."""

    def __init__(self, begin: Callable[[int], None] | None, lock: int | None) -> None:
        self._begin = begin
        self._lock = None if lock is None else (lock, _identity(lock))

    def __call__(self, number: int) -> None:
        """Begin worker ``number``."""
        if self._lock is not None and _identity(self._lock[0]) == self._lock[1]:
            os.close(self._lock[0])  # inherited by fork
        if self._begin is not None:
            self._begin(number)


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _keep(item: Any) -> Any:
    return item


def digest_of_batch(batch: Batch) -> str:
    """Return the digest of all tensors of ``batch``, and of its other values as texts."""
    return digest_of_tensors(*tensors_of(batch))


def tensors_of(batch: Batch) -> list[Tensor]:
    """Return the tensors of ``batch``, in their shapes; other values as the bytes of their text.

    Raises ``UnsupportedModel`` for a nested tensor.
    """
    if isinstance(batch, Tensor):
        if batch.is_nested:
            raise UnsupportedModel(
                "loader: its batches have nested tensors, which cannot be split into records. Pad "
                "them in collate_fn."
            )
        return [batch]
    if (parts := parts_of(batch)) is not None:
        return [item for part in parts for item in tensors_of(part)]
    return [torch.tensor(list(repr(batch).encode()), dtype=torch.uint8)]
