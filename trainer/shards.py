"""Shards: tensors of which each rank holds some rows, as FSDP2's ``fully_shard`` cuts them.

A layer's parameters are gathered as FSDP does, so that a record's gradients, and their norms over
a whole block, are formed by the rank that has the record. What the ranks then exchange are clipped
sums: a ``Bucket`` of them is added up over all ranks by one reduce-scatter, and a rank keeps its
own rows. Noise, momenta and checkpoints are of those rows. What needs whole matrices
(Newton-Schulz) gets each on one rank, which it is sent to and sent back from.

Rank r of n has the rows from r k on, k = ⌈rows / n⌉: the last ranks have fewer, or none. A mesh of
two dimensions has the rows several times (hybrid sharding): each replica is cut by the ranks of
the last dimension, and replicas have the same sums and draw the same noise for them.

>>> [rows_of(5, rank, 4) for rank in range(4)]
[(0, 2), (2, 4), (4, 5), (5, 5)]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from affidavit.trainer.clipping.requirements import UnsupportedModel
from affidavit.trainer.distributed import Peers, add_up_alike, while_all_live

REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Its name since PyTorch 2.13, or before."""

BUCKET = 25_000_000
"""Bytes of sums that are added up at once. More is fewer collectives and more memory."""

OnWhole = Callable[[list[Tensor], list[int]], Sequence[Tensor]]
"""From whole matrices and their places to as many of the same shapes."""


