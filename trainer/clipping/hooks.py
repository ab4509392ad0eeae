"""Taps: where the per-record gradients of one use of a tensor are caught.

A layer whose parameters are trained runs through one of the functions of
``affidavit.trainer.clipping.layers``. Its backward pass lets the gradient of its inputs
go on *unclipped*, forms the factors of each parameter's per-record gradients, and hands
them to a tap. Where the tap is the only one of its block in this pass, the clipped sum is
formed at once; a block of several tensors, or of a tensor that is used several times,
keeps its factors until the backward pass is over, because only then is its joint norm
known. How often a tensor is used is counted in the forward pass, so nobody declares it.

Guarantees
    * A target's ``total`` grows by Σ_i w_i G_i with ‖w_i G_i‖ ≤ clip_norm over the block's
      tensors together, for every record i, as computed, and by nothing else.
    * More gradients than uses counted is an error, never two clipped contributions.

A tensor that a model uses twice (a tied embedding and output head, a layer called twice)
has the gradient G_i + H_i, and ‖G_i + H_i‖² = ‖G_i‖² + ‖H_i‖² + 2⟨G_i, H_i⟩, unless each use has
a clip norm of its own (``BlockSpec.uses``). The last term comes from the factors as well, as an
upper bound, the error of its rounding added:

    linear, linear        Σ_{s,t} (A_i A'_iᵀ)_{st} (B_i B'_iᵀ)_{st}
    embedding, embedding  Σ_{s,t} [ids_s = ids'_t] ⟨b_s, b'_t⟩
    embedding, linear     Σ_{s,t} B_{t, ids_s} ⟨e_s, a_t⟩     (a table W of V × d, y = x Wᵀ)
"""

from __future__ import annotations

from collections.abc import Iterator
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
    accumulated_in,
)
from affidavit.trainer.clipping.requirements import UnsupportedModel
from affidavit.trainer.distributed.shards import Bucket
from affidavit.trainer.numerics import clip_weights, joint_norm, norm_of_rows, rounding, widened

TAKES_GRADIENTS = (
    "the losses take a gradient themselves (torch.autograd.grad: a gradient penalty, forces, a "
    "Hessian), where per-record gradients are unknown. Remove that term."
)


class MixedRecords(RuntimeError):
    """A layer does not keep one row per record, so per-record gradients are unknown.

    ``path`` is the layer's, where one is to blame. ``whole`` says that a module could not be run
    one record at a time because kernels inside it see all records at once.
    """

    def __init__(self, message: str, *, path: str | None = None, whole: bool = False) -> None:
        super().__init__(message)
        self.path, self.whole = path, whole


@dataclass(eq=False, slots=True)
class Lot:
    """The current microbatch: its records, types, and whether its backward pass has begun.

    ``inside`` says that a module is being run one record at a time, ``anchor`` is a tensor of that
    record. ``observing`` only notes the shapes of inputs. While the model is probed ``rows`` has,
    for every use, a sum and the norm of each record's gradient, (n, 2): of all records, or of
    ``only``, the one record whose loss is taken, where every other's gradient must be zero.
    """

    records: int = 0
    backward: bool = False
    narrow: bool = False
    inside: bool = False
    anchor: Tensor | None = None
    observing: bool = False
    only: int | None = None
    rows: list[tuple[GradientHook, Tensor]] | None = None

    @contextmanager
    def left(self) -> Iterator[None]:
        """While every record is seen at once, in the middle of a module that is run by records."""
        inside, self.inside = self.inside, False
        try:
            yield
        finally:
            self.inside = inside


@dataclass(eq=False, slots=True)
class Target:
    """One trainable tensor and the clipped sum of the microbatch; ``caught`` counts uses.

    Where its rows are sharded sums go through ``bucket``, and ``total`` has those that are here.
    ``shape`` is the tensor's as its layer uses it. An ``idle`` rank adds zeros: it runs layers only
    because the others need it to. So does one that does not ``add``: another has the same gradient.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...] = ()
    bucket: Bucket | None = None
    adds: bool = True
    caught: int = 0
    total: Tensor | None = None
    idle: bool = False

    def add(self, total: Tensor) -> None:
        """Add a clipped sum, of the tensor's shape up to a view."""
        total = total.reshape(self.shape or self.parameter.shape)
        total = total.to(accumulated_in(self.parameter))
        if self.idle or not self.adds:
            total = torch.zeros_like(total)
        if self.bucket is not None:
            self.bucket.put(total, self.parameter, self._take)
        else:
            self._take(total)

    def _take(self, total: Tensor) -> None:
        self.total = total if self.total is None else self.total.add_(total)


Uses = list[tuple[list[Target], list[Factors]]]
"""Targets, and the uses of each or one use of all of them."""


