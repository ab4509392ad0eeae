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

from affidavit.trainer.clipping.kernel_sizes import (
    GRAM_PART,
    GRAM_TILE,
    LOOK_UP_COLUMNS,
    PART_COLUMNS,
    PART_STEPS,
    PARTS,
    PIECE,
    STEPS_AT_ONCE,
    TILE,
)
from affidavit.trainer.norm_bounds import MAX_ROW_NORM, MIN_WEIGHT

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
def _gram_of_rows(  # type: ignore[no-untyped-def]
    out,
    values,
    of_records,
    of_steps,
    of_columns,
    steps,
    width,
    part,
    tile: tl.constexpr,
    at_once: tl.constexpr,
    is_whole: tl.constexpr,
):
    place, record = tl.program_id(0), tl.program_id(1).to(tl.int64)
    across = tl.cdiv(steps, tile)
    top = place // across * tile + tl.arange(0, tile)
    left = place % across * tile + tl.arange(0, tile)
    values += record * of_records
    total = tl.zeros((tile, tile), dtype=tl.float32)
    for first in range(0, width, part):
        of_part = tl.zeros((tile, tile), dtype=tl.float32)
        for begin in range(first, first + part, at_once):
            column = begin + tl.arange(0, at_once)
            at = top[:, None] * of_steps + column[None, :] * of_columns
            inside = (top < steps)[:, None] & (column < width)[None, :]
            rows = tl.load(values + at, mask=inside, other=0.0)
            if is_whole:
                others = tl.trans(rows)
            else:
                at = left[None, :] * of_steps + column[:, None] * of_columns
                inside = (left < steps)[None, :] & (column < width)[:, None]
                others = tl.load(values + at, mask=inside, other=0.0)
            of_part = tl.dot(rows, others, of_part, input_precision="ieee")
        total += of_part
    entry = (record * steps + top[:, None]) * steps + left[None, :]
    tl.store(out + entry, total, mask=(top < steps)[:, None] & (left < steps)[None, :])


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
def _layer_norm_backward(  # type: ignore[no-untyped-def]
    gx,
    sums,
    x,
    mean,
    rstd,
    gy,
    weight,
    steps,
    width,
    pieces,
    piece: tl.constexpr,
    at_once: tl.constexpr,
    columns: tl.constexpr,
):
    first, record = tl.program_id(0) * piece, tl.program_id(1).to(tl.int64)
    place = tl.arange(0, columns)
    scales = tl.load(weight + place, mask=place < width, other=0.0).to(tl.float32)
    of_bias = tl.zeros((columns,), dtype=tl.float32)
    of_weight = tl.zeros((columns,), dtype=tl.float32)
    for begin in range(first, first + piece, at_once):
        step = begin + tl.arange(0, at_once)
        row = record * steps + step
        centre = tl.load(mean + row, mask=step < steps, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=step < steps, other=0.0).to(tl.float32)
        inside = (step < steps)[:, None] & (place < width)[None, :]
        at = row[:, None] * width + place[None, :]
        entry = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gy + at, mask=inside, other=0.0).to(tl.float32)
        normal = tl.where(inside, (entry - centre[:, None]) * scale[:, None], 0.0)
        weighed = gradient * scales[None, :]
        along = tl.sum(weighed * normal, axis=1) / width
        level = tl.sum(weighed, axis=1) / width
        result = (weighed - normal * along[:, None] - level[:, None]) * scale[:, None]
        tl.store(gx + at, result.to(gx.dtype.element_ty), mask=inside)
        of_bias += tl.sum(gradient, axis=0)
        of_weight += tl.sum(gradient * normal, axis=0)
    to = sums + (record * pieces + tl.program_id(0)) * 2 * width + place
    tl.store(to, of_bias, mask=place < width)
    tl.store(to + width, of_weight, mask=place < width)


