"""Per-record gradients as factors: their norms, inner products and weighted sums.

A layer seldom needs its n per-record gradients in full. For y = x Wᵀ the gradient of
record i is G_i = B_iᵀ A_i with A_i its inputs (T × in) and B_i = ∂ℓ_i/∂y (T × out), so
that

    ‖G_i‖² = Σ_{s,t} (A_i A_iᵀ)_{st} (B_i B_iᵀ)_{st},     Σ_i w_i G_i = (w B)ᵀ A.

Three ways to the norm, chosen by size: ``gram`` forms the two T × T matrices; ``direct``
forms G_i in chunks; and where a tensor is clipped by itself, ``reuse`` forms G_i once
and takes both the norm and the weighted sum from it, in place of the product that a plain
backward pass does.

Guarantees
    * ``norms`` is an upper bound on ‖G_i‖, and ``slack`` on how far the rounding of
      ``weighted_sum`` moves what it adds for a record of weight 1 away from G_i.
    * A record whose factors are not finite, or too long, has an infinite norm, and its
      factors are zero, so that with the weight 0 that it gets it adds exactly nothing.

References: arXiv:2210.00038 (book-keeping), arXiv:2009.03106 and arXiv:1510.01799 (norms
without gradients), arXiv:2205.10683 (choosing by size).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from affidavit.trainer.numerics import (
    HALF_ULP,
    LARGEST,
    LOST,
    MATRIX_UNIT,
    clip_weights,
    constant,
    norm_of_rows,
    rounding,
    widened,
)

CHUNK_ENTRIES = {"cpu": 1 << 18}
"""Entries of per-record gradients held at once: 1 MiB, what the cache of one core holds, so that
they are still there when their norm is taken and when they are added."""

MAX_ENTRIES = 1 << 24
"""The same where there is no entry for the device (64 MiB in float32)."""

MOVING = {"cpu": 12}
"""Multiplications for which a processor could move one entry through its cache, measured."""

MOVING_ELSEWHERE = 1000
"""The same for an accelerator, from its data sheet (H200: 4e14 bfloat16 multiplications and
4.8e12 bytes a second, an entry written once and read twice); not measured."""

NARROW = frozenset({"cuda"})
"""Devices on which bfloat16 operands are multiplied as they are, into float32."""

UNSEEN = 2.0**-51
"""√(2⁻¹²⁶ / γ) for the least γ of a product here, 8 u = 2⁻²¹, rounded up."""


class Factors(ABC):
    """The per-record gradients of one use of one tensor."""

    @abstractmethod
    def norms(self) -> Tensor:
        """Upper bound on ‖G_i‖, shape (n,); infinite for a record that is lost."""

    @abstractmethod
    def slack(self) -> Tensor:
        """Upper bound on ‖what ``weighted_sum`` adds at weight 1 - G_i‖, shape (n,)."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ_i w_i G_i, in the tensor's shape up to a view."""

    def clipped_sum(self, clip_norm: float) -> Tensor:
        """Σ_i of G_i clipped to ``clip_norm``, where this use is clipped by itself.

        The weights are those of the norms of what is added. It has the shape of the tensor.
        """
        return self.weighted_sum(clip_weights(self.norms() + self.slack(), clip_norm))


def per_record(weights: Tensor, values: Tensor) -> Tensor:
    """w_i times record i of ``values`` (n, ...)."""
    return values * weights.view(-1, *([1] * (values.ndim - 1))).to(values.dtype)


def lost_unless(valid: Tensor, reach: Tensor) -> Tensor:
    """``reach``, infinite for every record that is not ``valid``. Both have shape (n,)."""
    return torch.where(valid, reach, constant(torch.inf, reach.dtype, reach.device))


