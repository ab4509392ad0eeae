"""Ghost norms: norms, inner products and weighted sums of per-record gradients from factors.

A layer seldom needs its n per-record gradients in full. For y = x Wᵀ the gradient of
record i is G_i = B_iᵀ A_i with inputs A_i (T × in) and output gradients B_i = ∂ℓ_i/∂y (T × out),
so that

    ‖G_i‖² = Σ_{s,t} (A_i A_iᵀ)_{st} (B_i B_iᵀ)_{st},     Σ_i w_i G_i = (w B)ᵀ A.

The norm is computed in one of three ways, chosen by size: ``gram`` forms the two T × T matrices,
``direct`` forms G_i in chunks, and ``reuse`` forms G_i once for both the norm and the weighted sum,
which requires that the tensor is clipped alone. It replaces the product of a plain backward pass.

Guarantees
    * ``norms`` is an upper bound on ‖G_i‖. ``slack`` bounds how far rounding in ``weighted_sum``
      moves the contribution of a record of weight 1 away from G_i.
    * A record whose factors are not finite, or too long, has an infinite norm and zero factors,
      so that it adds exactly nothing.

References: arXiv:2210.00038 (book-keeping), arXiv:2009.03106 and arXiv:1510.01799 (norms
without gradients), arXiv:2205.10683 (choice by size).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from affidavit.trainer.clipping import device_operations
from affidavit.trainer.clipping.device_operations import (
    clipped_sum_of_rows,
    gram_of_rows_,
    has_kernels,
    lie_together,
    norms_of_look_ups,
    scale_in_halves,
    squares_of_products,
    sums_of_products,
    terms_of_squares,
    zero_records_,
)
from affidavit.trainer.clipping.kernel_sizes import (
    GRAM_PART,
    LEAST_STEPS,
    PART_STEPS,
    STEPS_AT_ONCE,
)
from affidavit.trainer.errors import MixedRecords
from affidavit.trainer.norm_bounds import (
    BFLOAT16_ERROR,
    MATRIX_UNIT_ERROR,
    MAX_ROW_NORM,
    UNDERFLOW,
    clip_weights,
    norm_of_rows,
    rounding_bound,
    upcast,
)

CHUNK_ENTRIES = {"cpu": 1 << 18}
"""Entries of per-record gradients formed at once: 1 MiB, the cache of one core, so that entries are
still cached when their norm is taken and when they are added."""

MAX_ENTRIES = 1 << 27
"""Entries formed at once on other devices (512 MiB in float32); twice as many in bfloat16."""

MOVE_COSTS = {"cpu": 12}
"""Multiplications that take as long as moving one entry through the cache, measured."""

ACCELERATOR_MOVE_COST = 1000
"""The same for an accelerator, from its data sheet (H200: 4e14 bfloat16 multiplications and
4.8e12 bytes a second, an entry written once and read twice); not measured."""

PROCESSORS = frozenset({"cpu"})
"""Devices for which the host does not wait, so that it may look at values at no cost."""

BFLOAT16_DEVICES = frozenset({"cuda"})
"""Devices that multiply bfloat16 operands directly into float32."""

MAX_STACKED, MAX_FORMED, MAX_FORMED_CPU = 1 << 16, 1 << 22, 1 << 20
"""Entries of the factors of a tensor above which they are not copied to be with others, and entries
of gradients above which they are not stored, on a device and on the processor."""

LOST_TO_ROUNDING = 1e-3
"""Part of a record's norm that the bound on a sum's rounding may take where terms are independent.
A longer sum is taken in parts, which are added afterwards."""

PRODUCT_UNDERFLOW = 2.0**-51
"""√(2⁻¹²⁶ / γ) for the smallest γ of a product here, 8 u = 2⁻²¹, rounded up."""


class Factors(ABC):
    """The per-record gradients of one use of one tensor."""

    @abstractmethod
    def norms(self) -> Tensor:
        """Return an upper bound on ‖G_i‖, shape (n,); infinite for a discarded record."""

    @abstractmethod
    def slack(self) -> Tensor:
        """Return an upper bound on ‖contribution to ``weighted_sum`` at weight 1 - G_i‖, (n,)."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i G_i, in the tensor's shape up to a view."""

    def weighted_sums(self, weights: Tensor) -> Iterable[Tensor]:
        """Return the weighted sums of k tensors, whose factors follow each other; weights (k, n).

        Each has its tensor's shape, up to a view. Factors that are never stacked have k = 1.
        """
        return [self.weighted_sum(weights[0])]

    @property
    def stack_key(self) -> tuple[Any, ...] | None:
        """What factors share that may be stacked, or None if these may not be."""
        return None

    @property
    def entries(self) -> int:
        """The number of entries of the factors, or of what is computed from all of them at once."""
        return 0

    @property
    def waits(self) -> bool:
        """Whether these factors are clipped later, together with others of the same key.

        They are where an operation on them takes little longer than its call.
        """
        is_small = self.entries <= MAX_STACKED or not is_processor(self.device)
        return is_small and self.stack_key is not None

    @property
    @abstractmethod
    def held(self) -> tuple[Tensor, ...]:
        """The tensors that the factors hold, of any shape."""

    @property
    def device(self) -> torch.device:
        """The device of the factors."""
        return self.held[0].device

    @property
    def bytes(self) -> int:
        """The memory of the tensors that the factors hold."""
        return sum(item.numel() * item.element_size() for item in self.held)

    def formed(self) -> Factors:
        """Return the gradients themselves where that is cheapest and they are small."""
        return self

    def stacked(self, others: Sequence[Any]) -> Factors:
        """Return the factors of these records and those of ``others``, of the same key.

        Raises ``NotImplementedError`` without a key.
        """
        raise NotImplementedError

    def clipped_sum(self, clip_norm: float) -> Tensor:
        """Return Σ_i of G_i clipped to ``clip_norm``, for a use that is clipped alone.

        The weights follow from the norms of the contributions. It has the tensor's shape.
        """
        return self.weighted_sum(clip_weights(self.norms() + self.slack(), clip_norm))


