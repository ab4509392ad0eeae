"""Standard normal variates from keystream words, by the transform of Box and Muller.

Each pair of variates takes three words: 62 bits for the radius, so that its tail reaches
9.3 standard deviations (with 31 it would stop at 6.6, which 10¹⁰ variates would show),
and 32 for the angle. Arithmetic and result are float32. Variates come in groups whose
layout does not depend on how many are made at a time, so that one stream gives the same
variates everywhere, up to the last digits of a device's logarithm and cosine. On a CUDA
device that has Triton one kernel makes them (``affidavit.trainer.noise.fused``).

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

PAIRS = 128
"""Pairs of a group: three times as many words, that is whole blocks."""

GROUPS = {"cpu": 1 << 9}
"""Groups made at a time: what fits a processor's cache."""

MOST_GROUPS = 1 << 15
"""The same where there is no entry for the device."""


def standard_normal(
    key: bytes, *, step: int, tensor: int, shape: Sequence[int], device: str = "cpu"
) -> Tensor:
    """Independent N(0, 1) variates in float32, a function of the stream's name alone.

    Raises ``ValueError`` where ``raw_words`` does; a stream has 1.1e10 pairs.
    """
    count = math.prod(shape)
    groups = -(-count // (2 * PAIRS))
    out = torch.empty(groups, 2, PAIRS, dtype=torch.float32, device=device)
    if out.is_cuda and has_triton():
        from affidavit.trainer.noise import fused

        fused.fill(out, key, step=step, tensor=tensor)
        return out.view(-1)[:count].view(tuple(shape))
    at_once = GROUPS.get(torch.device(device).type, MOST_GROUPS)
    for first in range(0, groups, at_once):
        part = out[first : first + at_once]
        raw = raw_words(
            key,
            step=step,
            tensor=tensor,
            count=3 * PAIRS * len(part),
            device=device,
            block=first * 3 * PAIRS // WORDS_PER_BLOCK,
        )
        _fill(part, raw.view(-1, 3, PAIRS))
    return out.view(-1)[:count].view(tuple(shape))


@cache
def has_triton() -> bool:
    """Whether the kernel can be compiled at all."""
    return find_spec("triton") is not None


def _fill(out: Tensor, raw: Tensor) -> None:
    high, low = _positive(raw[:, 0]), _positive(raw[:, 1])
    # u = (high + (low + 1/2) 2^-31) 2^-31 lies in (0, 1]. Where high is large the second
    # word is below float32's resolution; where high is zero it is the tail.
    uniform = low.add_(0.5).mul_(2.0**-31).add_(high).mul_(2.0**-31)
    radius = uniform.log_().mul_(-2).sqrt_()
    angle = raw[:, 2].float().mul_(math.pi * 2.0**-31)
    torch.mul(radius, torch.cos(angle), out=out[:, 0])
    torch.mul(radius, angle.sin_(), out=out[:, 1])


def _positive(bits: Tensor) -> Tensor:
    """The low 31 bits as float32."""
    return (bits & 0x7FFFFFFF).float()