def zeroed_unless(valid: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """``values`` with zeros for every record that is not ``valid``.

    Zeros, not a weight of zero: 0 · nan is nan. A processor can look first, and seldom copies;
    another device would have to be waited for.

    ``valid`` has shape (n,), and each of ``values`` a row for each of the n records.
    """
    if valid.device.type == "cpu" and bool(valid.all()):
        return values
    return tuple(
        torch.where(
            valid.view(-1, *([1] * (value.ndim - 1))),
            value,
            constant(0.0, value.dtype, value.device),
        )
        for value in values
    )


def accumulated_in(values: Tensor) -> torch.dtype:
    """The type in which sums over ``values`` are taken. They may have any shape."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def are_narrow(*values: Tensor) -> bool:
    """Whether ``values`` are multiplied in bfloat16."""
    return all(value.dtype == torch.bfloat16 and value.device.type in NARROW for value in values)


def batched(a: Tensor, b: Tensor) -> Tensor:
    """a_i b_i for every record, in float32 or float64; narrow operands are not copied.

    Shapes (n, i, j) and (n, j, k) give (n, i, k).
    """
    if a.is_cuda and are_narrow(a, b):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(widened(a), widened(b))


def multiplied(a: Tensor, b: Tensor) -> Tensor:
    """a b as ``batched``, for one pair. Shapes (i, j) and (j, k) give (i, k)."""
    if a.is_cuda and are_narrow(a, b):
        return torch.mm(a, b, out_dtype=torch.float32)
    return widened(a) @ widened(b)


def lengths_of(values: Tensor) -> Tensor:
    """l2 norm of each row of the last dimension, up to rounding, in float32 or float64.

    ``UNSEEN`` an entry is added, which bounds what underflows in products of these rows by
    the same γ times the lengths as what is rounded.

    Shape (..., m) gives (...,).
    """
    result = torch.linalg.vector_norm(values, dim=-1, dtype=accumulated_in(values))
    return result + UNSEEN * values.shape[-1] ** 0.5


def lengths_in(grams: Tensor, entries: int) -> Tensor:
    """The same from the Gram matrices of rows of ``entries``; one that overflowed is infinite.

    Shape (..., m, m) gives (..., m).
    """
    return torch.sqrt(grams.diagonal(dim1=-2, dim2=-1)) + UNSEEN * entries**0.5


@dataclass(frozen=True)
class LinearFactors(Factors):
    """G_i = B_iᵀ A_i; ``pair`` is A (n, T, in) and B (n, T, out) as they came.

    Whatever is not needed for the way to the norm that is taken is not computed.
    """

    pair: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, inputs: Tensor, outputs: Tensor) -> LinearFactors:
        """The factors of a layer's inputs and output gradients, (n, T, ...) each."""
        return cls((inputs, outputs))

    @cached_property
    def _grams(self) -> tuple[Tensor, Tensor, Tensor]:
        """The lengths of the rows of A and of B, and Σ (A Aᵀ) ⊙ (B Bᵀ).

        Of the factors as they came: a record that is lost spoils no other's.
        """
        (a, b), (_, wide, high) = self.pair, self._sizes
        ours, theirs = batched(a, a.mT), batched(b, b.mT)
        long, tall = lengths_in(ours, wide), lengths_in(theirs, high)
        return long, tall, ours.mul_(theirs).sum(-1).sum(-1)

    @cached_property
    def _valid_and_reach(self) -> tuple[Tensor, Tensor]:
        # Where Gram matrices are needed anyway the lengths are on their diagonals, and the
        # factors, which may be as wide as a vocabulary, are not read once more.
        lengths = self._grams[:2] if self.prefers_gram else map(lengths_of, self.pair)
        long, high = lengths
        steps, wide, tall = self._sizes
        terms = steps + max(wide, tall) + 8
        valid = (torch.maximum(long, high) <= LARGEST).all(1)  # nan is the larger of any two
        return valid, lost_unless(valid, (long * high).sum(1) * (1 + self._rounding(terms)))

    @property
    def reach(self) -> Tensor:
        """At least Σ_t ‖a_t‖ ‖b_t‖, what ‖G_i‖ would be if nothing cancelled; (n,).

        Infinite for a record that is lost.
        """
        return self._valid_and_reach[1]

    @cached_property
    def _zeroed(self) -> tuple[Tensor, ...]:
        return zeroed_unless(self._valid_and_reach[0], *self.pair)

    @property
    def inputs(self) -> Tensor:
        """A, zero for every record that is lost."""
        return self._zeroed[0]

    @property
    def outputs(self) -> Tensor:
        """B, zero for every record that is lost."""
        return self._zeroed[1]

    @property
    def narrow(self) -> bool:
        """Whether these are multiplied in bfloat16, with coarser sums and a coarser scaling."""
        return are_narrow(*self.pair)

    def _rounding(self, terms: int) -> float:
        wide = accumulated_in(self.pair[0])
        return rounding(terms * (MATRIX_UNIT if self.narrow else 1), wide)

    @property
    def _moving(self) -> int:
        return MOVING.get(self._device.type, MOVING_ELSEWHERE)

    @property
    def _device(self) -> torch.device:
        return self.pair[0].device

    @property
    def prefers_gram(self) -> bool:
        """Whether two T × T matrices are cheaper than one out × in matrix a record."""
        steps, wide, high = self._sizes
        return steps * steps * (wide + high) < (steps + self._moving) * wide * high

    @property
    def prefers_reuse(self) -> bool:
        """Whether G_i, which replaces the product of a backward pass, is cheap to move.

        Gram matrices cost T² (in + out) multiplications on top of that product; to write
        and read G_i costs its entries.
        """
        steps, wide, high = self._sizes
        return steps * steps * (wide + high) > self._moving * wide * high

    @property
    def _sizes(self) -> tuple[int, int, int]:
        a, b = self.pair
        return a.shape[1], a.shape[2], b.shape[2]

    def norms(self) -> Tensor:
        """Norms of the per-record gradients, (n,), never below the true ones."""
        return self.gram_norms() if self.prefers_gram else self.direct_norms()

    def gram_norms(self) -> Tensor:
        """Norms from the T × T Gram matrices of A and B."""
        steps, wide, high = self._sizes
        _, _, squares = self._grams
        error = self._rounding(wide + high + 2 * steps + 8)
        squares = torch.addcmul(squares.clamp(min=0), self.reach, self.reach, value=error)
        norms = squares.sqrt_().add_(LOST * steps)
        return lost_unless(self._valid_and_reach[0], norms)

    def direct_norms(self) -> Tensor:
        """Norms of the products themselves, formed in chunks."""
        result = [norm_of_rows(item) for item in products_of(self.inputs, self.outputs)]
        return torch.cat(result) + self.slack()

    def slack(self) -> Tensor:
        """How far rounding may carry a record in ``weighted_sum``, (n,)."""
        scaling = HALF_ULP if self.narrow else 0.0
        return (self._rounding(self.inputs.shape[1] + 8) * (1 + scaling) + scaling) * self.reach

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """The sum over records of weight times gradient; weights (n,)."""
        a, b = self.inputs, self.outputs
        if a.shape[2] < b.shape[2]:
            a = self._scaled(weights, a)
        else:
            b = self._scaled(weights, b)
        return multiplied(b.flatten(0, 1).mT, a.flatten(0, 1))

    def _scaled(self, weights: Tensor, values: Tensor) -> Tensor:
        """Rounded once, and not at all where nothing is narrow or the weight is 1."""
        scaled = per_record(weights, widened(values))
        return scaled.to(values.dtype) if self.narrow else scaled

    def clipped_sum(self, clip_norm: float) -> Tensor:
        """The sum of the per-record gradients, each clipped to ``clip_norm``."""
        reuse = self.prefers_reuse
        return self.reused_sum(clip_norm) if reuse else super().clipped_sum(clip_norm)

    def reused_sum(self, clip_norm: float) -> Tensor:
        """Each G_i formed once, for its norm and for the sum: no slack is needed."""
        _, wide, high = self._sizes
        total: Tensor | None = None
        for products in self._products():
            weights, retained = weighed(products, clip_norm)
            item = retained.flatten(1).mT
            total = torch.mv(item, weights) if total is None else total.addmv_(item, weights)
        assert total is not None
        return total.view(high, wide)

    def _products(self) -> Iterator[Tensor]:
        """Each G_i once, (chunk, out, in), for whoever takes it to change."""
        return products_of(*self.pair)


def weighed(products: Tensor, clip_norm: float) -> tuple[Tensor, Tensor]:
    """Weights (n,) of per-record gradients (n, ...), and these, zero where one is not finite."""
    norms = norm_of_rows(products)
    (retained,) = zeroed_unless(torch.isfinite(norms), products)
    return clip_weights(norms, clip_norm), retained


def products_of(inputs: Tensor, outputs: Tensor) -> Iterator[Tensor]:
    """B_iᵀ A_i, (chunk, out, in), each chunk of records in the place of the one before.

    A chunk belongs to whoever is given it, until the next.
    """
    if are_narrow(inputs, outputs):
        size = max(1, MAX_ENTRIES // (inputs.shape[2] * outputs.shape[2]))
        for a, b in zip(inputs.split(size), outputs.split(size), strict=True):
            yield batched(b.mT, a)
        return
    a, b = widened(inputs), widened(outputs)
    most = CHUNK_ENTRIES.get(a.device.type, MAX_ENTRIES)
    size = max(1, min(len(a), most // (a.shape[2] * b.shape[2])))
    place = torch.empty(size, b.shape[2], a.shape[2], dtype=a.dtype, device=a.device)
    for first in range(0, len(a), size):
        last = min(len(a), first + size)
        yield torch.bmm(b[first:last].mT, a[first:last], out=place[: last - first])


@dataclass(frozen=True, slots=True)
class EmbeddingFactors(Factors):
    """Row ids[i, t] of a table of ``rows`` rows receives outputs[i, t], (n, T, d)."""

    ids: Tensor
    outputs: Tensor
    reach: Tensor
    rows: int

    @classmethod
    def of(cls, ids: Tensor, outputs: Tensor, rows: int) -> EmbeddingFactors:
        """The factors of a look-up of ``ids`` (n, T) with output gradients (n, T, d)."""
        lengths = lengths_of(outputs)
        reach = lengths.sum(1) * (1 + rounding(sum(outputs.shape[1:]) + 8, lengths.dtype))
        retained = (lengths <= LARGEST).all(1)
        (b,) = zeroed_unless(retained, outputs)
        return cls(ids, b, lost_unless(retained, reach), rows)

    def norms(self) -> Tensor:
        """Norms of the rows as gathered: ids that occur twice are added first."""
        b = widened(self.outputs)
        order = torch.argsort(self.ids, dim=1)
        ids = torch.gather(self.ids, 1, order)
        fresh = torch.cat([torch.zeros_like(ids[:, :1]), (ids[:, 1:] != ids[:, :-1]).long()], 1)
        places = fresh.cumsum(1).unsqueeze(2).expand_as(b)
        gathered = torch.gather(b, 1, order.unsqueeze(2).expand_as(b))
        sums = torch.zeros_like(b).scatter_add_(1, places, gathered)
        return norm_of_rows(sums) + self.slack()

    def slack(self) -> Tensor:
        """How far rounding may carry a record in ``weighted_sum``, (n,)."""
        return rounding(self.outputs.shape[1] + 8, self.reach.dtype) * self.reach

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """The sum over records of weight times gradient; weights (n,)."""
        b = per_record(weights, widened(self.outputs))
        table = torch.zeros(self.rows, b.shape[2], dtype=b.dtype, device=b.device)
        return table.index_add_(0, self.ids.flatten(), b.flatten(0, 1))


@dataclass(frozen=True)
class DenseFactors(Factors):
    """The per-record gradients themselves, (n, *shape), as they came: biases, scales, the rest."""

    raw: Tensor

    @classmethod
    def of(cls, gradients: Tensor) -> DenseFactors:
        """Per-record gradients of any float type, of at least one dimension a record."""
        return cls(widened(gradients))

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        bounds = norm_of_rows(self.raw)
        valid = bounds <= LARGEST
        return valid, lost_unless(valid, bounds)

    @cached_property
    def gradients(self) -> Tensor:
        """Those of each record, zero for every record that is lost."""
        (result,) = zeroed_unless(self._bounds[0], self.raw)
        return result

    def norms(self) -> Tensor:
        """Norms of the per-record gradients, (n,), never below the true ones."""
        return self._bounds[1]

    def slack(self) -> Tensor:
        """The rounding of one product an entry."""
        return rounding(2, self.raw.dtype) * self.norms()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """The sum over records of weight times gradient; weights (n,)."""
        return torch.tensordot(weights.to(self.gradients.dtype), self.gradients, dims=1)