def rows_of(rows: int, rank: int, size: int) -> tuple[int, int]:
    """The first of the rows that ``rank`` of ``size`` has, and the one after its last."""
    most = -(-rows // size)
    return min(rank * most, rows), min((rank + 1) * most, rows)


def is_sharded(tensor: Tensor | None) -> bool:
    """Whether ``tensor`` is a ``DTensor``; their module, which loads slowly, is not asked.

    It has any shape.
    """
    return hasattr(tensor, "device_mesh")


def local(tensor: Any) -> Tensor:
    """The rows of ``tensor`` that are here, which share its memory; all of one that is not sharded.

    Shape (rows, ...).
    """
    result: Tensor = tensor.detach()
    return result.to_local() if is_sharded(result) else result  # type: ignore[attr-defined]


class Bucket:
    """Clipped sums on their way over all ranks, as many in one collective as ``BUCKET`` bytes hold.

    Every rank puts the same tensors in, in the same order.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Any, Callable[[Tensor], None]]] = []
        self._bytes = 0

    def put(self, total: Tensor, like: Any, take: Callable[[Tensor], None]) -> None:
        """Add up ``total`` over all ranks, and hand ``take`` the rows that are here.

        ``total`` has the shape of ``like``. Raises ``RunFailure`` where a rank does not answer.
        """
        self._waiting.append((total, like, take))
        self._bytes += total.nbytes
        if self._bytes >= BUCKET:
            self.flush()

    def flush(self) -> None:
        """Add up what waits. Raises ``RunFailure`` where a rank does not answer."""
        by_type: dict[torch.dtype, list[tuple[Tensor, Any, Callable[[Tensor], None]]]] = {}
        for item in self._waiting:
            by_type.setdefault(item[0].dtype, []).append(item)
        self.clear()
        for same in by_type.values():
            mesh = same[0][1].device_mesh
            size = mesh.size(mesh.ndim - 1)
            flat = torch.cat([_padded(total, size).view(size, -1) for total, *_ in same], 1)
            rows = flat.new_empty(flat.shape[1])
            with while_all_live():
                REDUCE_SCATTER(rows, flat.view(-1), group=mesh.get_group(mesh.ndim - 1))
            if mesh.ndim == 2:
                add_up_alike(rows, mesh.get_group(0))
            most = [-(-len(like) // size) * math.prod(like.shape[1:]) for _, like, _ in same]
            for part, (_, like, take) in zip(rows.split(most), same, strict=True):
                first, last = _here(like)
                take(part.view(-1, *like.shape[1:])[: last - first])

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting, self._bytes = [], 0


def placed(rows: Tensor, like: Any) -> Tensor:
    """``rows``, those that are here of a tensor that is sharded as ``like``, as a ``DTensor``.

    Shape (rows, ...); that of the result is the shape of ``like``.
    """
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows,
        like.device_mesh,
        like.placements,
        shape=like.shape,
        stride=like.stride(),
        run_check=False,
    )


def whole(tensor: Any) -> Tensor:
    """All rows of ``tensor``, of its shape; every rank asks at once."""
    result: Tensor = tensor.detach()
    return result.full_tensor() if is_sharded(result) else result  # type: ignore[attr-defined]


def here(value: Tensor, like: Any) -> Tensor:
    """The rows of ``value`` that are here of a tensor that is sharded as ``like``.

    ``value`` has the shape of all rows, or already that of those that are here.
    """
    if not is_sharded(like) or value.shape != like.shape:
        return value
    first, last = _here(like)
    return value[first:last]


@dataclass(frozen=True, kw_only=True)
class Shards:
    """The sharded tensors of a run: ``heights`` has how many rows each has in all."""

    mesh: Any
    placements: tuple[Any, ...]
    heights: Mapping[str, int]

    @classmethod
    def of(
        cls, module: nn.Module, trained: Mapping[str, nn.Parameter], peers: Peers
    ) -> Shards | None:
        """Those of ``trained``, or None where each rank has the whole model.

        Raises ``UnsupportedModel`` for another kind of sharding.
        """
        parameters: dict[str, Any] = dict(module.named_parameters())
        sharded = {name: item for name, item in parameters.items() if is_sharded(item)}
        if not sharded:
            return None
        if left := [name for name in trained if name not in sharded]:
            raise UnsupportedModel(
                f"{', '.join(left)}: trainable and not sharded, where other tensors are. Call "
                "fully_shard on the whole model last, without ignored_params, or freeze the tensor."
            )
        from torch.distributed.fsdp import FSDPModule

        first = next(iter(sharded.values()))
        wrapped = [path for path, of in module.named_modules() if isinstance(of, FSDPModule)]
        for name, item in sharded.items():
            within = any(not path or name.startswith(f"{path}.") for path in wrapped)
            *replicated, rows = item.placements
            others = [each.is_replicate() for each in replicated]
            by_rows = rows.is_shard(0) and others in ([], [True])
            on_all = item.device_mesh.size() == peers.size and item.device_mesh == first.device_mesh
            if not (within and by_rows and on_all):
                raise UnsupportedModel(
                    f"{name}: its placement is {tuple(item.placements)} on a mesh of shape "
                    f"{tuple(item.device_mesh.shape)}. The trainer takes rows sharded by "
                    f"fully_shard over one mesh of all {peers.size} ranks, with or without "
                    "replicas; leave out tensor parallelism and shard_placement_fn."
                )
        return cls(
            mesh=first.device_mesh,
            placements=tuple(first.placements),
            heights={name: len(trained[name]) for name in trained},
        )

    @property
    def size(self) -> int:
        """How many ranks share the rows."""
        return int(self.mesh.size(self.mesh.ndim - 1))

    @property
    def rank(self) -> int:
        """The place of this one among them."""
        return int(self.mesh.get_local_rank(self.mesh.ndim - 1))

    @property
    def replica(self) -> int:
        """Which of the replicas this rank has rows of."""
        return int(self.mesh.get_local_rank(0)) if self.mesh.ndim == 2 else 0

    def rows(self, name: str) -> tuple[int, int]:
        """The rows of ``name`` that are here."""
        return rows_of(self.heights[name], self.rank, self.size)

    def on_whole(
        self, parts: list[Tensor], names: Sequence[str], function: OnWhole
    ) -> list[Tensor]:
        """What ``function`` makes of whole matrices, each on one rank; its rows that are here.

        ``parts`` are the rows that are here of the tensors ``names``, (rows, n). The function is
        handed the matrices of this rank, (m, n) each, and their places among ``parts``.
        """
        if not parts:
            return []
        size, rank = self.size, self.rank
        owner = _owners(
            [(self.heights[n], part.shape[1]) for n, part in zip(names, parts, strict=True)], size
        )
        mine = [place for place, of in enumerate(owner) if of == rank]
        counts = {
            (place, of): last - first
            for place, name in enumerate(names)
            for of in range(size)
            for first, last in [rows_of(self.heights[name], of, size)]
        }
        sent = [[parts[p] for p, of in enumerate(owner) if of == to] for to in range(size)]
        shapes = [[(counts[p, of], parts[p].shape[1]) for p in mine] for of in range(size)]
        got = self._exchanged(sent, shapes, parts)
        matrices = [torch.cat([got[of][at] for of in range(size)]) for at in range(len(mine))]
        done = function(matrices, mine) if mine else []
        back = [
            list(matrix.split([counts[p, of] for of in range(size)]))
            for p, matrix in zip(mine, done, strict=True)
        ]
        returned = self._exchanged(
            [[split[to] for split in back] for to in range(size)],
            [[tuple(part.shape) for part in of] for of in sent],
            parts,
        )
        result = list(parts)
        for of, pieces in enumerate(returned):
            places = [place for place, by in enumerate(owner) if by == of]
            for place, piece in zip(places, pieces, strict=True):
                result[place] = piece
        return result

    def _exchanged(
        self,
        sent: Sequence[Sequence[Tensor]],
        shapes: Sequence[Sequence[tuple[int, ...]]],
        like: Sequence[Tensor],
    ) -> list[list[Tensor]]:
        """What every rank sent here, of these shapes, for what is ``sent`` to every rank."""
        flat = [part.reshape(-1) for of in sent for part in of]
        empty = like[0].new_empty(0)
        inputs = torch.cat(flat) if flat else empty
        sizes = [[math.prod(shape) for shape in of] for of in shapes]
        output = empty.new_empty(sum(map(sum, sizes)))
        with while_all_live():
            dist.all_to_all_single(
                output,
                inputs,
                [sum(of) for of in sizes],
                [sum(part.numel() for part in of) for of in sent],
                group=self.mesh.get_group(self.mesh.ndim - 1),
            )
        pieces = iter(output.split([size for of in sizes for size in of]))
        return [[next(pieces).view(shape) for shape in of] for of in shapes]


def _owners(shapes: Sequence[tuple[int, int]], size: int) -> list[int]:
    """A rank for each matrix, the heaviest first to whoever has least, the same on every rank."""
    loads, result = [0] * size, [0] * len(shapes)
    work = [rows * columns * min(rows, columns) for rows, columns in shapes]
    for place in sorted(range(len(shapes)), key=lambda at: -work[at]):
        result[place] = loads.index(min(loads))
        loads[result[place]] += work[place]
    return result


def _here(like: Any) -> tuple[int, int]:
    mesh = like.device_mesh
    return rows_of(len(like), mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))


def _padded(total: Tensor, size: int) -> Tensor:
    """``total`` with rows of zeros, so that every rank has as many."""
    missing = -len(total) % size
    if not missing:
        return total.contiguous()
    return torch.cat([total, total.new_zeros(missing, *total.shape[1:])])
