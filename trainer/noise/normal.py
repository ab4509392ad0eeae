"""Standard normal variates from keystream words, by the transform of Box and Muller.

Each pair of variates takes three words: 62 bits for the radius, so that its tail reaches
9.3 standard deviations (with 31 bits it would end at 6.6, which 10¹⁰ variates would show),
and 32 bits for the angle. Arithmetic and result are float32. Variates come in groups whose
layout does not depend on the size of a chunk, so that one stream gives the same
variates everywhere, up to the last digits of a device's logarithm and cosine. On a CUDA
device with Triton, one kernel computes them (``affidavit.trainer.noise.fused``).

>>> matrix = standard_normal(bytes(32), step=0, tensor=0, shape=(2, 3))
>>> bool((matrix.flatten() == standard_normal(bytes(32), step=0, tensor=0, shape=(6,))).all())
True

Reference: G. E. P. Box and M. E. Muller, Ann. Math. Stat. 29 (1958) 610.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from affidavit.trainer.noise.chacha import WORDS_PER_BLOCK, raw_words

PAIRS_PER_GROUP = 128
"""Three times as many words are whole blocks."""

GROUP_SIZE = 2 * PAIRS_PER_GROUP
"""Variates of a group."""

CHUNK_GROUPS = 1 << 9
"""Groups computed at once: as many as fit a processor's cache."""


def standard_normal(
    key: bytes, *, step: int, tensor: int, shape: Sequence[int], device: str = "cpu", first: int = 0
) -> Tensor:
    """Return independent N(0, 1) variates in float32, a function of the stream's name alone.

    They are the stream's variates from ``first`` on. Raises ``ValueError`` like
    ``raw_words``; a stream has 2.3e10 pairs.
    """
    count = math.prod(shape)
    start, stop = first // GROUP_SIZE, -(-(first + count) // GROUP_SIZE)
    groups = stop - start if count else 0
    out = torch.empty(groups, 2, PAIRS_PER_GROUP, dtype=torch.float32, device=device)
    if out.is_cuda and has_triton():
        from affidavit.trainer.noise.fused import fill_normal

        fill_normal(out, key, step=step, tensor=tensor, first_group=start)
    else:
        for begin in range(0, groups, CHUNK_GROUPS):
            chunk = out[begin : begin + CHUNK_GROUPS]
            words = raw_words(
                key,
                step=step,
                tensor=tensor,
                count=3 * PAIRS_PER_GROUP * len(chunk),
                device=device,
                block=3 * PAIRS_PER_GROUP * (start + begin) // WORDS_PER_BLOCK,
            )
            _transform(chunk, words.view(-1, 3, PAIRS_PER_GROUP))
    offset = first - GROUP_SIZE * start
    return out.view(-1)[offset : offset + count].view(tuple(shape))


@cache
def has_triton() -> bool:
    """Return whether the kernel can be compiled."""
    return find_spec("triton") is not None


def _transform(out: Tensor, words: Tensor) -> None:
    """Write the variates of ``words`` (groups, 3, pairs) to ``out`` (groups, 2, pairs)."""
    high, low = (words[:, :2] & 0x7FFFFFFF).float().unbind(1)
    # u = (high + (low + 1/2) 2^-31) 2^-31 lies in (0, 1]. If high is large, the second
    # word is below float32's resolution; if high is zero, it determines the tail.
    uniform = (low + 0.5).mul_(2.0**-31).add_(high).mul_(2.0**-31)
    radius = uniform.log_().mul_(-2).sqrt_()
    angle = words[:, 2].float().mul_(math.pi * 2.0**-31)
    torch.mul(radius, angle.cos(), out=out[:, 0])
    torch.mul(radius, angle.sin_(), out=out[:, 1])