@triton.jit
def _squares_of_products(  # type: ignore[no-untyped-def]
    out,
    a_squares,
    b_squares,
    a,
    b,
    a_records,
    a_steps,
    a_columns,
    b_records,
    b_steps,
    b_columns,
    steps,
    in_size,
    out_size,
    part,
    tiles,
    tile: tl.constexpr,
    at_once: tl.constexpr,
):
    place, record = tl.program_id(0), tl.program_id(1).to(tl.int64)
    across, down = tl.cdiv(in_size, tile), tl.cdiv(out_size, tile)
    of_row, of_column = place // across, place % across
    row = of_row * tile + tl.arange(0, tile)
    column = of_column * tile + tl.arange(0, tile)
    a += record * a_records
    b += record * b_records
    a_squares += (record * across + of_column) * steps
    b_squares += (record * down + of_row) * steps
    total = tl.zeros((tile, tile), dtype=tl.float32)
    for first in range(0, steps, part):
        of_part = tl.zeros((tile, tile), dtype=tl.float32)
        for begin in range(first, first + part, at_once):
            step = begin + tl.arange(0, at_once)
            of_b = row[:, None] * b_columns + step[None, :] * b_steps
            of_a = step[:, None] * a_steps + column[None, :] * a_columns
            inside = step < steps
            b_inside = (row < out_size)[:, None] & inside[None, :]
            a_inside = inside[:, None] & (column < in_size)[None, :]
            left = tl.load(b + of_b, mask=b_inside, other=0.0)
            right = tl.load(a + of_a, mask=a_inside, other=0.0)
            of_part = tl.dot(left, right, of_part, input_precision="ieee")
            if of_row == 0:
                of_a_row = right.to(tl.float32) * right.to(tl.float32)
                tl.store(a_squares + step, tl.sum(of_a_row, axis=1), mask=inside)
            if of_column == 0:
                of_b_row = left.to(tl.float32) * left.to(tl.float32)
                tl.store(b_squares + step, tl.sum(of_b_row, axis=0), mask=inside)
        total += of_part
    square = tl.sum(tl.sum(total * total, axis=1), axis=0)
    tl.store(out + record * tiles + place, square)


@triton.jit
def _add_up_products(  # type: ignore[no-untyped-def]
    out,
    squares,
    a_squares,
    b_squares,
    records,
    steps,
    across,
    down,
    a_least,
    b_least,
    most,
    columns: tl.constexpr,
):
    record = tl.program_id(0).to(tl.int64)
    reach = tl.zeros((columns,), dtype=tl.float32)
    lost = tl.zeros((columns,), dtype=tl.int32)
    for first in range(0, steps, columns):
        step = first + tl.arange(0, columns)
        inside = step < steps
        left = tl.zeros((columns,), dtype=tl.float32)
        right = tl.zeros((columns,), dtype=tl.float32)
        for part in range(0, across):
            left += tl.load(
                a_squares + (record * across + part) * steps + step, mask=inside, other=0.0
            )
        for part in range(0, down):
            right += tl.load(
                b_squares + (record * down + part) * steps + step, mask=inside, other=0.0
            )
        left, right = tl.sqrt_rn(left) + a_least, tl.sqrt_rn(right) + b_least
        reach += tl.where(inside, left * right, 0.0)
        lost += (((left <= most) & (right <= most)) == 0).to(tl.int32)  # nan is not at most
    total = tl.zeros((columns,), dtype=tl.float32)
    for first in range(0, across * down, columns):
        place = first + tl.arange(0, columns)
        of_record = squares + record * across * down + place
        total += tl.load(of_record, mask=place < across * down, other=0.0)
    is_lost = tl.sum(lost, axis=0) > 0
    tl.store(out + record, tl.where(is_lost, float("inf"), tl.sum(reach, axis=0)))
    tl.store(out + records + record, tl.sum(total, axis=0))