@dataclass(eq=False, slots=True)
class Block:
    """What is clipped together to ``clip_norm``: all uses that its taps catch.

    Where ``counted``, ``within`` grows by the records of a norm of at most ``clip_norm``; their
    gradients are then kept until the backward pass is over, as those of several uses are. So are
    those that are ``shared``, because other ranks know a part of their norms.
    """

    name: str
    clip_norm: float
    counted: bool = False
    shared: bool = False
    within: int = 0
    uses: int = 0
    caught: int = 0
    pending: list[tuple[Target, Factors]] = field(default_factory=list)

    def receive(self, target: Target, factors: Factors) -> None:
        """Clip and add at once if no other use follows; otherwise store the factors.

        Raises ``MixedRecords`` for more gradients than uses.
        """
        self.caught += 1
        if self.caught > self.uses:
            raise MixedRecords(
                f"block {self.name}: {self.caught} gradients for {self.uses} uses in the forward "
                "pass; a layer ran where its use was not counted."
            )
        if self.uses > 1 or self.counted or self.shared:
            self.pending.append((target, factors))
        else:
            target.add(factors.clipped_sum(self.clip_norm))

    def norms(self) -> Tensor:
        """Upper bounds on the norms of the stored factors that this rank adds, (n,)."""
        return self._norms_of(self._uses())

    def _norms_of(self, uses: Uses) -> Tensor:
        norms = [norm_of_uses(of) for targets, of in uses if targets[0].adds]
        return joint_norm(norms) if norms else torch.zeros_like(self.pending[0][1].norms())

    def _uses(self) -> Uses:
        """The uses of every target; targets that are vectors of one shape have one between them.

        Most tensors of a model are such, and small: each by itself would launch as many kernels.
        """
        uses: dict[Target, list[Factors]] = {}
        for target, factors in self.pending:
            uses.setdefault(target, []).append(factors)
        result: Uses = []
        vectors: dict[object, list[tuple[Target, Tensor]]] = {}
        for target, of in uses.items():
            match of:
                case [DenseFactors(raw)] if raw.ndim == 2:
                    key = raw.shape, raw.dtype, target.adds
                    vectors.setdefault(key, []).append((target, raw))
                case _:
                    result.append(([target], of))
        for alike in vectors.values():
            stacked = torch.stack([raw for _, raw in alike], 1)
            result.append(([target for target, _ in alike], [DenseFactors.of(stacked)]))
        return result

    def finish(self, norms: Tensor | None = None) -> None:
        """Clip the stored factors by their joint norm, (n,), and add them to the tensors' sums."""
        if not self.pending:
            return
        uses = self._uses()
        weights = clip_weights(self._norms_of(uses) if norms is None else norms, self.clip_norm)
        self.pending = []
        if self.counted and not uses[0][0][0].idle:
            self.within += int((weights == 1).sum())
        for targets, of in uses:
            while of:
                total = of.pop().weighted_sum(weights)
                for target, part in zip(targets, total.chunk(len(targets)), strict=True):
                    target.add(part)

    def clear(self) -> None:
        """Forget the microbatch."""
        self.uses = self.caught = 0
        self.pending.clear()


@dataclass(frozen=True, eq=False, slots=True)
class GradientHook:
    """One parameter of one layer, and the block that clips this use of it."""

    target: Target
    block: Block
    lot: Lot
    path: str = ""

    def count(self) -> None:
        """Count one more use, unless activations are being recomputed."""
        if not self.lot.backward:
            self.block.uses += 1

    def receive(self, factors: Factors, records: int) -> None:
        """Take the factors of one use, which must have a row for every record.

        Raises ``MixedRecords`` where they have not, and ``UnsupportedModel`` where the losses
        themselves take the gradient.
        """
        if not self.lot.backward:
            raise UnsupportedModel(TAKES_GRADIENTS)
        if records != self.lot.records:
            raise MixedRecords(
                f"{self.target.name}: the layer sees {records} rows for {self.lot.records} "
                "records. Keep the records in the first dimension throughout (reshape time into "
                "channels, never into the batch; pad records instead of packing several into a "
                "row), or freeze the layer.",
                path=self.path,
            )
        if self.lot.rows is not None:
            self.lot.rows.append((self, self._rows(factors)))
        self.target.caught += 1
        self.block.receive(self.target, factors)

    def _rows(self, factors: Factors) -> Tensor:
        one, only = torch.eye(self.lot.records, device=self.target.parameter.device), self.lot.only
        if only is not None and bool(factors.weighted_sum(1 - one[only]).any()):
            raise MixedRecords(
                f"{self.target.name}: the loss of one record alone has a gradient in another's "
                "row. Keep the records in the first dimension throughout, and compute each loss "
                "from its record alone.",
                path=self.path,
            )
        sums = [factors.weighted_sum(weights) for weights in (one if only is None else one[[only]])]
        return torch.stack([torch.stack([told_apart(item), item.norm()]) for item in sums])


