"""Operations of per-record clipping that a GPU runs in one kernel.

Each is an operator of PyTorch's dispatcher, so that it has a name and shapes of its own. CUDA runs
the kernel of ``affidavit.trainer.clipping.fused`` where there is Triton; otherwise, and on other
devices, it is made of PyTorch's operations here. Both compute the same, which the tests compare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from affidavit.trainer.clipping.kernel_sizes import (
    LOOK_UP_COLUMNS,
    MAX_SPLITS,
    MULTIPROCESSORS,
    PART_COLUMNS,
    PARTS,
    TILE,
)
from affidavit.trainer.noise.normal import has_triton
from affidavit.trainer.norm_bounds import (
    MAX_ROW_NORM,
    UNDERFLOW,
    clip_weights,
    rounding_bound,
    upcast,
)

KERNEL_DEVICES = frozenset({"cuda"})
"""Devices that run the kernels."""


def has_kernels(device: torch.device) -> bool:
    """Return whether ``device`` runs each of these operations in one kernel."""
    return device.type in KERNEL_DEVICES and has_triton()


def lie_together(values: Tensor) -> bool:
    """Return whether the entries of each record of ``values`` (n, T, m) lie together in memory."""
    return values.is_contiguous() or values.mT.is_contiguous()


def zero_records_(values: Tensor, lost: Tensor) -> None:
    """Write zeros to each ``lost`` record, (n,), of ``values`` (n, T, m), which ``lie_together``.

    The other records are not touched. Autograd takes no note of it: what it saved for the backward
    pass of another operation may be the same memory, whose record is then discarded too.
    """
    torch.ops.affidavit.zero_records_(values, lost)


def scale_in_halves(values: Tensor, weights: Tensor, lost: Tensor) -> Tensor:
    """Return w_i times record i of ``values`` (n, T, m) in bfloat16, as two halves (n, T, 2m).

    The high less the low half differs from the product by 2⁻¹⁶ of it at most. Both are zero for a
    ``lost`` record, (n,), and for one of weight zero.
    """
    result: Tensor = torch.ops.affidavit.scale_in_halves(values, weights, lost)
    return result


def layer_norm_backward(
    x: Tensor, mean: Tensor, rstd: Tensor, gy: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and Σ_t gy_t and Σ_t gy_t ⊙ z_t of each record, (n, 2, m).

    z_t = (x_t - mean_t) rstd_t is scaled by ``weight`` (m,). x and gy have shape (n, T, m), mean
    and rstd (n, T). The sums are in float32 or float64.
    """
    gradient, sums = torch.ops.affidavit.layer_norm_backward(x, mean, rstd, gy, weight)
    return gradient, sums


