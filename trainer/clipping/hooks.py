"""Gradient hooks: they receive the per-record gradients of one use of a tensor.

A layer with trained parameters runs through a function of
``affidavit.trainer.clipping.layers``. The backward pass of that function passes the gradient of the
inputs on *unclipped*, forms the factors of each parameter's per-record gradients, and hands them to
a hook. If the hook is the only one of its block in this pass, the clipped sum is formed at once. A
block of several tensors, or of a tensor that is used several times, stores its factors until the
backward pass ends, because its joint norm is known only then. Uses are counted in the forward pass.

Guarantees
    * The ``total`` of a tensor grows by Σ_i w_i G_i with ‖w_i G_i‖ ≤ clip_norm over the block's
      tensors together, for every record i, as computed, and by nothing else.
    * More gradients than counted uses are an error, never two clipped contributions.

A tensor that a model uses twice (a tied embedding and output head, a layer called twice)
has the gradient G_i + H_i, and ‖G_i + H_i‖² = ‖G_i‖² + ‖H_i‖² + 2⟨G_i, H_i⟩, unless each use has
its own clip norm (``BlockSpec.uses``). The inner product is computed from the factors too, as an
upper bound that includes its rounding error:

    linear, linear        Σ_{s,t} (A_i A'_iᵀ)_{st} (B_i B'_iᵀ)_{st}
    embedding, embedding  Σ_{s,t} [ids_s = ids'_t] ⟨b_s, b'_t⟩
    embedding, linear     Σ_{s,t} B_{t, ids_s} ⟨e_s, a_t⟩     (a table W of V × d, y = x Wᵀ)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor, nn

from affidavit.trainer.clipping.ghost_norm import (
    DenseFactors,
    EmbeddingFactors,
    Factors,
    LinearFactors,
    accumulation_type,
    constants,
    is_processor,
)
from affidavit.trainer.distributed.shards import Bucket
from affidavit.trainer.errors import MixedRecords, UnsupportedModel
from affidavit.trainer.norm_bounds import (
    clip_weights,
    joint_norm,
    norm_of_rows,
    rounding_bound,
    upcast,
)

MAX_HELD = 1 << 31
"""Bytes of factors that are held to be clipped together. A layer's are fewer than what autograd
frees meanwhile of what the forward pass stored for it."""

LOSS_TAKES_GRADIENT = (
    "the losses take a gradient themselves (torch.autograd.grad: a gradient penalty, forces, a "
    "Hessian), where per-record gradients are unknown. Remove that term."
)


@dataclass(eq=False, slots=True)
class Microbatch:
    """The current microbatch, and how the model is being run on it.

    ``in_vmap`` tells that a module runs under ``vmap``; ``anchor`` is then a tensor of one record.
    ``is_observing`` only notes the shapes of inputs. During a probe, ``probe_rows`` has a sum and
    the norm of each record's gradient for each use, (n, 2): of all records, or only of ``only``,
    whose loss alone is differentiated, so that the gradient of each other record must be zero,
    unless it ``is_together`` with those of the others.
    ``is_reprobe`` tells that it is a microbatch of the run, of which only that is checked.
    ``products`` are the tensors of matrix products under autocast, with its type. Autocast narrows
    one after the other; from the second microbatch on, all of them are narrowed at once, to
    ``narrow``, when the first is used. ``held`` has the blocks whose one use is complete and waits
    to be clipped with others, and ``held_bytes`` their size. ``last_input`` is the last input of a
    layer that was narrowed, with its version and its copy.
    """

    records: int = 0
    in_backward: bool = False
    is_half: bool = False
    in_vmap: bool = False
    anchor: Tensor | None = None
    is_observing: bool = False
    only: int | None = None
    probe_rows: list[tuple[GradientHook, Tensor]] | None = None
    is_reprobe: bool = False
    is_together: bool = False
    products: dict[TrainedTensor, torch.dtype] = field(default_factory=dict)
    narrow: dict[TrainedTensor, Tensor] = field(default_factory=dict)
    held: list[ClippingBlock] = field(default_factory=list)
    held_bytes: int = 0
    last_input: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    @property
    def is_probing(self) -> bool:
        """Whether the pass is a probe, before the run or in it."""
        return self.probe_rows is not None or self.is_reprobe

    def begin(self, records: int) -> None:
        """Start a pass over ``records`` records."""
        self.records, self.in_backward, self.is_half = records, False, False
        self.narrow.clear()

    def narrowed(self, target: TrainedTensor, dtype: torch.dtype) -> Tensor:
        """Return the parameter of ``target`` in ``dtype``, of the same shape."""
        if self.products.get(target) != dtype:
            self.products[target] = dtype
            self.narrow[target] = target.parameter.detach().to(dtype)
        if target not in self.narrow:
            wide = [of.parameter.detach() for of in self.products]
            of_types = zip(wide, self.products.values(), strict=True)
            narrow = [torch.empty_like(item, dtype=kind) for item, kind in of_types]
            torch._foreach_copy_(narrow, wide)
            self.narrow = dict(zip(self.products, narrow, strict=True))
        return self.narrow[target]

    def narrowed_input(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the input x of a layer in ``dtype``, of the same shape.

        Layers that get one tensor, like those of queries, keys and values, share its copy.
        """
        if self.last_input is not None:
            of, version, narrow = self.last_input
            if of() is x and version == x._version and narrow.dtype == dtype:
                return narrow
        narrow = x.to(dtype)
        self.last_input = weakref.ref(x), x._version, narrow
        return narrow

    def end(self) -> None:
        """End the pass."""
        self.records, self.only, self.probe_rows, self.last_input = 0, None, None, None
        self.is_reprobe = self.is_together = False
        self.narrow.clear()
        self.release()

    def hold(self, block: ClippingBlock) -> None:
        """Hold the one use of ``block``; clip all that are held if they take much memory."""
        self.held.append(block)
        self.held_bytes += sum(factors.bytes for _, factors in block.pending)
        if self.held_bytes <= MAX_HELD:
            return
        uses = PendingUses(self.held)
        self.release()
        if self.is_reprobe and self.only is not None:
            uses.require_own_rows(self.only)
        uses.clip()

    def release(self) -> None:
        """Hold no use any longer."""
        self.held, self.held_bytes = [], 0

    @contextmanager
    def outside_vmap(self) -> Iterator[None]:
        """Mark the block as running for all records at once, outside the ``vmap``."""
        in_vmap, self.in_vmap = self.in_vmap, False
        try:
            yield
        finally:
            self.in_vmap = in_vmap