def is_processor(device: torch.device) -> bool:
    """Return whether operations on ``device`` run in the calling thread."""
    return device.type in PROCESSORS


@lru_cache(maxsize=1 << 12)
def constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``values`` as a tensor of shape (k,), which is copied to ``device`` only once."""
    return torch.tensor(values, dtype=dtype, device=device)


def scale_records(weights: Tensor, values: Tensor) -> Tensor:
    """Return w_i times record i of ``values`` (n, ...)."""
    return values * weights.view(-1, *([1] * (values.ndim - 1))).to(values.dtype)


def exceed(bounds: Tensor, dims: tuple[int, ...] = ()) -> Tensor:
    """Return where a bound is nan or above ``MAX_ROW_NORM``, or any is along ``dims``.

    The result has the shape of ``bounds``, without ``dims``.
    """
    largest = bounds.amax(dims) if dims else bounds  # nan if any is
    return (largest <= MAX_ROW_NORM).logical_not_()


def infinite_if(lost: Tensor, bounds: Tensor) -> Tensor:
    """Return ``bounds``, infinite for each record that is ``lost``. Both have the same shape."""
    return bounds.masked_fill(lost, torch.inf)


def zeroed_if(lost: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Return ``values`` with zeros for each record that is ``lost``, shape (n,).

    A weight of zero does not suffice, because 0 · nan is nan. On the CPU, values are copied only
    if a record is lost; checking this on another device would synchronize with it.

    Each of ``values`` has a row for each of the n records.
    """
    if is_processor(lost.device) and not bool(lost.any()):
        return values
    return tuple(
        value.masked_fill(lost.view(-1, *([1] * (value.ndim - 1))), 0.0) for value in values
    )


def accumulation_type(values: Tensor) -> torch.dtype:
    """Return the type in which sums over ``values`` are taken. They may have any shape."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def require_record_dimension(values: Tensor, dims: int) -> None:
    """Raise ``MixedRecords`` unless the shape of ``values`` has more than ``dims`` dimensions."""
    if values.ndim <= dims:
        raise MixedRecords(
            f"a layer's output of shape {tuple(values.shape)} has no dimension of records; keep "
            "records in the first dimension."
        )


def sum_over_steps(values: Tensor, dims: int) -> Tensor:
    """Sum (n, ..., *shape) to (n, *shape) over all but the first and last ``dims`` dimensions.

    Raises ``MixedRecords`` if there is no dimension of records.
    """
    require_record_dimension(values, dims)
    middle = tuple(range(1, values.ndim - dims))
    return values.sum(middle, dtype=accumulation_type(values)) if middle else upcast(values)


def are_bfloat16(*values: Tensor) -> bool:
    """Return whether ``values`` are multiplied in bfloat16."""
    return all(
        value.dtype == torch.bfloat16 and value.device.type in BFLOAT16_DEVICES for value in values
    )


def batched_matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a_i b_i for each record, in float32 or float64; bfloat16 operands are not copied.

    Shapes (n, i, j) and (n, j, k) give (n, i, k), in ``out`` if given.
    """
    if a.is_cuda and are_bfloat16(a, b):
        return torch.bmm(a, b, out_dtype=torch.float32, out=out)
    return torch.bmm(upcast(a), upcast(b), out=out)


