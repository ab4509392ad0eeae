"""Normal variates, and the sums by which they are tested, in one GPU kernel each.

The variates equal those of ``affidavit.trainer.noise.normal``, except for the last digits of the
device's logarithm, sine and cosine. A keystream from the CPU would have to be copied. Here, each
lane of a Triton program holds the state of a ChaCha20 block in registers, computes the three blocks
that sixteen pairs of variates take, and writes the variates: memory is touched once.

PyTorch for CUDA includes Triton. Without it, or on another device, this file is not used. The
kernel also runs on a CPU under ``TRITON_INTERPRET=1``, which the tests use.

References: RFC 8439, section 2.3; ``affidavit.trainer.noise.chacha``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from affidavit.trainer.noise.chacha import raw_words

LANES = 128
"""Blocks that one program takes from the first third of their groups."""


@triton.jit
def _quarter_round(a, b, c, d):  # type: ignore[no-untyped-def]
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _block_words(named, tensor, counter):  # type: ignore[no-untyped-def]
    """Compute the sixteen words of the blocks at ``counter`` of a tensor's stream.

    ``named`` has the eight words of the key and the two of the step.
    """
    zero = counter * 0
    s0, s1 = zero + 0x61707865, zero + 0x3320646E
    s2, s3 = zero + 0x79622D32, zero + 0x6B206574
    s4 = zero + tl.load(named + 0).to(tl.uint32, bitcast=True)
    s5 = zero + tl.load(named + 1).to(tl.uint32, bitcast=True)
    s6 = zero + tl.load(named + 2).to(tl.uint32, bitcast=True)
    s7 = zero + tl.load(named + 3).to(tl.uint32, bitcast=True)
    s8 = zero + tl.load(named + 4).to(tl.uint32, bitcast=True)
    s9 = zero + tl.load(named + 5).to(tl.uint32, bitcast=True)
    s10 = zero + tl.load(named + 6).to(tl.uint32, bitcast=True)
    s11 = zero + tl.load(named + 7).to(tl.uint32, bitcast=True)
    s13 = zero + tensor.to(tl.uint32)
    s14 = zero + tl.load(named + 8).to(tl.uint32, bitcast=True)
    s15 = zero + tl.load(named + 9).to(tl.uint32, bitcast=True)
    w0, w1, w2, w3, w4, w5, w6, w7 = s0, s1, s2, s3, s4, s5, s6, s7
    w8, w9, w10, w11, w12, w13, w14, w15 = s8, s9, s10, s11, counter, s13, s14, s15
    for _ in tl.static_range(10):
        w0, w4, w8, w12 = _quarter_round(w0, w4, w8, w12)
        w1, w5, w9, w13 = _quarter_round(w1, w5, w9, w13)
        w2, w6, w10, w14 = _quarter_round(w2, w6, w10, w14)
        w3, w7, w11, w15 = _quarter_round(w3, w7, w11, w15)
        w0, w5, w10, w15 = _quarter_round(w0, w5, w10, w15)
        w1, w6, w11, w12 = _quarter_round(w1, w6, w11, w12)
        w2, w7, w8, w13 = _quarter_round(w2, w7, w8, w13)
        w3, w4, w9, w14 = _quarter_round(w3, w4, w9, w14)
    return (
        w0 + s0, w1 + s1, w2 + s2, w3 + s3, w4 + s4, w5 + s5, w6 + s6, w7 + s7,
        w8 + s8, w9 + s9, w10 + s10, w11 + s11, w12 + counter, w13 + s13, w14 + s14, w15 + s15,
    )  # fmt: skip


@triton.jit
def _pair(high, low, turn):  # type: ignore[no-untyped-def]
    far = (high & 0x7FFFFFFF).to(tl.int32).to(tl.float32)
    near = (low & 0x7FFFFFFF).to(tl.int32).to(tl.float32)
    uniform = ((near + 0.5) * 4.656612873077393e-10 + far) * 4.656612873077393e-10
    radius = tl.sqrt(tl.log(uniform) * -2.0)
    angle = turn.to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-09
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _add_pairs(  # type: ignore[no-untyped-def]
    table, named, owners, adds: tl.constexpr, lanes: tl.constexpr, fields: tl.constexpr
):
    """Compute sixteen pairs from each of ``lanes`` blocks and its two partner blocks.

    A program takes blocks of one stream, whose number in the table ``owners`` has.
    """
    program = tl.program_id(0)
    row = table + tl.load(owners + program) * fields
    to = tl.load(row).to(tl.pointer_type(tl.float32))
    tensor, first, offset = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    count, before = tl.load(row + 4), tl.load(row + 6)
    scale = tl.load(row + 5).to(tl.int32).to(tl.float32, bitcast=True)
    place = (program - before) * lanes + tl.arange(0, lanes)
    group, within = place // 8, place % 8
    counter = (first + group * 24 + within).to(tl.uint32)
    high = _block_words(named, tensor, counter)
    low = _block_words(named, tensor, counter + 8)
    turn = _block_words(named, tensor, counter + 16)
    entry = group * 256 + within * 16 - offset
    for lane in tl.static_range(16):
        left, right = _pair(high[lane], low[lane], turn[lane])
        at, beyond = entry + lane, entry + 128 + lane
        inside, inside_too = (at >= 0) & (at < count), (beyond >= 0) & (beyond < count)
        if adds:
            left = tl.load(to + at, mask=inside, other=0.0) + scale * left
            right = tl.load(to + beyond, mask=inside_too, other=0.0) + scale * right
        tl.store(to + at, left, mask=inside)
        tl.store(to + beyond, right, mask=inside_too)


GROUP_SIZE = 256
"""Variates of a group, as ``affidavit.trainer.noise.normal`` has it."""

FIELDS = 7
"""Numbers of a stream in the table: memory, tensor, first block, skipped and taken variates, bits
of the scale, and programs before its own."""


@lru_cache(maxsize=64)
def _owners(programs: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the stream of each program, from the numbers of programs of the streams."""
    return torch.arange(len(programs)).repeat_interleave(torch.tensor(programs)).to(device)


