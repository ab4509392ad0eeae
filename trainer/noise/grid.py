"""Exact Gaussian noise on a grid: the noisy sum, rounded, without traces of floating point.

The release for an entry x of the clipped sum is (x + σ z) / g, rounded to a whole number, times
the grid's step g, a power of two between 2^-21 σ and 2^-20 σ. It is the rounding of the *real*
number x + σ z with exactly normal z. As a function of the Gaussian mechanism's release, it has the
same guarantee, without any loss (``docs/theorems/grid-noise.md``). Unlike a sum in floating point,
it reveals nothing about x in its low-order bits.

Each pair of variates is a function of two uniform numbers of unlimited length, by the transform of
Box and Muller. The first 64 bits of each number are evaluated in float64, with a bound of the
error. If the bound does not determine the rounding, which is rare, 256 more bits and ball
arithmetic do. The result is exact except with probability 2^-200 per entry, if ChaCha20 is random
and float64 logarithm, root, sine and cosine have relative errors below 2^-49.

References: I. Mironov, CCS 2012 (the attack); arXiv:2004.00010 (the alternative, a discrete law).
"""

from __future__ import annotations

import math

import torch
from flint import arb, ctx
from torch import Tensor

from affidavit.trainer.noise.chacha import WORDS_PER_BLOCK, derived_key, raw_words

GRID_BITS = 20
"""Bits of a standard deviation above the grid's step."""
MAX_PAIRS = 1 << 15
"""Pairs computed at once; a multiple of four, so that each chunk begins a block."""
ENTRIES_PER_BLOCK = WORDS_PER_BLOCK // 2
"""Entries whose first bits come from one block."""
FURTHER_BITS = 32 * WORDS_PER_BLOCK // 2
"""Further bits of a uniform number; a block has those of two numbers."""
PRECISION_BITS = 512
"""Bits of the ball arithmetic."""


def grid_step(scale: float) -> float:
    """Return the grid's step for noise of standard deviation ``scale``: a power of two.

    >>> grid_step(1.0) == 2.0**-20, grid_step(1.9) == 2.0**-20
    (True, True)
    """
    return math.ldexp(1.0, math.frexp(scale)[1] - 1 - GRID_BITS)


def add_grid_noise(
    sums: Tensor, key: bytes, *, step: int, tensor: int, scale: float, first: int = 0
) -> None:
    """Add noise of standard deviation ``scale`` to ``sums``, in place, and round to the grid.

    The noise is a function of key, step and tensor; ``sums`` are the tensor's entries from
    ``first`` on. Entries that are not finite stay. ``sums`` have any shape, in float32 or float64.
    """
    before = first % ENTRIES_PER_BLOCK
    flat = torch.cat([sums.new_zeros(before), sums.reshape(-1)])
    pairs = -(-len(flat) // 2)
    for begin in range(0, pairs, MAX_PAIRS):
        part = flat[2 * begin : 2 * (begin + MAX_PAIRS)]
        count = -(-len(part) // 2)
        pair = (first - before) // 2 + begin
        words = raw_words(
            key,
            step=step,
            tensor=tensor,
            count=4 * count,
            device=str(sums.device),
            block=4 * pair // WORDS_PER_BLOCK,
        )
        unsigned = (words.long() & 0xFFFFFFFF).view(count, 4)
        x = torch.zeros(2 * count, dtype=torch.float64, device=sums.device)
        x[: len(part)] = part
        steps, unsettled = _round_in_float64(x.view(count, 2), unsigned, scale)
        for place in unsettled.view(-1)[: len(part)].nonzero().flatten().tolist():
            row, side = divmod(place, 2)
            more = _further_bits(key, step, tensor, pair + row)
            steps[row, side] = _round_exactly(
                float(x[place]), unsigned[row].tolist(), more, side, scale
            )
        part.copy_(steps.view(-1)[: len(part)] * grid_step(scale))
    sums.copy_(flat[before:].view(sums.shape))


def _round_in_float64(x: Tensor, words: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return grid steps for ``x`` (n, 2) and ``words`` (n, 4), and where they are undetermined.

    The error bound is proved in ``docs/theorems/grid-noise.md``.
    """
    grid = grid_step(scale)
    high, low = words[:, ::2].double(), words[:, 1::2].double()
    uniform, turn = ((high + (low + 0.5) * 2.0**-32) * 2.0**-32).unbind(1)
    radius = (uniform.log() * -2).sqrt()
    error = (2.0**-51 + 2.0**-63 / uniform) / radius + radius * 2.0**-46
    angle = turn * (2 * math.pi)
    z = torch.stack((radius * angle.cos(), radius * angle.sin()), 1)
    exact = (x + scale * z) / grid
    slack = (scale / grid) * error[:, None] + (x.abs() + scale * z.abs()) * (2.0**-50 / grid)
    steps = (exact + 0.5).floor()
    settled = ((exact - steps).abs() < 0.5 - slack) & (words[:, :1] != 0)
    return steps, ~settled & x.isfinite()


def _further_bits(key: bytes, step: int, tensor: int, pair: int) -> tuple[int, int]:
    """Return the 256 bits that follow the first 64 bits of each of a pair's uniform numbers."""
    further_key = derived_key(key, "affidavit further bits of grid noise")
    count = WORDS_PER_BLOCK
    words = raw_words(further_key, step=step, tensor=tensor, count=count, block=pair).tolist()
    number = 0
    for word in words:
        number = number << 32 | word & 0xFFFFFFFF
    return number >> FURTHER_BITS, number & ((1 << FURTHER_BITS) - 1)


def _round_exactly(
    x: float, words: list[int], more: tuple[int, int], side: int, scale: float
) -> float:
    """Return the grid steps of one entry by ball arithmetic, with all bits."""
    before, ctx.prec = ctx.prec, PRECISION_BITS
    try:
        uniform, turn = (
            arb((words[2 * at] << 32 | words[2 * at + 1]) << FURTHER_BITS | more[at], 0.5)
            + arb(0.5)
            for at in (0, 1)
        )
        unit = arb(2) ** -(64 + FURTHER_BITS)
        radius = (uniform * unit).log() * -2
        angle = turn * unit * 2
        z = radius.sqrt() * (angle.sin_pi() if side else angle.cos_pi())
        exact = (arb(x) + arb(scale) * z) / arb(grid_step(scale)) + arb(0.5)
        steps = exact.floor().unique_fmpz()
        return math.floor(float(exact.mid())) if steps is None else float(int(steps))
    finally:
        ctx.prec = before