def add_batched_matmul_(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add ``batched_matmul`` to ``total``, (n, i, k), in place. a and b have its shapes."""
    if a.is_cuda and are_bfloat16(a, b):
        return torch.baddbmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.baddbmm_(upcast(a), upcast(b))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a b for one pair, like ``batched_matmul``. Shapes (i, j) and (j, k) give (i, k)."""
    if a.is_cuda and are_bfloat16(a, b):
        return torch.mm(a, b, out_dtype=torch.float32)
    return upcast(a) @ upcast(b)


def row_norms(values: Tensor) -> Tensor:
    """Return the l2 norm of each row, up to rounding, in float32 or float64.

    ``PRODUCT_UNDERFLOW`` is added for each entry. It bounds the underflow in products of these rows
    by the same γ times the norms as the rounding.

    Shape (..., m) gives (...,).
    """
    result = torch.linalg.vector_norm(values, dim=-1, dtype=accumulation_type(values))
    return result + PRODUCT_UNDERFLOW * values.shape[-1] ** 0.5


def grams_of_rows(items: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Return the products of all pairs of rows of k ``items``, summed a part of entries at a time.

    Values (n, T, m), each with the length of its parts, give (k, n, T, T).
    """
    n, steps, _ = items[0][0].shape
    grams = items[0][0].new_empty(len(items), n, steps, steps, dtype=accumulation_type(items[0][0]))
    for gram, (values, part) in zip(grams, items, strict=True):
        if are_bfloat16(values) and has_kernels(values.device):
            gram_of_rows_(gram, values, part)
            continue
        first, *rest = values.split(part, -1)
        batched_matmul(first, first.mT, out=gram)
        for item in rest:
            add_batched_matmul_(gram, item, item.mT)
    return grams


class LinearFactors(Factors):
    """G_i = B_iᵀ A_i with inputs A (n, T, in) and output gradients B (n, T, out).

    Only what the chosen way to the norm needs is computed. Of a factor that is ``owned``, which
    nobody sees after the backward pass, the discarded records may be overwritten by zeros.
    """

    def __init__(
        self, inputs: Tensor, outputs: Tensor, *, owned: tuple[bool, bool] = (False, False)
    ) -> None:
        self.pair, self.owned, self.records = (inputs, outputs), owned, len(inputs)

    @cached_property
    def bounds(self) -> tuple[Tensor, ...]:
        """What ``bounds_of_uses`` returns for this use, each of shape (n,)."""
        return tuple(item[0] for item in bounds_of_uses([self]))

    @property
    def has_bounds(self) -> bool:
        """Whether the norm and Σ_t ‖a_t‖ ‖b_t‖ are computed at once."""
        return self.sizes[0] > 1 and (self.prefers_gram or has_kernels(self.device))

    @property
    def part_lengths(self) -> tuple[int, int]:
        """The lengths of the parts in which products of rows of A and of B are added.

        Their errors count in the square of the norm, so for half in the norm. A kernel takes
        multiples of ``GRAM_PART``.
        """
        steps, in_size, out_size = self.sizes
        in_part = self._part_length(in_size, (1 + steps / out_size**0.5) / 2)
        out_part = self._part_length(out_size, (1 + steps / in_size**0.5) / 2)
        if not has_kernels(self.device):
            return in_part, out_part
        return -(-in_part // GRAM_PART) * GRAM_PART, -(-out_part // GRAM_PART) * GRAM_PART

    @cached_property
    def _lost_and_reach(self) -> tuple[Tensor, ...]:
        # Gram matrices have the row norms on their diagonals, so the factors, which may be as
        # wide as a vocabulary, are not read again.
        if self.has_bounds:
            return self.bounds[:2]
        input_norms, output_norms = map(row_norms, self.pair)
        lost = exceed(torch.maximum(input_norms, output_norms), (1,))
        bound = (input_norms * output_norms).sum(1) * self.reach_margin
        return lost, infinite_if(lost, bound)

    @property
    def reach_margin(self) -> float:
        """A factor that covers the rounding of Σ_t ‖a_t‖ ‖b_t‖."""
        steps, in_size, out_size = self.sizes
        return 1 + self.rounding(steps + max(in_size, out_size) + 8)

    def gram_errors(self, in_part: int, out_part: int, dtype: torch.dtype) -> tuple[float, ...]:
        """Return the row of ``bounds_of_grams`` for Gram matrices added in parts of these lengths.

        Their entries, and what is computed from them, have the type ``dtype``.
        """
        steps, in_size, out_size = self.sizes
        in_error = self.rounding_in_parts(in_size, in_part)
        out_error = self.rounding_in_parts(out_size, out_part)
        return (
            PRODUCT_UNDERFLOW * in_size**0.5,
            PRODUCT_UNDERFLOW * out_size**0.5,
            in_error,
            out_error,
            in_error * out_error,
            rounding_bound(2 * steps + 8, dtype),
            1 + 4 * self.rounding(steps + in_part + out_part + 8),
            1 + self.rounding(8),
            2 * UNDERFLOW * steps,
            self.reach_margin,
        )

    @property
    def max_norm(self) -> Tensor:
        """At least Σ_t ‖a_t‖ ‖b_t‖, the norm of G_i if nothing cancelled; (n,).

        Infinite for a discarded record.
        """
        return self._lost_and_reach[1]

    @cached_property
    def _valid_factors(self) -> tuple[Tensor, ...]:
        return zeroed_if(self._lost_and_reach[0], *self.pair)

    @property
    def inputs(self) -> Tensor:
        """A, zero for each discarded record."""
        return self._valid_factors[0]

    @property
    def outputs(self) -> Tensor:
        """B, zero for each discarded record."""
        return self._valid_factors[1]

    def _zeroed(self, side: int) -> Tensor:
        """Return A (0) or B (1), zero for each discarded record, and in place where that is cheap.

        Norms are computed before. A record that another use of the same memory has not discarded
        adds zero there. It adds a term less to a sum of several uses of one tensor, whose other
        terms it may have cancelled, but such uses have copies: their norm takes ``inputs`` and
        ``outputs``.
        """
        values, lost = self.pair[side], self._lost_and_reach[0]
        if "_valid_factors" in self.__dict__:
            return self._valid_factors[side]
        if self.owned[side] and has_kernels(self.device) and lie_together(values):
            zero_records_(values, lost)
            return values
        (result,) = zeroed_if(lost, values)
        return result

    @cached_property
    def is_bfloat16(self) -> bool:
        """Whether the factors are multiplied in bfloat16, with coarser sums and scaling."""
        return are_bfloat16(*self.pair)

    @property
    def _unit_error(self) -> int:
        return MATRIX_UNIT_ERROR if self.is_bfloat16 else 1

    def rounding(self, terms: int) -> float:
        """Return γ of a sum of ``terms`` products of the factors."""
        return rounding_bound(terms * self._unit_error, accumulation_type(self.pair[0]))

    def _part_length(self, terms: int, spread: float) -> int:
        """Return the length of parts of a sum of ``terms`` whose error counts ``spread`` times."""
        unit = self._unit_error * torch.finfo(accumulation_type(self.pair[0])).eps / 2
        parts = math.ceil(terms * spread * unit / LOST_TO_ROUNDING)
        return math.ceil(terms / max(1, parts))

    def rounding_in_parts(self, terms: int, part: int) -> float:
        """Return γ of a sum of ``terms`` products that is taken in parts of this length."""
        return self.rounding(part + 2 * math.ceil(terms / part) + 8)

    @cached_property
    def _step_part(self) -> int:
        """The number of steps of a record that ``weighted_sum`` adds at once.

        It divides the steps where it can, so that parts are as long as each other.
        """
        steps = self.sizes[0]
        part = self._part_length(steps, steps**0.5)
        even = (length for length in range(part, part // 2, -1) if steps % length == 0)
        return next(even, part)

    @property
    def _move_cost(self) -> int:
        return MOVE_COSTS.get(self.device.type, ACCELERATOR_MOVE_COST)

    @property
    def held(self) -> tuple[Tensor, ...]:
        """A and B."""
        return self.pair

    @property
    def prefers_gram(self) -> bool:
        """Whether two T × T matrices are cheaper than one out × in matrix per record.

        Each part of either after the first is written, and read and written when it is added,
        unless a kernel adds it.
        """
        steps, in_size, out_size = self.sizes
        in_part, out_part = self.part_lengths
        parts = math.ceil(in_size / in_part) + math.ceil(out_size / out_part) - 2
        parts = 0 if self._has_kernels else parts
        gram_cost = steps * steps * (in_size + out_size + self._move_cost * parts)
        moves = 0 if has_kernels(self.device) else math.ceil(steps / self._direct_part)
        return gram_cost < (steps + self._move_cost * moves) * in_size * out_size

    @property
    def prefers_reuse(self) -> bool:
        """Whether forming G_i instead of the product of a backward pass is cheaper.

        Gram matrices cost T² (in + out) multiplications in addition to that product. A kernel that
        stores no G_i costs T in out, and moves the factors twice. Moving G_i costs its entries, and
        half as much in bfloat16.
        """
        steps, in_size, out_size = self.sizes
        other, entry = steps * steps * (in_size + out_size), self._move_cost
        if has_kernels(self.device):
            entry = entry // 2 if self.is_bfloat16 else entry
            moved = 2 * steps * (in_size + out_size)
            other = min(other, steps * in_size * out_size + entry // 3 * moved)
        return other > entry * in_size * out_size

    @property
    def waits(self) -> bool:
        """Whether these factors are clipped with others; not if ``prefers_reuse``."""
        return super().waits and not self.prefers_reuse

    @property
    def sizes(self) -> tuple[int, int, int]:
        """T, in and out."""
        a, b = self.pair
        return a.shape[1], a.shape[2], b.shape[2]

    def norms(self) -> Tensor:
        """Return an upper bound on the norm of each per-record gradient, (n,)."""
        if self.has_bounds:
            return self.bounds[2]
        return self.gram_norms() if self.prefers_gram else self.direct_norms()

    def gram_norms(self) -> Tensor:
        """Return the norms from the T × T Gram matrices of A and B, or ‖a‖ ‖b‖ if T = 1."""
        if self.sizes[0] == 1:
            return self.max_norm
        return bounds_from_grams([self])[2][0]

    @property
    def direct_part_of_kernel(self) -> int:
        """The number of steps that ``squares_of_products`` adds at once."""
        return -(-self._direct_part // PART_STEPS) * PART_STEPS

    def direct_norms(self) -> Tensor:
        """Return the norms of the products themselves, formed in chunks."""
        part = self._direct_part
        products = form_products(self.inputs, self.outputs, part)
        norms = torch.cat([norm_of_rows(item) for item in products])
        return norms.add_(self.max_norm, alpha=self.rounding_in_parts(self.sizes[0], part))

    @property
    def _direct_part(self) -> int:
        """The number of steps of a record that ``direct_norms`` adds at once.

        Each part moves all entries of G_i, so more is lost to rounding than elsewhere.
        """
        steps = self.sizes[0]
        return self._part_length(steps, steps**0.5 / 3)

    def slack(self) -> Tensor:
        """Return the rounding error of a record in ``weighted_sum``, (n,)."""
        return self.slack_of_reach * self.max_norm

    @property
    def slack_of_reach(self) -> float:
        """``slack`` as a part of ``max_norm``."""
        if self._has_kernel_of_sums:
            return self.rounding_in_parts(self.sizes[0], STEPS_AT_ONCE)
        scaling = BFLOAT16_ERROR**2 if self.is_bfloat16 else 0.0
        rounding = self.rounding_in_parts(self.sizes[0], self._step_part)
        return rounding * (1 + BFLOAT16_ERROR) ** 2 + scaling

    @property
    def _has_kernels(self) -> bool:
        return self.is_bfloat16 and has_kernels(self.device)

    @property
    def _has_kernel_of_sums(self) -> bool:
        return self._has_kernels and self.sizes[0] >= LEAST_STEPS

    @property
    def stack_key(self) -> tuple[Any, ...] | None:
        """Shapes and types of small factors; what Gram matrices share of others on a device."""
        if type(self) is not LinearFactors:
            return None
        if not self._is_copied:
            if not self.has_bounds or is_processor(self.device):
                return None
            a, (steps, _, _) = self.pair[0], self.sizes
            return ("norms", self.prefers_gram, len(a), steps, a.dtype, self.device)
        return tuple((item.shape, item.dtype, item.device) for item in self.pair)

    @property
    def _is_copied(self) -> bool:
        return sum(item.numel() for item in self.pair) <= MAX_STACKED

    @property
    def entries(self) -> int:
        """The number of entries of A and B, of their Gram matrices, or of the norms of rows."""
        a, b = self.pair
        if self._is_copied:
            return a.numel() + b.numel()
        return len(a) * self.sizes[0] * (2 * self.sizes[0] if self.prefers_gram else 1)

    def stacked(self, others: Sequence[LinearFactors]) -> Factors:
        """Return the factors of these records and those of ``others``."""
        if not self._is_copied:
            return LinearUses([self, *others])
        return LinearFactors(
            *map(torch.cat, zip(*(of.pair for of in (self, *others)), strict=True)),
            owned=(True, True),
        )

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum over records of weight times gradient; weights (n,)."""
        return self.weighted_sums(weights.unsqueeze(0)).squeeze(0)

    def weighted_sums(self, weights: Tensor) -> Tensor:
        """Return the sums over the records of each tensor, (k, out, in); weights (k, n).

        A kernel weights products. Otherwise, a factor is scaled: in bfloat16, it is the difference
        of two, so that it has sixteen bits. They lie side by side, so that the other factor is read
        once.
        """
        if self._has_kernel_of_sums:
            return sums_of_products(*self.pair, weights, self._lost_and_reach[0])
        tensors = len(weights)
        scales_inputs = self.sizes[1] < self.sizes[2]
        narrow, wide = (0, 1) if scales_inputs else (1, 0)
        scaled = (
            scale_in_halves(self.pair[narrow], weights.flatten(), self._lost_and_reach[0])
            if self.is_bfloat16
            else scale_records(weights.flatten(), upcast(self._zeroed(narrow)))
        )
        pair = (scaled, self._zeroed(wide)) if scales_inputs else (self._zeroed(wide), scaled)
        total: Tensor | None = None
        for left, right in zip(*(self._parts(item, tensors) for item in pair), strict=True):
            if total is not None and len(right) == tensors:
                add_batched_matmul_(total, right.mT, left)
                continue
            part = (
                matmul(right[0].mT, left[0]).unsqueeze(0)
                if len(right) == 1
                else batched_matmul(right.mT, left)
            )
            if len(part) > tensors:
                part = part.sum(0, keepdim=True)
            total = part if total is None else total.add_(part)
        assert total is not None
        return torch.sub(*total.chunk(2, 2 if scales_inputs else 1)) if self.is_bfloat16 else total

    def _parts(self, values: Tensor, tensors: int) -> Iterator[Tensor]:
        """Yield a factor (n, T, m) of ``tensors`` in parts (k, rows, m), each multiplied at once.

        Each of the k has the rows of a tensor, or of ``_step_part`` steps of every record.
        """
        steps, in_size, out_size = self.sizes
        count = -(-steps // self._step_part)
        if count == 1 or tensors > 1 or steps % count:
            for part in values.split(self._step_part, 1):
                yield part.reshape(tensors, -1, values.shape[-1])
            return
        # Every count-th row, so that a part's rows lie evenly in memory and are not copied.
        of_parts = values.reshape(-1, count, values.shape[-1]).transpose(0, 1)
        yield from of_parts.split(count if in_size * out_size <= MAX_FORMED else 1)

    def clipped_sum(self, clip_norm: float) -> Tensor:
        """Return the sum of the per-record gradients, each clipped to ``clip_norm``."""
        reuse = self.prefers_reuse
        return self.reused_sum(clip_norm) if reuse else super().clipped_sum(clip_norm)

    def formed(self) -> Factors:
        """Return the gradients themselves, if they are small and ``prefers_reuse``."""
        on_processor = is_processor(self.device)
        if type(self) is not LinearFactors and not on_processor:
            return self
        entries = self.records * self.sizes[1] * self.sizes[2]
        is_small = entries <= (MAX_FORMED_CPU if on_processor else MAX_FORMED)
        if not (is_small and self.prefers_reuse):
            return self
        parts = [batched_matmul(b.mT, a) for a, b in self._pairs()]
        return DenseFactors(parts[0] if len(parts) == 1 else torch.cat(parts))

    def reused_sum(self, clip_norm: float) -> Tensor:
        """Form each G_i once, for its norm and for the sum, so that no slack is needed."""
        _, in_size, out_size = self.sizes
        total: Tensor | None = None
        for products in self._products():
            if is_processor(products.device):
                weights, gradients = clip_products(products, clip_norm)
                item = gradients.flatten(1).mT
                total = torch.mv(item, weights) if total is None else total.addmv_(item, weights)
            else:
                item = clipped_sum_of_rows(products.flatten(1), clip_norm)
                total = item if total is None else total.add_(item)
        assert total is not None
        return total.view(out_size, in_size)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield A and B of some records after the other."""
        yield self.pair

    def _products(self) -> Iterator[Tensor]:
        """Yield the G_i in chunks (chunk, out, in), which the caller may overwrite."""
        return form_products(*self.pair, keeps_type=True)


def bounds_of_uses(uses: Sequence[LinearFactors]) -> tuple[Tensor, Tensor, Tensor]:
    """Return which records are lost, at least Σ_t ‖a_t‖ ‖b_t‖, and bounds on the norms; (k, n).

    The k uses have the same records and steps, and prefer the same way.
    """
    return bounds_from_grams(uses) if uses[0].prefers_gram else bounds_from_products(uses)


def bounds_from_grams(uses: Sequence[LinearFactors]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``bounds_of_uses`` from the Gram matrices of the factors; (k, n).

    The bounds follow from Σ K ⊙ L of K = A Aᵀ and
    L = B Bᵀ, and from a bound on its error: an entry of K has an error of at most γ ‖a_s‖ ‖a_t‖,
    which L multiplies, and conversely. They are computed from the unmodified factors: a discarded
    record affects no other, and its bounds are infinite.
    """
    parts = [use.part_lengths for use in uses]
    grams = grams_of_rows(
        [(use.pair[side], of[side]) for side in (0, 1) for use, of in zip(uses, parts, strict=True)]
    ).unflatten(0, (2, -1))
    errors = constants(
        tuple(
            value
            for use, of in zip(uses, parts, strict=True)
            for value in use.gram_errors(*of, grams.dtype)
        ),
        grams.dtype,
        grams.device,
    )
    reach, bounds = device_operations.bounds_of_grams(grams, errors.view(len(uses), -1)).unbind()
    return reach == torch.inf, reach, bounds


def bounds_from_products(uses: Sequence[LinearFactors]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``bounds_of_uses`` from products that are not stored; (k, n)."""
    pairs, errors = [], []
    for use in uses:
        (steps, *sizes), part = use.sizes, use.direct_part_of_kernel
        least = PRODUCT_UNDERFLOW * sizes[0] ** 0.5, PRODUCT_UNDERFLOW * sizes[1] ** 0.5
        pairs.append(squares_of_products(*use.pair, part, least))
        terms = terms_of_squares(*sizes) + 8
        errors += [
            use.reach_margin,
            use.rounding_in_parts(steps, part),
            1 + rounding_bound(terms, pairs[0].dtype),
            UNDERFLOW * (sizes[0] * sizes[1]) ** 0.5,
        ]
    both = torch.stack(pairs, 1)
    columns = constants(tuple(errors), both.dtype, both.device).view(len(uses), 4, 1).unbind(1)
    margin, error, of_norm, floor = columns
    reach = both[0].mul_(margin)
    bounds = both[1].sqrt_().mul_(of_norm).add_(floor).addcmul_(reach, error)
    lost = reach == torch.inf
    return lost, reach, torch.minimum(bounds, reach).masked_fill_(lost, torch.inf)


class LinearUses(Factors):
    """Uses of k matrices by the same records and steps, whose norms are taken together."""

    def __init__(self, uses: Sequence[LinearFactors]) -> None:
        self._uses = list(uses)

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        lost, reach, norms = bounds_of_uses(self._uses)
        for use, *item in zip(self._uses, lost, reach, norms, strict=True):
            use.bounds = tuple(item)
        return reach, norms

    @property
    def held(self) -> tuple[Tensor, ...]:
        """A and B of each use."""
        return tuple(item for use in self._uses for item in use.pair)

    def norms(self) -> Tensor:
        """Return upper bounds on the norms of the per-record gradients, (k n,)."""
        return self._bounds[1].flatten()

    def slack(self) -> Tensor:
        """Return the rounding errors of the records in ``weighted_sums``, (k n,)."""
        reach = self._bounds[0]
        parts = tuple(use.slack_of_reach for use in self._uses)
        return (reach * constants(parts, reach.dtype, reach.device)[:, None]).flatten()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum over records of weight times gradient of the one use; weights (n,)."""
        (result,) = self.weighted_sums(weights.unsqueeze(0))
        return result

    def weighted_sums(self, weights: Tensor) -> Iterator[Tensor]:
        """Yield the sum over the records of each tensor, (out, in); weights (k, n)."""
        for use, row in zip(self._uses, weights.unbind(), strict=True):
            yield use.weighted_sum(row)


def clip_products(products: Tensor, clip_norm: float) -> tuple[Tensor, Tensor]:
    """Return the clip weights (n,) of gradients (n, ...), and the gradients, changed in place.

    Gradients of weight zero, such as those that are not finite, become zero. On a processor.
    """
    weights = clip_weights(norm_of_rows(products), clip_norm)
    lost = weights == 0
    if bool(lost.any()):
        products.masked_fill_(lost.view(-1, *([1] * (products.ndim - 1))), 0.0)
    return weights, products


def form_products(
    inputs: Tensor, outputs: Tensor, part: int | None = None, *, keeps_type: bool = False
) -> Iterator[Tensor]:
    """Yield B_iᵀ A_i in chunks (chunk, out, in), summed ``part`` steps at a time, or all at once.

    Each chunk may overwrite the one before it. Products that keep the type of the factors may be
    rounded to bfloat16, as those of a plain backward pass are.
    """
    is_bfloat16 = are_bfloat16(inputs, outputs)
    a, b = (inputs, outputs) if is_bfloat16 else (upcast(inputs), upcast(outputs))
    keeps_type = keeps_type and is_bfloat16
    max_entries = MAX_ENTRIES if is_bfloat16 else CHUNK_ENTRIES.get(a.device.type, MAX_ENTRIES)
    max_entries *= 1 + keeps_type
    size = max(1, min(len(a), max_entries // (a.shape[2] * b.shape[2])))
    buffer: Tensor | None = None
    if not is_bfloat16:
        buffer = torch.empty(size, b.shape[2], a.shape[2], dtype=a.dtype, device=a.device)
    for left, right in zip(a.split(size), b.split(size), strict=True):
        first, *others = zip(
            *(item.split(part or item.shape[1], 1) for item in (left, right)), strict=True
        )
        if keeps_type:
            total = torch.bmm(first[1].mT, first[0])
        elif buffer is None:
            total = batched_matmul(first[1].mT, first[0])
        else:
            total = torch.bmm(first[1].mT, first[0], out=buffer[: len(left)])
        for left_part, right_part in others:
            add_batched_matmul_(total, right_part.mT, left_part)
        yield total


@dataclass(frozen=True, slots=True)
class EmbeddingFactors(Factors):
    """A look-up: row ids[i, t] of a table of ``rows`` rows receives outputs[i, t], (n, T, d)."""

    ids: Tensor
    outputs: Tensor
    max_norm: Tensor
    rows: int

    @classmethod
    def build(cls, ids: Tensor, outputs: Tensor, rows: int) -> EmbeddingFactors:
        """Build the factors of a look-up of ``ids`` (n, T) with output gradients (n, T, d).

        The discarded records of these may be overwritten by zeros.
        """
        norms = row_norms(outputs)
        max_norm = norms.sum(1) * (1 + rounding_bound(sum(outputs.shape[1:]) + 8, norms.dtype))
        lost = exceed(norms, (1,))
        if has_kernels(outputs.device) and lie_together(outputs):
            zero_records_(outputs, lost)
        else:
            (outputs,) = zeroed_if(lost, outputs)
        return cls(ids, outputs, infinite_if(lost, max_norm), rows)

    @property
    def held(self) -> tuple[Tensor, ...]:
        """The ids and the output gradients."""
        return self.ids, self.outputs

    def norms(self) -> Tensor:
        """Return the norms of the gathered rows; rows of repeated ids are added first."""
        return norms_of_look_ups(self.ids, self.outputs) + self.slack()

    def slack(self) -> Tensor:
        """Return the rounding error of a record in ``weighted_sum``, (n,)."""
        return rounding_bound(self.outputs.shape[1] + 8, self.max_norm.dtype) * self.max_norm

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum over records of weight times gradient; weights (n,)."""
        b = scale_records(weights, upcast(self.outputs))
        table = torch.zeros(self.rows, b.shape[2], dtype=b.dtype, device=b.device)
        return table.index_add_(0, self.ids.flatten(), b.flatten(0, 1))


class DenseFactors(Factors):
    """Per-record gradients (n, *shape) of any float type, for example of biases and scales."""

    def __init__(self, gradients: Tensor) -> None:
        self.raw = upcast(gradients)

    @property
    def held(self) -> tuple[Tensor, ...]:
        """The gradients."""
        return (self.raw,)

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        bounds = norm_of_rows(self.raw)
        lost = exceed(bounds)
        return lost, infinite_if(lost, bounds)

    @cached_property
    def gradients(self) -> Tensor:
        """The gradient of each record, zero for each discarded record."""
        (result,) = zeroed_if(self._bounds[0], self.raw)
        return result

    def norms(self) -> Tensor:
        """Return an upper bound on the norm of each per-record gradient, (n,)."""
        return self._bounds[1]

    def slack(self) -> Tensor:
        """Return the rounding error of one product per entry."""
        return rounding_bound(2, self.raw.dtype) * self.norms()

    @property
    def stack_key(self) -> tuple[Any, ...] | None:
        """Shape and type of vectors and of small gradients."""
        most = MAX_STACKED if is_processor(self.device) else MAX_FORMED
        if self.raw.ndim != 2 and self.entries > most:
            return None
        return self.raw.shape, self.raw.dtype, self.raw.device

    @property
    def entries(self) -> int:
        """The number of entries of all gradients."""
        return self.raw.numel()

    def stacked(self, others: Sequence[DenseFactors]) -> DenseFactors:
        """Return the gradients of these records and those of ``others``."""
        return DenseFactors(torch.cat([of.raw for of in (self, *others)]))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum over records of weight times gradient; weights (n,)."""
        return torch.tensordot(weights.to(self.gradients.dtype), self.gradients, dims=1)

    def weighted_sums(self, weights: Tensor) -> Tensor:
        """Return the sums over the records of each tensor, (k, *shape) up to a view."""
        gradients = self.gradients.reshape(*weights.shape, -1)
        return torch.bmm(weights.to(gradients.dtype).unsqueeze(1), gradients)


class StepFactors(DenseFactors):
    """Sums over steps of output gradients (n, ..., d), times ``inputs`` of this shape if given.

    They are formed when they are read, which may be together with those of other tensors.
    """

    def __init__(self, outputs: Tensor, inputs: Tensor | None = None) -> None:
        self.pair = (outputs,) if inputs is None else (outputs, inputs)

    @property
    def held(self) -> tuple[Tensor, ...]:
        """The output gradients and the inputs."""
        return self.pair

    @cached_property
    def raw(self) -> Tensor:  # type: ignore[override]  # formed only when it is read
        """The gradient of each record, (n, d)."""
        return sum_over_steps(self.pair[0] if len(self.pair) == 1 else torch.mul(*self.pair), 1)

    @property
    def stack_key(self) -> tuple[Any, ...]:
        """Shapes and types."""
        return tuple((item.shape, item.dtype, item.device) for item in self.pair)

    @property
    def entries(self) -> int:
        """The number of entries of the output gradients and the inputs."""
        return sum(item.numel() for item in self.pair)

    def stacked(self, others: Sequence[StepFactors]) -> StepFactors:  # type: ignore[override]
        """Return the factors of these records and those of ``others``."""
        return StepFactors(*map(torch.cat, zip(*(of.pair for of in (self, *others)), strict=True)))
