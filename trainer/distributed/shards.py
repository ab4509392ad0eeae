"""Shards: tensors that PyTorch distributes among ranks.

FSDP2's ``fully_shard`` distributes rows. A layer's parameters are gathered like in FSDP, so that
the rank that has a record forms its gradients, and their norms over a whole block. The ranks then
exchange clipped sums: a reduce-scatter adds up a ``Bucket`` of them over all ranks, and each rank
keeps its own rows. Noise, momenta and checkpoints consist of those rows. An update that needs full
matrices (Newton-Schulz) gathers each matrix on one rank, and sends the rows back.

Rank r of n has the rows from r k on, k = ⌈rows / n⌉; the last ranks have fewer rows, or none. A
mesh of two dimensions has the rows several times (hybrid sharding): each replica is sharded by the
ranks of the last dimension, and replicas have the same sums and draw the same noise for them.

>>> [row_range(5, rank, 4) for rank in range(4)]
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

from affidavit.trainer.distributed.peers import (
    Peers,
    all_reduce,
    all_reduce_identical,
    lost_ranks_reported,
)
from affidavit.trainer.errors import UnsupportedModel

REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""PyTorch 2.13 renamed it."""

BUCKET_BYTES = 25_000_000
"""Size of a collective. Larger buckets need fewer collectives and more memory."""

Box = tuple[tuple[int, int], tuple[int, int]]
"""A range of rows and a range of columns of a tensor as a matrix."""

FullMatrixMap = Callable[[list[Tensor], list[int]], Sequence[Tensor]]
"""Maps full matrices, with their places, to matrices of the same shapes."""


def row_range(rows: int, rank: int, size: int) -> tuple[int, int]:
    """Return the range of the rows that ``rank`` of ``size`` has."""
    rows_per_rank = -(-rows // size)
    return min(rank * rows_per_rank, rows), min((rank + 1) * rows_per_rank, rows)


def is_sharded(tensor: Tensor | None) -> bool:
    """Return whether ``tensor``, of any shape, is a ``DTensor``, without its slow import."""
    return hasattr(tensor, "device_mesh")


def local_tensor(tensor: Any) -> Tensor:
    """Return the local rows of ``tensor``, (rows, ...), which share its memory."""
    result: Tensor = tensor.detach()
    return result.to_local() if is_sharded(result) else result  # type: ignore[attr-defined]


class Bucket:
    """Collects clipped sums, and adds up ``BUCKET_BYTES`` bytes of them in one collective.

    Each rank puts in the same tensors in the same order.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Any, Callable[[Tensor], None]]] = []
        self._bytes = 0

    def put(self, total: Tensor, like: Any, take: Callable[[Tensor], None]) -> None:
        """Add up ``total`` over the ranks with other records, and give ``take`` the local rows.

        ``total`` has the shape of ``like``, or of its part in tensor parallelism. Raises
        ``RunFailure`` if a rank does not respond.
        """
        self._waiting.append((total, like, take))
        self._bytes += total.nbytes
        if self._bytes >= BUCKET_BYTES:
            self.flush()

    def flush(self) -> None:
        """Add up pending sums. Raises ``RunFailure`` if a rank does not respond."""
        by_type: dict[torch.dtype, list[tuple[Tensor, Any, Callable[[Tensor], None]]]] = {}
        for item in self._waiting:
            by_type.setdefault(item[0].dtype, []).append(item)
        self.clear()
        for same in by_type.values():
            mesh = same[0][1].device_mesh
            rows_dim = int(_has_replicas(same[0][1]))
            size = mesh.size(rows_dim)
            flat = torch.cat([_pad_rows(total, size).view(size, -1) for total, *_ in same], 1)
            rows = flat.new_empty(flat.shape[1])
            with lost_ranks_reported():
                REDUCE_SCATTER(rows, flat.view(-1), group=mesh.get_group(rows_dim))
            if rows_dim:
                all_reduce_identical(rows, mesh.get_group(0))
            sizes = [-(-len(total) // size) * math.prod(total.shape[1:]) for total, *_ in same]
            for part, (total, like, take) in zip(rows.split(sizes), same, strict=True):
                take(part.view(-1, *total.shape[1:])[: len(local_tensor(like))])

    def clear(self) -> None:
        """Discard pending sums."""
        self._waiting, self._bytes = [], 0


def to_dtensor(rows: Tensor, like: Any) -> Tensor:
    """Return the local ``rows`` (rows, ...) as a ``DTensor`` of the shape of ``like``."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows,
        like.device_mesh,
        like.placements,
        shape=like.shape,
        stride=like.stride(),
        run_check=False,
    )


