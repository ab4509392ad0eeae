"""Normal variates in one GPU kernel.

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

import torch
import triton
import triton.language as tl
from torch import Tensor

from affidavit.trainer.noise.chacha import build_nonce, raw_words

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
def _block_words(named, counter):  # type: ignore[no-untyped-def]
    """Compute the sixteen words of the blocks at ``counter``."""
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
    s13 = zero + tl.load(named + 8).to(tl.uint32, bitcast=True)
    s14 = zero + tl.load(named + 9).to(tl.uint32, bitcast=True)
    s15 = zero + tl.load(named + 10).to(tl.uint32, bitcast=True)
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
def _pairs(out, named, thirds, first, lanes: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute sixteen pairs from each of ``thirds`` blocks and its two partner blocks."""
    place = tl.program_id(0) * lanes + tl.arange(0, lanes)
    inside = place < thirds
    group, within = place // 8, place % 8
    counter = (first + group * 24 + within).to(tl.uint32)
    high, low = _block_words(named, counter), _block_words(named, counter + 8)
    turn = _block_words(named, counter + 16)
    to = out + group.to(tl.int64) * 256 + within * 16
    for lane in tl.static_range(16):
        far = (high[lane] & 0x7FFFFFFF).to(tl.int32).to(tl.float32)
        near = (low[lane] & 0x7FFFFFFF).to(tl.int32).to(tl.float32)
        uniform = ((near + 0.5) * 4.656612873077393e-10 + far) * 4.656612873077393e-10
        radius = tl.sqrt(tl.log(uniform) * -2.0)
        angle = turn[lane].to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-09
        tl.store(to + lane, radius * tl.cos(angle), mask=inside)
        tl.store(to + 128 + lane, radius * tl.sin(angle), mask=inside)


def fill_normal(out: Tensor, key: bytes, *, step: int, tensor: int, first_group: int = 0) -> None:
    """Fill ``out`` (groups, 2, 128), float32 and contiguous, with the stream's variates.

    ``first_group`` is the group of the stream with which ``out`` begins. Raises ``ValueError`` like
    ``raw_words``.
    """
    groups = len(out)
    raw_words(key, step=step, tensor=tensor, count=0, block=24 * (first_group + groups))
    if groups == 0:
        return
    words = struct.unpack("<11i", key + build_nonce(step, tensor))
    named = torch.tensor(words, dtype=torch.int32, device=out.device)
    thirds = 8 * groups
    _pairs[(math.ceil(thirds / LANES),)](out, named, thirds, 24 * first_group, lanes=LANES)