def clipped_sum_of_rows(rows: Tensor, clip_norm: float) -> Tensor:
    """Return the sum of ``rows`` (n, m), each clipped to ``clip_norm``, in float32 or 64; (m,).

    A row that is not finite adds zeros. Rows in bfloat16 are clipped by their norms in bfloat16.
    """
    entries = rows.shape[1]
    part = -(-entries // (PARTS * PART_COLUMNS)) * PART_COLUMNS
    squares = torch.ops.affidavit.squares_of_parts(rows, part)
    terms = part // PART_COLUMNS + PART_COLUMNS + squares.shape[1] + 8
    factor = 1 + rounding_bound(terms, squares.dtype)
    result: Tensor = torch.ops.affidavit.sum_clipped_by_squares(
        rows, squares, clip_norm, factor, UNDERFLOW * entries**0.5
    )
    return result


def squares_of_products(
    inputs: Tensor, outputs: Tensor, part: int, least: tuple[float, float]
) -> Tensor:
    """Return Σ_t (‖a_t‖ + c) (‖b_t‖ + d) and ‖B_iᵀ A_i‖² of each record, as (2, n).

    A has shape (n, T, in) and B (n, T, out); ``least`` has c and d. The sum is infinite where a row
    is not finite or longer than ``MAX_ROW_NORM``. The products are summed ``part`` steps at a time,
    a multiple of ``PART_STEPS``, and not stored.
    """
    result: Tensor = torch.ops.affidavit.squares_of_products(inputs, outputs, part, *least)
    return result


def sums_of_products(inputs: Tensor, outputs: Tensor, weights: Tensor, lost: Tensor) -> Tensor:
    """Return Σ_i w_i B_iᵀ A_i over the n records of each of k tensors, as (k, out, in).

    The records of the tensors follow each other: A has shape (k n, T, in), B (k n, T, out), and
    ``weights`` (k, n). The products are weighted in float32, ``STEPS_AT_ONCE`` steps at a time. A
    ``lost`` record, (k n,), adds nothing.
    """
    tensors, splits = len(weights), 1
    if tensors == 1:
        records, steps, in_size = inputs.shape
        splits = _splits(records, steps, in_size, outputs.shape[2])
    result: Tensor = torch.ops.affidavit.sums_of_products(
        inputs, outputs, weights.flatten(), lost, tensors * splits
    )
    return result if splits == 1 else result.sum(0, keepdim=True)


def _splits(records: int, steps: int, in_size: int, out_size: int) -> int:
    """Return into how many parts records are divided, so that a device has work for all of it.

    Partial sums are written and read, which takes as long as multiplying four more steps.
    """
    tiles = -(-in_size // TILE) * -(-out_size // TILE)

    def cost(splits: int) -> float:
        rounds = -(-tiles * splits // MULTIPROCESSORS)
        return rounds * records * steps / splits + 4 * tiles * (splits if splits > 1 else 0)

    return min(range(1, min(records, MAX_SPLITS) + 1), key=cost)


def norms_of_look_ups(ids: Tensor, values: Tensor) -> Tensor:
    """Return an upper bound on the norm of the table's gradient of each record, (n,).

    Rows of ``values`` (n, T, m) with one of the ``ids`` (n, T) are added first, which errs.
    """
    ids, order = torch.sort(ids, dim=1)
    squares = torch.ops.affidavit.squares_of_look_ups(values, ids, order)
    _, steps, width = values.shape
    terms = steps + LOOK_UP_COLUMNS + squares.shape[1] + 8
    norms: Tensor = squares.sum(1).sqrt_().mul_(1 + rounding_bound(terms, squares.dtype))
    return norms.add_(UNDERFLOW * (steps * width) ** 0.5)


def terms_of_squares(in_size: int, out_size: int) -> int:
    """Return how many additions of squares ``squares_of_products`` makes one after the other."""
    return 2 * TILE + -(-in_size // TILE) * -(-out_size // TILE)


def gram_of_rows_(out: Tensor, values: Tensor, part: int) -> None:
    """Write A_i A_iᵀ of each record of ``values`` (n, T, m) to ``out`` (n, T, T), contiguous.

    ``part`` columns, a multiple of ``GRAM_PART``, are summed at once.
    """
    torch.ops.affidavit.gram_of_rows_(out, values, part)


def bounds_of_grams(grams: Tensor, errors: Tensor) -> Tensor:
    """Return at least Σ_t ‖a_t‖ ‖b_t‖ and ‖Bᵀ A‖ of each record of k uses, as (2, k, n).

    ``grams`` has A Aᵀ and B Bᵀ of each, (2, k, n, T, T), and a row of ``errors`` (k, 10):

    * what is added to the norm of a row of A, and of B, for its underflow;
    * the errors of an entry of A Aᵀ, of one of B Bᵀ, and their product, over the norms of its rows;
    * the relative error of the sum of all products of their entries;
    * factors that cover the rounding of the error and of the norm, and what is added to the norm;
    * a factor that covers the rounding of Σ_t ‖a_t‖ ‖b_t‖.

    Both are infinite for a record with a row that is not finite, or longer than ``MAX_ROW_NORM``.
    """
    result: Tensor = torch.ops.affidavit.bounds_of_grams(grams, errors)
    return result


def _zero(values: Tensor, lost: Tensor) -> None:
    values.data.masked_fill_(lost.view(-1, 1, 1), 0.0)


def _halves(values: Tensor, weights: Tensor, lost: Tensor) -> Tensor:
    n, steps, width = values.shape
    values = values.masked_fill((lost | (weights == 0)).view(-1, 1, 1), 0.0)
    weights = weights.view(-1, 1, 1)
    halves = values.new_empty(n, steps, 2, width)
    high, low = halves.unbind(2)
    torch.mul(values, weights, out=high)
    torch.addcmul(high, values, weights, value=-1, out=low)
    return halves.flatten(2)


def _gram_of_rows(out: Tensor, values: Tensor, part: int) -> None:
    first, *rest = upcast(values).split(part, 2)
    torch.bmm(first, first.mT, out=out)
    for item in rest:
        out.baddbmm_(item, item.mT)


def _bounds(grams: Tensor, errors: Tensor) -> Tensor:
    columns = errors.unsqueeze(2).unbind(1)
    of_row, of_entry, both, of_sum = errors[:, :2], columns[2:4], columns[4], columns[5]
    of_error, of_norm, floor, of_reach = columns[6:]
    norms = grams.diagonal(dim1=-2, dim2=-1).sqrt() + of_row.mT[:, :, None, None]  # (2, k, n, T)
    reach = (norms[0] * norms[1]).sum(-1)
    others = norms.flip(0).flatten(0, 2)
    weighed = torch.bmm(grams.abs().flatten(0, 2), others.unsqueeze(2)).squeeze(2) * others
    # An error of B Bᵀ counts with the entries of A Aᵀ, and conversely.
    in_weighed, out_weighed = weighed.sum(1).view(2, *reach.shape)
    error = in_weighed * of_entry[1] + out_weighed * of_entry[0]
    error.addcmul_(reach.square(), both)
    products = grams[0] * grams[1]
    error.addcmul_(torch.linalg.vector_norm(products, 1, dim=(-2, -1)), of_sum)
    bounds = products.sum((-2, -1)).clamp_(min=0).addcmul_(error, of_error).sqrt_()
    bounds.mul_(of_norm).add_(floor)
    reach.mul_(of_reach)
    lost = (norms.amax((0, 3)) <= MAX_ROW_NORM).logical_not_()  # nan if any norm is
    return torch.stack([reach, torch.minimum(bounds, reach)]).masked_fill_(lost, torch.inf)


def _squares_of_products(
    inputs: Tensor, outputs: Tensor, part: int, in_least: float, out_least: float
) -> Tensor:
    def square(a: Tensor, b: Tensor) -> Tensor:
        parts = zip(a.split(part), b.split(part), strict=True)
        terms = [right.mT @ left for left, right in parts]
        return torch.stack(terms).sum(0).square().sum(0).sum(0)

    inputs, outputs = upcast(inputs), upcast(outputs)
    a = torch.linalg.vector_norm(inputs, dim=-1) + in_least
    b = torch.linalg.vector_norm(outputs, dim=-1) + out_least
    reach = (a * b).masked_fill_(~(torch.maximum(a, b) <= MAX_ROW_NORM), torch.inf).sum(1)
    return torch.stack(
        [reach, torch.stack([square(*of) for of in zip(inputs, outputs, strict=True)])]
    )


def _sums_of_products(
    inputs: Tensor, outputs: Tensor, weights: Tensor, lost: Tensor, parts: int
) -> Tensor:
    none = (lost | (weights == 0)).view(-1, 1, 1)
    a, b = (upcast(item).masked_fill(none, 0.0) for item in (inputs, outputs))
    b = b * weights.view(-1, 1, 1)
    size = -(-len(a) // parts)
    totals = a.new_zeros(parts, b.shape[2], a.shape[2])
    for total, left, right in zip(totals, b.split(size), a.split(size), strict=False):
        torch.mm(left.flatten(0, 1).mT, right.flatten(0, 1), out=total)
    return totals


def _squares_of_look_ups(values: Tensor, ids: Tensor, order: Tensor) -> Tensor:
    b = upcast(values)
    is_new = torch.cat([torch.zeros_like(ids[:, :1]), (ids[:, 1:] != ids[:, :-1]).long()], 1)
    places = is_new.cumsum(1).unsqueeze(2).expand_as(b)
    gathered = torch.gather(b, 1, order.unsqueeze(2).expand_as(b))
    sums = torch.zeros_like(b).scatter_add_(1, places, gathered)
    pieces = sums.square_().sum(1).split(LOOK_UP_COLUMNS, 1)
    return torch.stack([item.sum(1) for item in pieces], 1)


def _squares(rows: Tensor, part: int) -> Tensor:
    padded = functional.pad(upcast(rows), (0, -rows.shape[1] % part))
    return padded.unflatten(1, (-1, part // PART_COLUMNS, PART_COLUMNS)).square().sum(2).sum(2)


def _sum_clipped(
    rows: Tensor, squares: Tensor, clip_norm: float, factor: float, floor: float
) -> Tensor:
    weights = clip_weights(squares.sum(1).sqrt() * factor + floor, clip_norm)
    return torch.mv(upcast(rows).masked_fill((weights == 0).unsqueeze(1), 0.0).mT, weights)


def _layer_norm(
    x: Tensor, mean: Tensor, rstd: Tensor, gy: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    of_rows = mean.unsqueeze(2), rstd.unsqueeze(2)
    gradient, _, _ = torch.ops.aten.native_layer_norm_backward(
        gy, x, weight.shape, *of_rows, weight, None, [True, False, False]
    )
    # Sums over steps are products with a row, so that only gy ⊙ x is formed:
    # Σ_t rstd_t (gy_t ⊙ x_t) - Σ_t (rstd_t mean_t) gy_t.
    x, gy = upcast(x), upcast(gy)
    mean, rstd = mean.to(gy.dtype), rstd.to(gy.dtype)
    rows = rstd.new_ones(len(rstd), 2, rstd.shape[1])
    torch.mul(mean, rstd, out=rows[:, 1])
    sums = torch.bmm(rows, gy)
    of_weight = torch.baddbmm(sums[:, 1:], rstd.unsqueeze(1), gy * x, beta=-1)
    return gradient, torch.cat([sums[:, :1], of_weight], 1)


def _on_device(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel of this name, or ``operation`` where none runs: kernels have no float64."""

    def run(*values: Any) -> Any:
        if not has_triton() or values[0].dtype == torch.float64:
            return operation(*values)
        from affidavit.trainer.clipping import fused

        return getattr(fused, name)(*values)

    return run


_LIBRARY = torch.library.Library("affidavit", "DEF")
for _schema, _operation, _shape in (
    ("zero_records_(Tensor(a!) values, Tensor lost) -> ()", _zero, lambda *_: None),
    (
        "scale_in_halves(Tensor values, Tensor weights, Tensor lost) -> Tensor",
        _halves,
        lambda x, *_: x.new_empty(*x.shape[:2], 2 * x.shape[2]),
    ),
    (
        "gram_of_rows_(Tensor(a!) out, Tensor values, int part) -> ()",
        _gram_of_rows,
        lambda *_: None,
    ),
    (
        "bounds_of_grams(Tensor grams, Tensor errors) -> Tensor",
        _bounds,
        lambda x, *_: x.new_empty(x.shape[:3]),
    ),
    (
        "layer_norm_backward"
        "(Tensor x, Tensor mean, Tensor rstd, Tensor gy, Tensor weight) -> (Tensor, Tensor)",
        _layer_norm,
        lambda x, *_: (torch.empty_like(x), upcast(x).new_empty(len(x), 2, x.shape[2])),
    ),
    (
        "squares_of_products(Tensor inputs, Tensor outputs, int part, float in_least,"
        " float out_least) -> Tensor",
        _squares_of_products,
        lambda x, *_: upcast(x).new_empty(2, len(x)),
    ),
    (
        "sums_of_products(Tensor inputs, Tensor outputs, Tensor weights, Tensor lost, int parts)"
        " -> Tensor",
        _sums_of_products,
        lambda a, b, _, __, parts: upcast(a).new_empty(parts, b.shape[2], a.shape[2]),
    ),
    (
        "squares_of_look_ups(Tensor values, Tensor ids, Tensor order) -> Tensor",
        _squares_of_look_ups,
        lambda x, *_: upcast(x).new_empty(len(x), -(-x.shape[2] // LOOK_UP_COLUMNS)),
    ),
    (
        "squares_of_parts(Tensor rows, int part) -> Tensor",
        _squares,
        lambda x, part: upcast(x).new_empty(len(x), -(-x.shape[1] // part)),
    ),
    (
        "sum_clipped_by_squares"
        "(Tensor rows, Tensor squares, float clip_norm, float factor, float floor) -> Tensor",
        _sum_clipped,
        lambda x, squares, *_: squares.new_empty(x.shape[1]),
    ),
):
    _name = _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _operation, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _on_device(_name, _operation), "CUDA")
    torch.library.register_fake(f"affidavit::{_name}", _shape, lib=_LIBRARY)