@triton.jit
def _sums_of_products(  # type: ignore[no-untyped-def]
    out,
    a,
    b,
    weights,
    lost,
    a_records,
    a_steps,
    a_columns,
    b_records,
    b_steps,
    b_columns,
    records,
    of_part,
    steps,
    in_size,
    out_size,
    tile: tl.constexpr,
    at_once: tl.constexpr,
):
    place, part = tl.program_id(0), tl.program_id(1)
    across, pieces = tl.cdiv(in_size, tile), tl.cdiv(steps, at_once)
    row = place // across * tile + tl.arange(0, tile)
    column = place % across * tile + tl.arange(0, tile)
    end = tl.minimum((part + 1) * of_part, records)
    total = tl.zeros((tile, tile), dtype=tl.float32)
    for piece in range(part * of_part * pieces, end * pieces):
        record = (piece // pieces).to(tl.int64)
        step = piece % pieces * at_once + tl.arange(0, at_once)
        weight = tl.where(tl.load(lost + record) != 0, 0.0, tl.load(weights + record))
        inside = step < steps
        of_b = record * b_records + row[:, None] * b_columns + step[None, :] * b_steps
        of_a = record * a_records + step[:, None] * a_steps + column[None, :] * a_columns
        b_inside = (row < out_size)[:, None] & inside[None, :]
        a_inside = inside[:, None] & (column < in_size)[None, :]
        left = tl.load(b + of_b, mask=b_inside, other=0.0)
        right = tl.load(a + of_a, mask=a_inside, other=0.0)
        product = tl.dot(left, right, input_precision="ieee")
        total += tl.where(weight != 0.0, product * weight, 0.0)  # 0 nan is nan
    entry = (part.to(tl.int64) * out_size + row[:, None]) * in_size + column[None, :]
    tl.store(out + entry, total, mask=(row < out_size)[:, None] & (column < in_size)[None, :])


@triton.jit
def _squares_of_look_ups(  # type: ignore[no-untyped-def]
    out, values, ids, order, steps, width, columns: tl.constexpr
):
    record, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = piece * columns + tl.arange(0, columns)
    total = tl.zeros((columns,), dtype=tl.float32)
    of_id = tl.zeros((columns,), dtype=tl.float32)
    before = tl.load(ids + record * steps)
    for step in range(0, steps):
        now = tl.load(ids + record * steps + step)
        row = record * steps + tl.load(order + record * steps + step)
        value = tl.load(values + row * width + place, mask=place < width, other=0.0)
        total += tl.where(now == before, 0.0, of_id * of_id)
        of_id = tl.where(now == before, of_id, 0.0) + value.to(tl.float32)
        before = now
    total += of_id * of_id
    tl.store(out + record * tl.num_programs(1) + piece, tl.sum(total, axis=0))


@triton.jit
def _squares_of_parts(  # type: ignore[no-untyped-def]
    out, rows, entries, part, parts, columns: tl.constexpr
):
    record, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = tl.zeros((columns,), dtype=tl.float32)
    for step in range(0, part, columns):
        column = place * part + step + tl.arange(0, columns)
        value = tl.load(rows + record * entries + column, mask=column < entries, other=0.0)
        total += value.to(tl.float32) * value.to(tl.float32)
    tl.store(out + record * parts + place, tl.sum(total, axis=0))


@triton.jit
def _sum_clipped_by_squares(  # type: ignore[no-untyped-def]
    out,
    rows,
    squares,
    records,
    entries,
    parts,
    most,
    factor,
    floor,
    least,
    columns: tl.constexpr,
    at_once: tl.constexpr,
):
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    part = tl.arange(0, at_once)
    total = tl.zeros((columns,), dtype=tl.float32)
    for record in range(records):
        of_parts = tl.load(squares + record * parts + part, mask=part < parts, other=0.0)
        norm = tl.sqrt_rn(tl.sum(of_parts, axis=0)) * factor + floor
        weight = tl.div_rn(most, norm)
        place = tl.where(weight >= least, column, entries)  # nan is not
        at = rows + tl.cast(record, tl.int64) * entries + place
        value = tl.load(at, mask=place < entries, other=0.0).to(tl.float32)
        total += value * tl.where(weight < 1.0, weight, 1.0)
    tl.store(out + column, total, mask=column < entries)


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


def gram_of_rows_(out: Tensor, values: Tensor, part: int) -> None:
    """Write A_i A_iᵀ of each record of ``values`` (n, T, m) to ``out`` (n, T, T), contiguous.

    ``part`` columns, a multiple of ``GRAM_PART``, are summed at once.
    """
    records, steps, width = values.shape
    tile = min(GRAM_TILE, max(16, triton.next_power_of_2(steps)))
    across = triton.cdiv(steps, tile)
    _gram_of_rows[(across * across, records)](
        out,
        values,
        *values.stride(),
        steps,
        width,
        part,
        tile=tile,
        at_once=GRAM_PART,
        is_whole=across == 1,
        num_warps=8 if tile == GRAM_TILE else 4,
    )


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


def layer_norm_backward(
    x: Tensor, mean: Tensor, rstd: Tensor, gy: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x (n, T, m), and sums over steps of gy and gy ⊙ z, as (n, 2, m)."""
    x, gy = x.contiguous(), gy.contiguous()
    n, steps, width = x.shape
    columns = triton.next_power_of_2(width)
    pieces = triton.cdiv(steps, PIECE)
    gradient = torch.empty_like(x)
    sums = torch.empty(n, pieces, 2, width, dtype=torch.float32, device=x.device)
    _layer_norm_backward[(pieces, n)](
        gradient,
        sums,
        x,
        mean.contiguous(),
        rstd.contiguous(),
        gy,
        weight.contiguous(),
        steps,
        width,
        pieces,
        piece=PIECE,
        at_once=min(PIECE, max(1, 4096 // columns)),
        columns=columns,
    )
    return gradient, sums.squeeze(1) if pieces == 1 else sums.sum(1)


def squares_of_parts(rows: Tensor, part: int) -> Tensor:
    """Return the sums of squares of each ``part`` entries of each row of ``rows`` (n, m); (n, k).

    ``part`` is a multiple of ``PART_COLUMNS``.
    """
    rows = rows.contiguous()
    records, entries = rows.shape
    parts = triton.cdiv(entries, part)
    out = torch.empty(records, parts, dtype=torch.float32, device=rows.device)
    grid = (records, parts)
    _squares_of_parts[grid](out, rows, entries, part, parts, columns=PART_COLUMNS)
    return out


def sum_clipped_by_squares(
    rows: Tensor, squares: Tensor, clip_norm: float, factor: float, floor: float
) -> Tensor:
    """Return the sum of ``rows`` (n, m), each clipped by the norm that ``squares`` (n, k) give."""
    rows = rows.contiguous()
    records, entries = rows.shape
    out = torch.empty(entries, dtype=torch.float32, device=rows.device)
    _sum_clipped_by_squares[(triton.cdiv(entries, ROW_COLUMNS),)](
        out,
        rows,
        squares.contiguous(),
        records,
        entries,
        squares.shape[1],
        clip_norm * (1 - 4 * torch.finfo(torch.float32).eps),
        factor,
        floor,
        MIN_WEIGHT,
        columns=ROW_COLUMNS,
        at_once=PARTS,
    )
    return out


def squares_of_products(
    inputs: Tensor, outputs: Tensor, part: int, in_least: float, out_least: float
) -> Tensor:
    """Return Σ_t (‖a_t‖ + c) (‖b_t‖ + d) and ‖B_iᵀ A_i‖² of each record, as (2, n).

    A has shape (n, T, in) and B (n, T, out). ``in_least`` and ``out_least`` are c and d.
    """
    records, steps, in_size = inputs.shape
    out_size = outputs.shape[2]
    across, down = triton.cdiv(in_size, TILE), triton.cdiv(out_size, TILE)
    squares, of_inputs, of_outputs, out = (
        torch.empty(*shape, dtype=torch.float32, device=inputs.device)
        for shape in (
            (records, across * down),
            (records, across, steps),
            (records, down, steps),
            (2, records),
        )
    )
    _squares_of_products[(across * down, records)](
        squares,
        of_inputs,
        of_outputs,
        inputs,
        outputs,
        *inputs.stride(),
        *outputs.stride(),
        steps,
        in_size,
        out_size,
        part,
        across * down,
        tile=TILE,
        at_once=PART_STEPS,
        num_warps=8,
    )
    _add_up_products[(records,)](
        out,
        squares,
        of_inputs,
        of_outputs,
        records,
        steps,
        across,
        down,
        in_least,
        out_least,
        MAX_ROW_NORM,
        columns=ROW_COLUMNS,
    )
    return out


def sums_of_products(
    inputs: Tensor, outputs: Tensor, weights: Tensor, lost: Tensor, parts: int
) -> Tensor:
    """Return Σ_i w_i B_iᵀ A_i over each of ``parts`` parts of the records, as (parts, out, in).

    A has shape (n, T, in) and B (n, T, out); a ``lost`` record, (n,), adds nothing.
    """
    records, steps, in_size = inputs.shape
    out_size = outputs.shape[2]
    out = torch.empty(parts, out_size, in_size, dtype=torch.float32, device=inputs.device)
    tiles = triton.cdiv(in_size, TILE) * triton.cdiv(out_size, TILE)
    _sums_of_products[(tiles, parts)](
        out,
        inputs,
        outputs,
        weights.contiguous(),
        lost.view(torch.uint8),
        *inputs.stride(),
        *outputs.stride(),
        records,
        triton.cdiv(records, parts),
        steps,
        in_size,
        out_size,
        tile=TILE,
        at_once=min(STEPS_AT_ONCE, max(16, triton.next_power_of_2(steps))),
        num_warps=8,
    )
    return out


def squares_of_look_ups(values: Tensor, ids: Tensor, order: Tensor) -> Tensor:
    """Return the squares of sums of rows of ``values`` (n, T, m) with one id, as (n, k).

    ``ids`` (n, T) are sorted, and ``order`` has the places of the rows.
    """
    values = values.contiguous()
    records, steps, width = values.shape
    pieces = triton.cdiv(width, LOOK_UP_COLUMNS)
    out = torch.empty(records, pieces, dtype=torch.float32, device=values.device)
    _squares_of_look_ups[(records, pieces)](
        out, values, ids, order, steps, width, columns=LOOK_UP_COLUMNS
    )
    return out