def told_apart(gradient: Tensor) -> Tensor:
    """A sum of the entries that differs where they change places, shape ()."""
    entries = gradient.flatten()
    weights = torch.arange(len(entries), dtype=torch.float32, device=gradient.device).cos_()
    return entries @ weights.to(gradient.dtype)


def norm_of_uses(uses: list[Factors]) -> Tensor:
    """Upper bound on the norm of what several uses of one tensor add together, per record.

    The roundings of each use, and of adding them, come on top of the norm of the exact sum:
    where uses cancel they do not.

    Shape (n,).
    """
    if len(uses) == 1:
        return uses[0].norms() + uses[0].slack()
    stacked = torch.stack([use.norms() for use in uses])
    slack = torch.stack([use.slack() for use in uses]).sum(0)
    inner = torch.stack([upper_inner(*pair) for pair in combinations(uses, 2)])
    loss = 4 * (len(uses) ** 2 + 4) * torch.finfo(stacked.dtype).eps
    squares = stacked.square().sum(0) + 2 * inner.sum(0)
    squares = squares + loss * stacked.sum(0).square()
    joint = torch.sqrt(squares.clamp(min=0)) * (1 + loss)
    return torch.minimum(joint, stacked.sum(0) * (1 + loss)) + slack + loss * stacked.sum(0)


def upper_inner(first: Factors, second: Factors) -> Tensor:
    """Upper bound on ⟨G_i, H_i⟩ for every record, shape (n,).

    Of a dense and another kind the other's gradients are formed in full.
    """
    match first, second:
        case LinearFactors(), LinearFactors():
            return _linear(first, second)
        case EmbeddingFactors(), EmbeddingFactors():
            return _embeddings(first, second)
        case EmbeddingFactors(), LinearFactors():
            return _mixed(first, second)
        case LinearFactors(), EmbeddingFactors():
            return _mixed(second, first)
        case DenseFactors(), DenseFactors():
            return _dense(first, second)
        case _:
            return _formed(first, second)


def _linear(first: LinearFactors, second: LinearFactors) -> Tensor:
    a, b = widened(first.inputs), widened(first.outputs)
    c, d = widened(second.inputs), widened(second.outputs)
    inner = (torch.bmm(a, c.mT) * torch.bmm(b, d.mT)).sum(-1).sum(-1)
    terms = a.shape[2] + b.shape[2] + a.shape[1] + c.shape[1] + 8
    return inner + rounding(terms, a.dtype) * first.reach * second.reach


def _embeddings(first: EmbeddingFactors, second: EmbeddingFactors) -> Tensor:
    b, d = widened(first.outputs), widened(second.outputs)
    same = first.ids.unsqueeze(2) == second.ids.unsqueeze(1)
    inner = (torch.bmm(b, d.mT) * same).sum(-1).sum(-1)
    terms = b.shape[2] + b.shape[1] + d.shape[1] + 8
    return inner + rounding(terms, b.dtype) * first.reach * second.reach


def _mixed(table: EmbeddingFactors, head: LinearFactors) -> Tensor:
    e, a = widened(table.outputs), widened(head.inputs)
    steps = head.outputs.shape[1]
    ids = table.ids.unsqueeze(1).expand(-1, steps, -1)
    picked = widened(torch.gather(head.outputs, 2, ids))
    inner = (torch.bmm(a, e.mT) * picked).sum(-1).sum(-1)
    terms = e.shape[2] + e.shape[1] + steps + 8
    return inner + rounding(terms, e.dtype) * table.reach * head.reach


def _dense(first: DenseFactors, second: DenseFactors) -> Tensor:
    b, d = first.gradients.flatten(1), second.gradients.flatten(1)
    sizes = norm_of_rows(b) * norm_of_rows(d)
    return (b * d).sum(1) + rounding(b.shape[1] + 8, b.dtype) * sizes


def _formed(first: Factors, second: Factors) -> Tensor:
    b, d = full(first).flatten(1), full(second).flatten(1)
    ours, theirs = first.norms(), second.norms()
    lost = first.slack() * theirs + second.slack() * (ours + second.slack())
    return (b * d).sum(1) + rounding(b.shape[1] + 8, b.dtype) * ours * theirs + lost


def full(factors: Factors) -> Tensor:
    """The per-record gradients themselves, (n, *shape). Raises ``TypeError`` for other factors."""
    match factors:
        case LinearFactors():
            return torch.bmm(widened(factors.outputs).mT, widened(factors.inputs))
        case EmbeddingFactors():
            b = widened(factors.outputs)
            table = b.new_zeros(len(b), factors.rows, b.shape[2])
            return table.scatter_add_(1, factors.ids.unsqueeze(2).expand_as(b), b)
        case DenseFactors():
            return factors.gradients
    raise TypeError(f"{type(factors).__name__} has no dense form")