def gather_full(tensor: Any) -> Tensor:
    """Gather all rows of ``tensor``, in its shape; all ranks must call this."""
    result: Tensor = tensor.detach()
    return result.full_tensor() if is_sharded(result) else result  # type: ignore[attr-defined]


def local_part(value: Tensor, like: Any) -> Tensor:
    """Return the local part of ``value`` for a tensor that is sharded like ``like``.

    ``value`` has the full shape, or already the local shape.
    """
    if not is_sharded(like) or value.shape != like.shape:
        return value
    mesh = like.device_mesh
    rows, columns = _find_box(like, [int(mesh.get_local_rank(dim)) for dim in range(mesh.ndim)])
    part = value[slice(*rows)]
    return part[:, slice(*columns)] if part.ndim == 2 else part


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel:
    """The ranks that share layers by ``parallelize_module``: all of them have the same records.

    ``cut_shapes`` has the local shapes of the tensors of which each rank has a part.
    For any other tensor, each rank computes the full gradient, and rank 0's is released.
    ``is_whole_mesh`` tells that no other ranks have other records.
    """

    group: Any
    rank: int
    size: int
    cut_shapes: Mapping[str, tuple[int, ...]]
    is_whole_mesh: bool

    def contributes(self, name: str) -> bool:
        """Return whether this rank's gradient of ``name`` is released."""
        return self.rank == 0 or name in self.cut_shapes

    def gather(self, values: Tensor) -> list[Tensor]:
        """Return the ``values`` of all ranks, all of one shape."""
        result = [torch.empty_like(values) for _ in range(self.size)]
        with lost_ranks_reported():
            dist.all_gather(result, values.contiguous(), group=self.group)
        return result


