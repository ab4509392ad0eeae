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

from affidavit.trainer.noise.chacha import WORDS_PER_BLOCK, raw_words_of

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
    spans = [(tensor, first, math.prod(shape))]
    (result,) = standard_normals(key, step=step, spans=spans, device=device)
    return result.view(tuple(shape))


def standard_normals(
    key: bytes, *, step: int, spans: Sequence[tuple[int, int, int]], device: str = "cpu"
) -> list[Tensor]:
    """Return the variates of several streams of a step, which are computed together.

    ``spans`` has the tensor, the first variate and the number of variates of each, which has the
    shape (number,). Raises ``ValueError`` like ``raw_words``.
    """
    sizes = [_groups_of(span) for span in spans]
    lengths = [groups for _, groups in sizes]
    out = torch.empty(sum(lengths), 2, PAIRS_PER_GROUP, dtype=torch.float32, device=device)
    parts = out.split(lengths)
    if has_kernel(out):
        from affidavit.trainer.noise.fused import write_normals

        whole = [
            (tensor, start * GROUP_SIZE, groups * GROUP_SIZE)
            for (tensor, _, _), (start, groups) in zip(spans, sizes, strict=True)
        ]
        write_normals(parts, key, step=step, spans=whole)
    else:
        _fill_chunks(out, key, step, spans, sizes)
    return [_cut(part, span) for part, span in zip(parts, spans, strict=True)]


def _fill_chunks(
    out: Tensor,
    key: bytes,
    step: int,
    spans: Sequence[tuple[int, int, int]],
    sizes: Sequence[tuple[int, int]],
) -> None:
    """Fill ``out`` (groups, 2, pairs) with the groups of each span, by chunks of all of them."""
    chunks: list[list[tuple[int, int, int]]] = [[]]
    free = CHUNK_GROUPS
    for (tensor, _, _), (start, groups) in zip(spans, sizes, strict=True):
        done = 0
        while done < groups:
            if not free:
                chunks.append([])
                free = CHUNK_GROUPS
            taken = min(free, groups - done)
            block = 3 * PAIRS_PER_GROUP * (start + done) // WORDS_PER_BLOCK
            chunks[-1].append((tensor, block, 3 * PAIRS_PER_GROUP * taken))
            done, free = done + taken, free - taken
    for chunk, part in zip(chunks, out.split(CHUNK_GROUPS), strict=True):
        words = raw_words_of(key, step=step, spans=chunk).to(out.device)
        _transform(part, words.view(-1, 3, PAIRS_PER_GROUP))


def _groups_of(span: tuple[int, int, int]) -> tuple[int, int]:
    """Return the first group of a stream's variates, and the number of groups."""
    _, first, count = span
    start = first // GROUP_SIZE
    return start, -(-(first + count) // GROUP_SIZE) - start if count else 0


def _cut(groups: Tensor, span: tuple[int, int, int]) -> Tensor:
    _, first, count = span
    offset = first % GROUP_SIZE
    return groups.view(-1)[offset : offset + count]


def has_kernel(values: Tensor) -> bool:
    """Return whether a kernel writes the variates of many tensors like ``values``, (n, ...)."""
    return values.is_cuda and values.dtype == torch.float32 and has_triton()


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
