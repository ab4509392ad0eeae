"""Gaussian noise without floating point's traces: the noisy sum, rounded to a grid, exactly.

What is released of an entry x of the clipped sum is (x + σ z) / g, rounded to a whole number, times
the grid's step g, a power of two between 2^-21 σ and 2^-20 σ. It is the rounding of the *real*
number x + σ z with z exactly normal, so that it is a function of what the Gaussian mechanism
releases, and has its guarantee without any loss (``docs/theorems/grid-noise.md``). Its low-order
bits say nothing of x, which those of a sum in floating point do.

Each pair of variates is a function of two uniform numbers of unlimited length, by the transform of
Box and Muller. The first 64 bits of each are computed with in float64, beside a bound of the error.
Where the bound does not settle the rounding, which is rare, 256 more bits and ball arithmetic do.
That is exact but for 2^-200 an entry, as far as ChaCha20 is random and logarithm, root, sine and
cosine of float64 err by less than 2^-49 of their value.

References: I. Mironov, CCS 2012 (the attack); arXiv:2004.00010 (the alternative, a discrete law).
"""

from __future__ import annotations

import math

import torch
from flint import arb, ctx
from torch import Tensor

from affidavit.trainer.noise.chacha import WORDS_PER_BLOCK, derived_key, raw_words

FINENESS = 20
"""Bits of a standard deviation above the grid's step."""
PAIRS = 1 << 15
"""Pairs made at a time; a multiple of four, so that each begins a block."""
BLOCK = WORDS_PER_BLOCK // 2
"""Entries whose first bits are those of one block."""
MORE_BITS = 32 * WORDS_PER_BLOCK // 2
"""Further bits of a uniform number, of which a block has those of two."""
PRECISION = 512
"""Bits of the ball arithmetic."""


def grid_of(scale: float) -> float:
    """The grid's step for noise of the standard deviation ``scale``: a power of two.

    >>> grid_of(1.0) == 2.0**-20, grid_of(1.9) == 2.0**-20
    (True, True)
    """
    return math.ldexp(1.0, math.frexp(scale)[1] - 1 - FINENESS)


def add_on_grid(
    sums: Tensor, key: bytes, *, step: int, tensor: int, scale: float, first: int = 0
) -> None:
    """Replace ``sums``, in place, by their sum with noise of deviation ``scale``, on the grid.

    The noise is a function of key, step and tensor, of which ``sums`` are the entries from
    ``first`` on. Entries that are no numbers stay so.
    ``sums`` have any shape, in float32 or float64.
    """
    before = first % BLOCK
    flat = torch.cat([sums.new_zeros(before), sums.reshape(-1)])
    pairs = -(-len(flat) // 2)
    for begin in range(0, pairs, PAIRS):
        part = flat[2 * begin : 2 * (begin + PAIRS)]
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
        steps, unsettled = _rounded(x.view(count, 2), unsigned, scale)
        for place in unsettled.view(-1)[: len(part)].nonzero().flatten().tolist():
            row, side = divmod(place, 2)
            more = _more_bits(key, step, tensor, pair + row)
            steps[row, side] = _settled(float(x[place]), unsigned[row].tolist(), more, side, scale)
        part.copy_(steps.view(-1)[: len(part)] * grid_of(scale))
    sums.copy_(flat[before:].view(sums.shape))


def _rounded(x: Tensor, words: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Steps of the grid for ``x`` (n, 2) and ``words`` (n, 4), and where they are not settled.

    The bound of the error is proved in ``docs/theorems/grid-noise.md``.
    """
    grid = grid_of(scale)
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


def _more_bits(key: bytes, step: int, tensor: int, pair: int) -> tuple[int, int]:
    """The 256 bits that follow the first 64 of each of a pair's two uniform numbers."""
    own = derived_key(key, "affidavit further bits of grid noise")
    count = WORDS_PER_BLOCK
    words = raw_words(own, step=step, tensor=tensor, count=count, block=pair).tolist()
    number = 0
    for word in words:
        number = number << 32 | word & 0xFFFFFFFF
    return number >> MORE_BITS, number & ((1 << MORE_BITS) - 1)


def _settled(x: float, words: list[int], more: tuple[int, int], side: int, scale: float) -> float:
    """The same for one entry in ball arithmetic, with all bits."""
    before, ctx.prec = ctx.prec, PRECISION
    try:
        uniform, turn = (
            arb((words[2 * at] << 32 | words[2 * at + 1]) << MORE_BITS | more[at], 0.5) + arb(0.5)
            for at in (0, 1)
        )
        unit = arb(2) ** -(64 + MORE_BITS)
        radius = (uniform * unit).log() * -2
        angle = turn * unit * 2
        z = radius.sqrt() * (angle.sin_pi() if side else angle.cos_pi())
        exact = (arb(x) + arb(scale) * z) / arb(grid_of(scale)) + arb(0.5)
        whole = exact.floor().unique_fmpz()
        return math.floor(float(exact.mid())) if whole is None else float(int(whole))
    finally:
        ctx.prec = before