@dataclass(eq=False, slots=True)
class TrainedTensor:
    """A trained tensor and the clipped sum of the microbatch; ``received`` counts its gradients.

    Sums of a tensor with sharded rows go through ``bucket``, and ``total`` has the local rows.
    ``shape`` is the shape that the layer uses. An ``idle`` rank, which runs layers only because the
    other ranks need it to, adds zeros. So does a rank that does not ``contribute``, because another
    rank has the same gradient.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...] = ()
    bucket: Bucket | None = None
    contributes: bool = True
    received: int = 0
    total: Tensor | None = None
    idle: bool = False

    def add(self, total: Tensor) -> None:
        """Add a clipped sum of the tensor's shape, up to a view."""
        total = total.reshape(self.shape or self.parameter.shape)
        total = total.to(accumulation_type(self.parameter))
        if self.idle or not self.contributes:
            total = torch.zeros_like(total)
        if self.bucket is not None:
            self.bucket.put(total, self.parameter, self._take)
        else:
            self._take(total)

    def _take(self, total: Tensor) -> None:
        self.total = total if self.total is None else self.total.add_(total)


@dataclass(eq=False, slots=True)
class ClippingBlock:
    """The uses of tensors that are clipped together to ``clip_norm``.

    If ``counts_unclipped``, ``unclipped`` counts the records whose norm is at most ``clip_norm``.
    Factors of a ``counts_unclipped`` block are stored until the backward pass ends, like those of
    several uses. So are the factors of a ``is_shared`` block, because other ranks know a part of
    its norms, and small factors, because many of them are clipped in the time of one.
    """

    name: str
    clip_norm: float
    counts_unclipped: bool = False
    is_shared: bool = False
    unclipped: int = 0
    uses: int = 0
    received: int = 0
    pending: list[tuple[TrainedTensor, Factors]] = field(default_factory=list)

    def receive(
        self, target: TrainedTensor, factors: Factors, records: int, only: int | None = None
    ) -> None:
        """Clip and add the factors at once, or store them if other uses follow.

        Raises ``MixedRecords`` for more gradients than uses, and for a gradient of other records
        than ``only``.
        """
        self.received += 1
        if self.received > self.uses:
            raise MixedRecords(
                f"block {self.name}: {self.received} gradients for {self.uses} uses in the forward "
                "pass; a layer ran where its use was not counted."
            )
        if not self.is_joint and not is_processor(factors.device):
            factors = factors.formed()
        if self.is_joint or factors.waits:
            self.pending.append((target, factors))
        else:
            if only is not None:
                require_own_row([target], factors, records, only)
            target.add(factors.clipped_sum(self.clip_norm))

    @property
    def is_joint(self) -> bool:
        """Whether the norm is known only when the backward pass ends."""
        return self.uses > 1 or self.counts_unclipped or self.is_shared

    def clear(self) -> None:
        """Discard the microbatch."""
        self.uses = self.received = 0
        self.pending.clear()