def write_normals(
    totals: Sequence[Tensor],
    key: bytes,
    *,
    step: int,
    spans: Sequence[tuple[int, int, int]],
    scales: Sequence[float] | None = None,
) -> None:
    """Write the variates of ``spans`` to ``totals``, or add them times ``scales``, by one kernel.

    ``spans`` has the tensor, the first variate and the number of variates of each total, (number,)
    up to a view, which is contiguous and in float32. Raises ``ValueError`` like ``raw_words``.
    """
    device = totals[0].device
    rows, programs, before = [], [], 0
    for place, (total, (tensor, first, count)) in enumerate(zip(totals, spans, strict=True)):
        start = first // GROUP_SIZE
        groups = -(-(first + count) // GROUP_SIZE) - start if count else 0
        raw_words(key, step=step, tensor=tensor, count=0, block=24 * (start + groups))
        (bits,) = struct.unpack("<i", struct.pack("<f", 1.0 if scales is None else scales[place]))
        offset = first - GROUP_SIZE * start
        rows += [total.data_ptr(), tensor, 24 * start, offset, count, bits, before]
        programs.append(math.ceil(8 * groups / LANES))
        before += programs[-1]
    if not before:
        return
    named = struct.unpack("<5q", key + struct.pack("<Q", step))
    table = _to_device([*named, *rows], device)
    _add_pairs[(before,)](
        table[5:],
        table.view(torch.int32),
        _owners(tuple(programs), device),
        adds=scales is not None,
        lanes=LANES,
        fields=FIELDS,
    )


@triton.jit
def _add_pieces(  # type: ignore[no-untyped-def]
    table, owners, out, longest: tl.constexpr, block: tl.constexpr
):
    """Add up one piece, of at most ``longest`` entries, of a tensor that ``owners`` names."""
    program = tl.program_id(0)
    row = table + tl.load(owners + program) * 4
    source = tl.load(row).to(tl.pointer_type(tl.float32))
    count, length, before = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    first = (program - before) * length
    last = tl.minimum(first + length, count)
    total = tl.zeros((block,), tl.float64)
    for start in range(0, longest, block):
        at = first + start + tl.arange(0, block)
        total += tl.load(source + at, mask=at < last, other=0.0).to(tl.float64)
    tl.store(out + program, tl.sum(total))


PIECE_LANES = 256
"""Entries that a program adds at once."""


def piece_sums(tensors: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Return the sums of so many consecutive entries of each tensor, in float64, by one kernel.

    The last sum of a tensor may have fewer. Tensors are contiguous, in float32, and of any shape;
    the sums of one follow those of another, (sums,).
    """
    device, rows, programs, before = tensors[0].device, [], [], 0
    for item, length in zip(tensors, lengths, strict=True):
        rows += [item.data_ptr(), item.numel(), length, before]
        programs.append(-(-item.numel() // length))
        before += programs[-1]
    out = torch.empty(before, dtype=torch.float64, device=device)
    table = _to_device(rows, device)
    _add_pieces[(before,)](
        table, _owners(tuple(programs), device), out, longest=max(lengths), block=PIECE_LANES
    )
    return out


def _to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copy them without waiting for the device."""
    content = torch.tensor(numbers, dtype=torch.int64)
    return (content.pin_memory() if device.type == "cuda" else content).to(
        device, non_blocking=True
    )
