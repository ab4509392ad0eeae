"""Shards: tensors of which each rank holds some rows, as FSDP2's ``fully_shard`` cuts them.

A layer's parameters are gathered as FSDP does, so that a record's gradients, and their norms over
a whole block, are formed by the rank that has the record. What the ranks then exchange are clipped
sums: each is added up over all ranks by one reduce-scatter, as soon as it is known, and a rank
keeps its own rows of it. Noise, momenta and checkpoints are of those rows. What needs whole
matrices (Newton-Schulz) gets each on one rank, which it is sent to and sent back from.

Rank r of n has the rows from r k on, k = ⌈rows / n⌉: the last ranks have fewer, or none.

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
from affidavit.trainer.distributed import Peers, while_all_live

REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Its name since PyTorch 2.13, or before."""

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


def reduced(total: Tensor, like: Any) -> Tensor:
    """The rows that are here of the sum of every rank's ``total``, of the shape of ``like``.

    Raises ``RunFailure`` where a rank does not answer.
    """
    size, first, last = like.device_mesh.size(), *_here(like)
    padded = _padded(total, size)
    result = padded.new_empty(len(padded) // size, *padded.shape[1:])
    with while_all_live():
        REDUCE_SCATTER(result, padded, group=like.device_mesh.get_group())
    return result[: last - first]


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

        wrapped = [path for path, of in module.named_modules() if isinstance(of, FSDPModule)]
        for name, item in sharded.items():
            within = any(not path or name.startswith(f"{path}.") for path in wrapped)
            placements = [(kind.is_shard(), getattr(kind, "dim", 0)) for kind in item.placements]
            if not within or placements != [(True, 0)] or item.device_mesh.size() != peers.size:
                raise UnsupportedModel(
                    f"{name}: its placement is {tuple(item.placements)} on a mesh of shape "
                    f"{tuple(item.device_mesh.shape)}. The trainer takes rows sharded by "
                    f"fully_shard over one mesh of all {peers.size} ranks; leave out tensor "
                    "parallelism, replicated meshes and shard_placement_fn."
                )
        mesh = next(iter(sharded.values())).device_mesh
        return cls(mesh=mesh, heights={name: len(trained[name]) for name in trained})

    def rows(self, name: str) -> tuple[int, int]:
        """The rows of ``name`` that are here."""
        return rows_of(self.heights[name], self.mesh.get_local_rank(), self.mesh.size())

    def on_whole(
        self, parts: list[Tensor], names: Sequence[str], function: OnWhole
    ) -> list[Tensor]:
        """What ``function`` makes of whole matrices, each on one rank; its rows that are here.

        ``parts`` are the rows that are here of the tensors ``names``, (rows, n). The function is
        handed the matrices of this rank, (m, n) each, and their places among ``parts``.
        """
        if not parts:
            return []
        size, rank = self.mesh.size(), self.mesh.get_local_rank()
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
                group=self.mesh.get_group(),
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
    return rows_of(len(like), like.device_mesh.get_local_rank(), like.device_mesh.size())


def _padded(total: Tensor, size: int) -> Tensor:
    """``total`` with rows of zeros, so that every rank has as many."""
    missing = -len(total) % size
    if not missing:
        return total.contiguous()
    return torch.cat([total, total.new_zeros(missing, *total.shape[1:])])