MAX_GROUP, MAX_GROUP_CPU = 1 << 27, 1 << 20
"""Entries of factors that are stacked at once, on a device and on the processor."""


@dataclass(eq=False, slots=True)
class UseGroup:
    """The one use of each of ``targets``, stacked in one ``uses``, or the ``uses`` of one target.

    ``blocks`` has the block of each target. ``norms`` are upper bounds on the norms, (k, n).
    """

    blocks: list[ClippingBlock]
    targets: list[TrainedTensor]
    uses: list[Factors]
    norms: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.norms = norm_of_uses(self.uses).view(len(self.targets), -1)

    def add(self, weights: Tensor) -> None:
        """Add the sums over records by ``weights`` (k, n)."""
        while self.uses:
            totals = self.uses.pop().weighted_sums(weights)
            for target, total in zip(self.targets, totals, strict=True):
                target.add(total)


class PendingUses:
    """The stored uses of ``blocks``; those of one kind and shape are clipped together.

    Most tensors of a model have the shape of others, and each use takes several small operations.
    """

    def __init__(self, blocks: Iterable[ClippingBlock]) -> None:
        self._blocks = [block for block in blocks if block.pending]
        self._is_idle = any(target.idle for block in self._blocks for target, _ in block.pending)
        self._groups: list[UseGroup] = []
        self._norms: dict[ClippingBlock, list[Tensor]] = {}
        for group in self._group():
            self._groups.append(group)
            for block, target, norms in zip(
                group.blocks, group.targets, group.norms.unbind(), strict=True
            ):
                rows = self._norms.setdefault(block, [])
                rows.append(norms if target.contributes else torch.zeros_like(norms))

    def _group(self) -> Iterator[UseGroup]:
        uses: dict[tuple[ClippingBlock, TrainedTensor], list[Factors]] = {}
        for block in self._blocks:
            for target, factors in block.pending:
                uses.setdefault((block, target), []).append(factors)
            block.pending = []
        same: dict[object, list[tuple[ClippingBlock, TrainedTensor, Factors]]] = {}
        for (block, target), of in uses.items():
            if len(of) > 1:
                yield UseGroup([block], [target], of)
                continue
            factors = of[0].formed() if is_processor(of[0].device) else of[0]
            if (key := factors.stack_key) is None:
                yield UseGroup([block], [target], [factors])
            else:
                same.setdefault((type(factors), *key), []).append((block, target, factors))
        for items in same.values():
            most = MAX_GROUP_CPU if is_processor(items[0][2].device) else MAX_GROUP
            size = max(1, most // items[0][2].entries)
            for first in range(0, len(items), size):
                blocks, targets, uses_of = zip(*items[first : first + size], strict=True)
                stacked = uses_of[0].stacked(uses_of[1:]) if len(uses_of) > 1 else uses_of[0]
                yield UseGroup(list(blocks), list(targets), [stacked])

    def norms(self) -> dict[ClippingBlock, Tensor]:
        """Return upper bounds on the norms of each block's uses on this rank, (n,)."""
        return {block: joint_norm(self._norms[block]) for block in self._blocks}

    def require_own_rows(self, only: int) -> None:
        """Raise ``MixedRecords`` unless each record but ``only`` has a gradient of zero."""
        for group in self._groups:
            for factors in group.uses:
                require_own_row(group.targets, factors, group.norms.shape[1], only)

    def clip(self, norms: Mapping[ClippingBlock, Tensor] | None = None) -> None:
        """Clip the uses by the joint ``norms`` of each block, (n,), and add them to the sums."""
        weights: dict[ClippingBlock, Tensor] = {}
        while self._groups:
            group = self._groups.pop(0)
            if norms is None and all(len(self._norms[block]) == 1 for block in group.blocks):
                clip_norms = tuple(block.clip_norm for block in group.blocks)
                most = constants(clip_norms, group.norms.dtype, group.norms.device)
                of_uses = clip_weights(group.norms, most[:, None])
                weights.update(zip(group.blocks, of_uses.unbind(), strict=True))
            else:
                for block in group.blocks:
                    if block not in weights:
                        joint = joint_norm(self._norms[block]) if norms is None else norms[block]
                        weights[block] = clip_weights(joint, block.clip_norm)
                of_uses = torch.stack([weights[block] for block in group.blocks])
            group.add(of_uses)
        for block, of_block in weights.items():
            if block.counts_unclipped and not self._is_idle:
                block.unclipped += int((of_block == 1).sum())


@dataclass(frozen=True, eq=False, slots=True)
class GradientHook:
    """The use of one parameter by one layer, and the block that clips it."""

    target: TrainedTensor
    block: ClippingBlock
    microbatch: Microbatch
    path: str = ""

    def count(self) -> None:
        """Count one more use, except while activations are recomputed."""
        if not self.microbatch.in_backward:
            self.block.uses += 1

    def receive(self, factors: Factors, records: int) -> None:
        """Receive the factors of one use, which must have a row for each record.

        Raises ``MixedRecords`` for another number of rows, and ``UnsupportedModel`` if the losses
        take the gradient themselves.
        """
        if not self.microbatch.in_backward:
            raise UnsupportedModel(LOSS_TAKES_GRADIENT)
        if records != self.microbatch.records:
            raise MixedRecords(
                f"{self.target.name}: the layer sees {records} rows for {self.microbatch.records} "
                "records. Keep the records in the first dimension throughout (reshape time into "
                "channels, never into the batch; transpose a layer's output where a loss has time "
                "first, like ctc_loss; pad records instead of packing several into a row), or "
                "freeze the layer.",
                path=self.path,
            )
        if self.microbatch.probe_rows is not None:
            self.microbatch.probe_rows.append((self, self._rows(factors)))
        self.target.received += 1
        only = self.microbatch.only if self.microbatch.is_reprobe else None
        self.block.receive(self.target, factors, records, only)
        if self.block.pending and not self.block.is_joint:
            self.microbatch.hold(self.block)

    def _rows(self, factors: Factors) -> Tensor:
        one, only = (
            torch.eye(self.microbatch.records, device=self.target.parameter.device),
            self.microbatch.only,
        )
        if only is not None and not self.microbatch.is_together:
            require_own_row([self.target], factors, len(one), only, self.path)
        sums = [factors.weighted_sum(weights) for weights in (one if only is None else one[[only]])]
        return torch.stack(
            [torch.stack([position_weighted_sum(item), item.norm()]) for item in sums]
        )


def require_own_row(
    targets: Sequence[TrainedTensor],
    factors: Factors,
    records: int,
    only: int,
    path: str | None = None,
) -> None:
    """Raise ``MixedRecords`` unless each record but ``only`` has a gradient of zero in ``targets``.

    Their factors, each of ``records`` records, follow each other in ``factors``.
    """
    others = torch.ones(len(targets), records, device=targets[0].parameter.device)
    others[:, only] = 0
    for target, total in zip(targets, factors.weighted_sums(others), strict=True):
        if bool(total.any()):
            raise MixedRecords(
                f"{target.name}: the loss of one record alone has a gradient in another's row. "
                "Keep the records in the first dimension throughout, and compute each loss from "
                "its record alone. Rows of one record follow each other: for pairs, give the model "
                "torch.stack([a, b], 1).flatten(0, 1) instead of torch.cat([a, b]).",
                path=path,
            )


def position_weighted_sum(gradient: Tensor) -> Tensor:
    """Return a weighted sum of the entries, which changes if entries are permuted; shape ()."""
    entries = gradient.flatten()
    weights = torch.arange(len(entries), dtype=torch.float32, device=gradient.device).cos_()
    return entries @ weights.to(gradient.dtype)


def norm_of_uses(uses: list[Factors]) -> Tensor:
    """Return an upper bound on the norm of the sum of several uses of a tensor, per record.

    The rounding errors of each use, and of adding the uses, are added to the norm of the exact sum:
    they do not cancel. Shape (n,).
    """
    if len(uses) == 1:
        return uses[0].norms() + uses[0].slack()
    stacked = torch.stack([use.norms() for use in uses])
    slack = torch.stack([use.slack() for use in uses]).sum(0)
    inner = torch.stack([inner_product_bound(*pair) for pair in combinations(uses, 2)])
    loss = 4 * (len(uses) ** 2 + 4) * torch.finfo(stacked.dtype).eps
    squares = stacked.square().sum(0) + 2 * inner.sum(0)
    squares = squares + loss * stacked.sum(0).square()
    joint = torch.sqrt(squares.clamp(min=0)) * (1 + loss)
    return torch.minimum(joint, stacked.sum(0) * (1 + loss)) + slack + loss * stacked.sum(0)


def inner_product_bound(first: Factors, second: Factors) -> Tensor:
    """Return an upper bound on ⟨G_i, H_i⟩ for each record, shape (n,).

    For a dense and another kind of factors, the gradients of the other kind are formed.
    """
    match first, second:
        case LinearFactors(), LinearFactors():
            return _linear_inner(first, second)
        case EmbeddingFactors(), EmbeddingFactors():
            return _embedding_inner(first, second)
        case EmbeddingFactors(), LinearFactors():
            return _mixed_inner(first, second)
        case LinearFactors(), EmbeddingFactors():
            return _mixed_inner(second, first)
        case DenseFactors(), DenseFactors():
            return _dense_inner(first, second)
        case _:
            return _formed_inner(first, second)


def _linear_inner(first: LinearFactors, second: LinearFactors) -> Tensor:
    a, b = upcast(first.inputs), upcast(first.outputs)
    c, d = upcast(second.inputs), upcast(second.outputs)
    inner = (torch.bmm(a, c.mT) * torch.bmm(b, d.mT)).sum(-1).sum(-1)
    terms = a.shape[2] + b.shape[2] + a.shape[1] + c.shape[1] + 8
    return inner + rounding_bound(terms, a.dtype) * first.max_norm * second.max_norm


def _embedding_inner(first: EmbeddingFactors, second: EmbeddingFactors) -> Tensor:
    b, d = upcast(first.outputs), upcast(second.outputs)
    same = first.ids.unsqueeze(2) == second.ids.unsqueeze(1)
    inner = (torch.bmm(b, d.mT) * same).sum(-1).sum(-1)
    terms = b.shape[2] + b.shape[1] + d.shape[1] + 8
    return inner + rounding_bound(terms, b.dtype) * first.max_norm * second.max_norm


def _mixed_inner(table: EmbeddingFactors, head: LinearFactors) -> Tensor:
    e, a = upcast(table.outputs), upcast(head.inputs)
    steps = head.outputs.shape[1]
    ids = table.ids.unsqueeze(1).expand(-1, steps, -1)
    picked = upcast(torch.gather(head.outputs, 2, ids))
    inner = (torch.bmm(a, e.mT) * picked).sum(-1).sum(-1)
    terms = e.shape[2] + e.shape[1] + steps + 8
    return inner + rounding_bound(terms, e.dtype) * table.max_norm * head.max_norm


def _dense_inner(first: DenseFactors, second: DenseFactors) -> Tensor:
    b, d = first.gradients.flatten(1), second.gradients.flatten(1)
    sizes = norm_of_rows(b) * norm_of_rows(d)
    return (b * d).sum(1) + rounding_bound(b.shape[1] + 8, b.dtype) * sizes


def _formed_inner(first: Factors, second: Factors) -> Tensor:
    b, d = form_gradients(first).flatten(1), form_gradients(second).flatten(1)
    norm, other_norm = first.norms(), second.norms()
    error = first.slack() * other_norm + second.slack() * (norm + second.slack())
    return (b * d).sum(1) + rounding_bound(b.shape[1] + 8, b.dtype) * norm * other_norm + error


def form_gradients(factors: Factors) -> Tensor:
    """Form the per-record gradients (n, *shape). Raises ``TypeError`` for other factors."""
    match factors:
        case LinearFactors():
            return torch.bmm(upcast(factors.outputs).mT, upcast(factors.inputs))
        case EmbeddingFactors():
            b = upcast(factors.outputs)
            table = b.new_zeros(len(b), factors.rows, b.shape[2])
            return table.scatter_add_(1, factors.ids.unsqueeze(2).expand_as(b), b)
        case DenseFactors():
            return factors.gradients
    raise TypeError(f"{type(factors).__name__} has no dense form")
