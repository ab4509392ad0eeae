"""GPU kernels of per-record clipping, each of which touches its tensors once.

They compute what ``affidavit.trainer.clipping.device_operations`` computes by PyTorch's operations,
which read and write their tensors several times. PyTorch for CUDA includes Triton. Without it, or
on another device, this file is not used. The kernels also run on a CPU under
``TRITON_INTERPRET=1``, which the tests use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from affidavit.trainer.norm_bounds import MAX_ROW_NORM

COLUMNS, STEPS = 128, 16
"""Columns that a program takes, and steps that it takes at once."""
GRAM_ROWS, GRAM_COLUMNS = 16, 64
"""Rows and columns of two Gram matrices that a program takes at once."""
ROW_COLUMNS = 1024
"""Columns that a program takes of one row."""


@triton.jit
def _zero_records(values, lost, entries, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    record = tl.program_id(0).to(tl.int64)
    if tl.load(lost + record) != 0:
        for first in range(0, entries, columns):
            place = first + tl.arange(0, columns)
            zeros = tl.zeros((columns,), dtype=values.dtype.element_ty)
            tl.store(values + record * entries + place, zeros, mask=place < entries)


@triton.jit
def _scale_in_halves(  # type: ignore[no-untyped-def]
    out, values, weights, lost, steps, width, columns: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = place < width
    record = row // steps
    weight = tl.load(weights + record)
    is_lost = (tl.load(lost + record) != 0) | (weight == 0.0)
    value = tl.load(values + row * width + place, mask=inside, other=0.0).to(tl.float32)
    scaled = tl.where(is_lost, 0.0, value * weight)
    high = scaled.to(tl.bfloat16)
    low = (high.to(tl.float32) - scaled).to(tl.bfloat16)
    tl.store(out + row * 2 * width + place, high, mask=inside)
    tl.store(out + row * 2 * width + width + place, low, mask=inside)


@triton.jit
def _bounds_of_grams(  # type: ignore[no-untyped-def]
    out, grams, errors, records, steps, most, rows: tl.constexpr, columns: tl.constexpr
):
    use, record = tl.program_id(0), tl.program_id(1)
    uses = tl.num_programs(0)
    errors += use * 10
    at = (use * records + record).to(tl.int64)
    of_inputs = grams + at * steps * steps
    of_outputs = of_inputs + (uses * records).to(tl.int64) * steps * steps
    in_least, out_least = tl.load(errors), tl.load(errors + 1)
    reach = tl.zeros((rows,), dtype=tl.float32)
    in_weighed = tl.zeros((rows, columns), dtype=tl.float32)
    out_weighed = tl.zeros((rows, columns), dtype=tl.float32)
    sizes = tl.zeros((rows, columns), dtype=tl.float32)
    total = tl.zeros((rows, columns), dtype=tl.float32)
    lost = tl.zeros((rows,), dtype=tl.int32)
    for top in range(0, steps, rows):
        row = top + tl.arange(0, rows)
        is_row = row < steps
        a = tl.sqrt(tl.load(of_inputs + row * (steps + 1), mask=is_row, other=0.0)) + in_least
        b = tl.sqrt(tl.load(of_outputs + row * (steps + 1), mask=is_row, other=0.0)) + out_least
        a, b = tl.where(is_row, a, 0.0), tl.where(is_row, b, 0.0)
        reach += a * b
        lost += (((a <= most) & (b <= most)) == 0).to(tl.int32)  # nan is not at most
        for left in range(0, steps, columns):
            column = left + tl.arange(0, columns)
            is_column = column < steps
            c = tl.load(of_inputs + column * (steps + 1), mask=is_column, other=0.0)
            d = tl.load(of_outputs + column * (steps + 1), mask=is_column, other=0.0)
            c = tl.where(is_column, tl.sqrt(c) + in_least, 0.0)
            d = tl.where(is_column, tl.sqrt(d) + out_least, 0.0)
            inside = is_row[:, None] & is_column[None, :]
            entry = row[:, None] * steps + column[None, :]
            of_input = tl.load(of_inputs + entry, mask=inside, other=0.0)
            of_output = tl.load(of_outputs + entry, mask=inside, other=0.0)
            in_weighed += tl.abs(of_input) * b[:, None] * d[None, :]
            out_weighed += tl.abs(of_output) * a[:, None] * c[None, :]
            total += of_input * of_output
            sizes += tl.abs(of_input * of_output)
    all_reach = tl.sum(reach, axis=0)
    error = tl.sum(tl.sum(in_weighed, axis=1), axis=0) * tl.load(errors + 3)
    error += tl.sum(tl.sum(out_weighed, axis=1), axis=0) * tl.load(errors + 2)
    error += all_reach * all_reach * tl.load(errors + 4)
    error += tl.sum(tl.sum(sizes, axis=1), axis=0) * tl.load(errors + 5)
    square = tl.sum(tl.sum(total, axis=1), axis=0)
    square = tl.where(square > 0.0, square, 0.0) + error * tl.load(errors + 6)
    bound = tl.sqrt(square) * tl.load(errors + 7) + tl.load(errors + 8)
    all_reach *= tl.load(errors + 9)
    bound = tl.where(bound < all_reach, bound, all_reach)
    is_lost = tl.sum(lost, axis=0) > 0
    tl.store(out + at, tl.where(is_lost, float("inf"), all_reach))
    tl.store(out + uses * records + at, tl.where(is_lost, float("inf"), bound))


@triton.jit
def _sums_of_normalized(  # type: ignore[no-untyped-def]
    out, x, mean, rstd, gy, steps, width, at_once: tl.constexpr, columns: tl.constexpr
):
    record = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * columns + tl.arange(0, columns)
    of_bias = tl.zeros((at_once, columns), dtype=tl.float32)
    of_weight = tl.zeros((at_once, columns), dtype=tl.float32)
    for first in range(0, steps, at_once):
        step = first + tl.arange(0, at_once)
        row = record * steps + step
        centre = tl.load(mean + row, mask=step < steps, other=0.0)
        scale = tl.load(rstd + row, mask=step < steps, other=0.0)
        inside = (step < steps)[:, None] & (place < width)[None, :]
        at = row[:, None] * width + place[None, :]
        entry = tl.load(x + at, mask=inside, other=0.0)
        gradient = tl.load(gy + at, mask=inside, other=0.0)
        of_bias += gradient
        of_weight += gradient * ((entry - centre[:, None]) * scale[:, None])
    to = out + record * 2 * width + place
    tl.store(to, tl.sum(of_bias, axis=0), mask=place < width)
    tl.store(to + width, tl.sum(of_weight, axis=0), mask=place < width)


def zero_records_(values: Tensor, lost: Tensor) -> None:
    """Write zeros to each ``lost`` record of ``values`` (n, ...), whose entries lie together."""
    entries = values.numel() // len(values)
    _zero_records[(len(values),)](values, lost.view(torch.uint8), entries, columns=ROW_COLUMNS)


def scale_in_halves(values: Tensor, weights: Tensor, lost: Tensor) -> Tensor:
    """Return w_i times record i of ``values`` (n, T, m) in bfloat16, as two halves (n, T, 2m)."""
    values = values.contiguous()
    n, steps, width = values.shape
    out = values.new_empty(n, steps, 2 * width)
    grid = (n * steps, triton.cdiv(width, ROW_COLUMNS))
    _scale_in_halves[grid](
        out,
        values,
        weights.contiguous(),
        lost.view(torch.uint8),
        steps,
        width,
        columns=ROW_COLUMNS,
    )
    return out


def bounds_of_grams(grams: Tensor, errors: Tensor) -> Tensor:
    """Return at least Σ_t ‖a_t‖ ‖b_t‖ and ‖Bᵀ A‖ of each record of k uses, as (2, k, n)."""
    _, uses, records, steps, _ = grams.shape
    out = grams.new_empty(2, uses, records)
    _bounds_of_grams[(uses, records)](
        out,
        grams.contiguous(),
        errors.contiguous(),
        records,
        steps,
        MAX_ROW_NORM,
        rows=GRAM_ROWS,
        columns=GRAM_COLUMNS,
    )
    return out


def sums_of_normalized(x: Tensor, mean: Tensor, rstd: Tensor, gy: Tensor) -> Tensor:
    """Return sums over steps of gy and of gy times the normalised x (n, T, m), as (n, 2, m)."""
    x, gy = x.contiguous(), gy.contiguous()
    n, steps, width = x.shape
    out = torch.empty(n, 2, width, dtype=torch.float32, device=x.device)
    grid = (n, triton.cdiv(width, COLUMNS))
    _sums_of_normalized[grid](
        out,
        x,
        mean.contiguous(),
        rstd.contiguous(),
        gy,
        steps,
        width,
        at_once=STEPS,
        columns=COLUMNS,
    )
    return out