@dataclass(frozen=True, kw_only=True)
class Shards:
    """The sharded tensors of a run, of ``shapes`` as matrices.

    The ranks of ``group`` have each tensor once, and ``boxes`` has the part of each rank. ``data``
    is this rank's place among the ranks with other records, and their number. ``layout`` is the
    mesh and the placements of all tensors, if these are the same.
    """

    group: Any
    rank: int
    shapes: Mapping[str, tuple[int, int]]
    boxes: Sequence[Mapping[str, Box]]
    data: tuple[int, int]
    replica: int
    tensor_parallel: TensorParallel | None
    layout: tuple[Any, Any] | None

    @classmethod
    def of(
        cls, module: nn.Module, trained: Mapping[str, nn.Parameter], peers: Peers
    ) -> Shards | None:
        """Find the shards of ``trained``, or return None if each rank has the whole model.

        Raises ``UnsupportedModel`` for another kind of sharding.
        """
        parameters: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
        sharded = {name: item for name, item in parameters.items() if is_sharded(item)}
        if not sharded:
            return None
        mesh = max((item.device_mesh for item in sharded.values()), key=lambda of: of.ndim)
        fully = _require_supported(module, sharded, mesh, peers)
        if fully and (unsharded := [name for name in trained if name not in sharded]):
            raise UnsupportedModel(
                f"{', '.join(unsharded)}: trainable and not sharded, although others are. Call "
                "fully_shard on the whole model last, without ignored_params, or freeze the tensor."
            )
        rows_dim = int(fully and any(map(_has_replicas, sharded.values())))
        parallel = (
            None if rows_dim or (fully and mesh.ndim == 1) else _find_tensor_parallel(sharded, mesh)
        )
        both = parallel is not None and fully
        size = mesh.size() if both else mesh.size(rows_dim)
        place = [int(mesh.get_local_rank(dim)) for dim in range(mesh.ndim)]
        rank = place[0] * mesh.size(1) + place[1] if both else place[rows_dim]
        places = [
            divmod(of, mesh.size(1)) if both else (*place[:rows_dim], of) for of in range(size)
        ]
        data = (peers.rank, peers.size)
        if parallel is not None:
            data = (place[0], mesh.size(0)) if both else (0, 1)
        return cls(
            group=None if both else mesh.get_group(rows_dim),
            rank=rank,
            shapes={name: _matrix_shape(item.shape) for name, item in trained.items()},
            boxes=[{name: _find_box(item, of) for name, item in trained.items()} for of in places],
            data=data,
            replica=place[0] if rows_dim else 0,
            tensor_parallel=parallel,
            layout=(mesh, next(iter(sharded.values())).placements) if parallel is None else None,
        )

    @property
    def local_boxes(self) -> Mapping[str, Box]:
        """The local part of each tensor."""
        return self.boxes[self.rank]

    @property
    def compares_digest(self) -> bool:
        """Whether this rank compares its digest of the parameters with other ranks."""
        return self.data[0] == 0 if self.tensor_parallel is not None else self.rank == 0

    def complete_sums(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Complete ``sums`` after the last microbatch, in place, for tensors that are not cut.

        Each has its local shape.
        """
        if (of := self.tensor_parallel) is not None:
            all_reduce(
                {name: item for name, item in sums.items() if name not in of.cut_shapes}, of.group
            )
        return sums

    def map_full_matrices(
        self, parts: list[Tensor], names: Sequence[str], function: FullMatrixMap
    ) -> list[Tensor]:
        """Apply ``function`` to full matrices, each on one rank, and return the local parts.

        ``parts`` are the local parts of the tensors ``names``, (rows, columns) each. The
        function gets the matrices of this rank, (m, n) each, and their places among ``parts``.
        """
        if not parts:
            return []
        size = len(self.boxes)
        owners = _assign_owners([self.shapes[name] for name in names], size)
        owned = [place for place, rank in enumerate(owners) if rank == self.rank]
        sent = [[parts[p] for p, owner in enumerate(owners) if owner == to] for to in range(size)]
        boxes = [[of_rank[names[place]] for place in owned] for of_rank in self.boxes]
        shapes = [[(b - a, d - c) for (a, b), (c, d) in of_rank] for of_rank in boxes]
        received = self._exchange(sent, shapes, parts)
        matrices = [parts[place].new_empty(self.shapes[names[place]]) for place in owned]
        for rank_boxes, pieces in zip(boxes, received, strict=True):
            for matrix, box, piece in zip(matrices, rank_boxes, pieces, strict=True):
                _slice_box(matrix, box).copy_(piece)
        mapped = function(matrices, owned) if owned else []
        returned = self._exchange(
            [
                [_slice_box(*pair) for pair in zip(mapped, rank_boxes, strict=True)]
                for rank_boxes in boxes
            ],
            [[tuple(part.shape) for part in to_rank] for to_rank in sent],
            parts,
        )
        result = list(parts)
        for rank, pieces in enumerate(returned):
            places = [place for place, owner in enumerate(owners) if owner == rank]
            for place, piece in zip(places, pieces, strict=True):
                result[place] = piece
        return result

    def _exchange(
        self,
        sent: Sequence[Sequence[Tensor]],
        shapes: Sequence[Sequence[tuple[int, ...]]],
        like: Sequence[Tensor],
    ) -> list[list[Tensor]]:
        """Send tensors to each rank, and return the tensors of ``shapes`` from each rank."""
        flat = [part.reshape(-1) for of in sent for part in of]
        empty = like[0].new_empty(0)
        inputs = torch.cat(flat) if flat else empty
        sizes = [[math.prod(shape) for shape in of] for of in shapes]
        output = empty.new_empty(sum(map(sum, sizes)))
        with lost_ranks_reported():
            dist.all_to_all_single(
                output,
                inputs,
                [sum(of) for of in sizes],
                [sum(part.numel() for part in of) for of in sent],
                group=self.group,
            )
        pieces = iter(output.split([size for of in sizes for size in of]))
        return [[next(pieces).view(shape) for shape in of] for of in shapes]


def _assign_owners(shapes: Sequence[tuple[int, int]], size: int) -> list[int]:
    """Assign each matrix to a rank, the costliest first to the least loaded rank."""
    loads, result = [0] * size, [0] * len(shapes)
    work = [rows * columns * min(rows, columns) for rows, columns in shapes]
    for place in sorted(range(len(shapes)), key=lambda at: -work[at]):
        result[place] = loads.index(min(loads))
        loads[result[place]] += work[place]
    return result


def _slice_box(matrix: Tensor, box: Box) -> Tensor:
    rows, columns = box
    return matrix[slice(*rows), slice(*columns)]


def _matrix_shape(shape: torch.Size) -> tuple[int, int]:
    return int(shape[0]), math.prod(shape[1:])


def _find_box(tensor: Any, place: Sequence[int]) -> Box:
    """Return the part of ``tensor`` on the rank at ``place`` in the mesh."""
    result = [(0, size) for size in _matrix_shape(tensor.shape)]
    if is_sharded(tensor):
        mesh = tensor.device_mesh
        for dim in reversed(range(mesh.ndim)):  # parallelize_module cuts before fully_shard does
            along = getattr(tensor.placements[dim], "dim", None)
            if along is not None:
                first, last = result[along]
                of = row_range(last - first, place[dim], mesh.size(dim))
                result[along] = (first + of[0], first + of[1])
    return result[0], result[1]


def _sharded_dims(tensor: Any) -> list[int | None]:
    """Return the tensor dimension that each mesh dimension shards, or None."""
    return [getattr(kind, "dim", None) for kind in tensor.placements]


def _has_replicas(tensor: Any) -> bool:
    return tensor.device_mesh.ndim == 2 and _sharded_dims(tensor) == [None, 0]


def _require_supported(
    module: nn.Module, sharded: Mapping[str, Any], mesh: Any, peers: Peers
) -> bool:
    """Return whether fully_shard was used; raises ``UnsupportedModel`` for unknown layouts."""
    from torch.distributed.fsdp import FSDPModule

    wrapped = [path for path, of in module.named_modules() if isinstance(of, FSDPModule)]
    replicas = bool(wrapped) and all(map(_has_replicas, sharded.values()))
    ordered = mesh.mesh.flatten().tolist() == list(range(peers.size))
    for name, item in sharded.items():
        is_wrapped = any(not path or name.startswith(f"{path}.") for path in wrapped)
        linear = isinstance(module.get_submodule(name.rpartition(".")[0]), nn.Linear)
        item_mesh, dims = item.device_mesh, _sharded_dims(item)
        if not wrapped:
            known = mesh.ndim == 1 and linear
        elif item_mesh.ndim == mesh.ndim:
            known = replicas or (dims[0] == 0 and (mesh.ndim == 1 or (mesh.ndim == 2 and linear)))
        else:
            known = dims == [0] and item_mesh.size() == mesh.size(0)
        same = item_mesh == mesh or item_mesh.ndim < mesh.ndim
        partial = any(kind.is_partial() for kind in item.placements)
        if partial or not (known and same and ordered and is_wrapped == bool(wrapped)):
            raise UnsupportedModel(
                f"{name}: its placement is {tuple(item.placements)} on a mesh of shape "
                f"{tuple(item_mesh.shape)}. The trainer supports nn.Linear under ColwiseParallel "
                "and RowwiseParallel, rows sharded by fully_shard, with or without replicas, or "
                f"both without replicas, over one mesh of all {peers.size} ranks in their order. "
                "Remove other parallel styles and shard_placement_fn."
            )
    return bool(wrapped)


def _find_tensor_parallel(sharded: Mapping[str, Any], mesh: Any) -> TensorParallel:
    dim = mesh.ndim - 1
    rank, size = int(mesh.get_local_rank(dim)), int(mesh.size(dim))
    cut = {}
    for name, item in sharded.items():
        along = _sharded_dims(item)[dim] if item.device_mesh.ndim == mesh.ndim else None
        if along is not None:
            first, last = row_range(item.shape[along], rank, size)
            cut[name] = (*item.shape[:along], last - first, *item.shape[along + 1 :])
    return TensorParallel(
        group=mesh.get_group(dim),
        rank=rank,
        size=size,
        cut_shapes=cut,
        is_whole_mesh=mesh.ndim == 1,
    )


def _pad_rows(total: Tensor, size: int) -> Tensor:
    """Append rows of zeros, so that all ranks have the same number."""
    missing = -len(total) % size
    if not missing:
        return total.contiguous()
    return torch.cat([total, total.new_zeros(missing, *total.shape[1:])])
