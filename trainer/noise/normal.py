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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from affidavit.trainer.noise.chacha import WORDS_PER_BLOCK, write_words

PAIRS = 128
"""Pairs of a group: three times as many words, that is whole blocks."""

GROUP = 2 * PAIRS
"""Variates of a group."""

GROUPS = {"cpu": 1 << 9}
"""Groups made at a time: what fits a processor's cache."""

MAX_GROUPS = 1 << 15
"""The same where there is no entry for the device."""


def standard_normal(
    key: bytes, *, step: int, tensor: int, shape: Sequence[int], device: str = "cpu", first: int = 0
) -> Tensor:
    """Independent N(0, 1) variates in float32, a function of the stream's name alone.

    They are those of the stream from variate ``first`` on. Raises ``ValueError`` where
    ``raw_words`` does; a stream has 2.3e10 pairs.
    """
    out = torch.empty(math.prod(shape), dtype=torch.float32, device=device)
    spans = {tensor: range(first, first + len(out))}
    for piece in pieces(key, step=step, spans=spans, device=device):
        out[piece.first : piece.first + len(piece.variates)] = piece.variates
    return out.view(tuple(shape))


class Piece(NamedTuple):
    """Variates of a tensor; ``first`` is how many of its span come before them."""

    tensor: int
    first: int
    variates: Tensor


def pieces(key: bytes, *, step: int, spans: Mapping[int, range], device: str) -> Iterator[Piece]:
    """The variates of several tensors, of each tensor's stream those in its span, in pieces.

    A piece is still in the cache when it is added to something, and no more memory is needed
    than for one. Small tensors, of which a model has many, are transformed together.
    """
    at_once = GROUPS.get(torch.device(device).type, MAX_GROUPS)
    groups = {
        tensor: range(span.start // GROUP, -(-span.stop // GROUP))
        for tensor, span in spans.items()
        if span
    }
    maker = _Maker.of(min(at_once, sum(map(len, groups.values()))), device)
    for runs in _runs(groups, at_once):
        parts = maker.made(key, step, runs)
        for run, part in zip(runs, parts, strict=True):
            # The first group may begin before the first variate that is wanted.
            span = spans[run.tensor]
            first = GROUP * run.first - span.start
            variates = part.view(-1)[max(0, -first) : len(span) - first]
            yield Piece(run.tensor, max(0, first), variates)


class _Run(NamedTuple):
    """Groups of one tensor that follow each other."""

    tensor: int
    first: int
    groups: int


def _runs(groups: Mapping[int, range], most: int) -> Iterator[list[_Run]]:
    """All ``groups`` of all tensors in order, ``most`` at a time."""
    result: list[_Run] = []
    room = most
    for tensor, of in groups.items():
        first = of.start
        while first < of.stop:
            result.append(_Run(tensor, first, min(room, of.stop - first)))
            first, room = first + result[-1].groups, room - result[-1].groups
            if not room:
                yield result
                result, room = [], most
    if result:
        yield result


@dataclass(frozen=True, kw_only=True, slots=True)
class _Maker:
    """Places for as many groups as are made at a time, used over and over."""

    out: Tensor
    words: Tensor
    floats: tuple[Tensor, ...]

    @classmethod
    def of(cls, groups: int, device: str) -> _Maker:
        """Places on ``device``; a kernel that makes all at once needs only those of the result."""
        out = torch.empty(groups, 2, PAIRS, dtype=torch.float32, device=device)
        own = 0 if out.is_cuda and has_triton() else groups
        words = torch.empty(own, 3, PAIRS, dtype=torch.int32, device=device)
        floats = torch.empty(3, own, PAIRS, dtype=torch.float32, device=device)
        return cls(out=out, words=words, floats=floats.unbind())

    def made(self, key: bytes, step: int, runs: Sequence[_Run]) -> Sequence[Tensor]:
        """The variates of each run, (groups, 2, PAIRS)."""
        sizes = [run.groups for run in runs]
        total = sum(sizes)
        out = self.out[:total]
        parts: Sequence[Tensor] = out.split(sizes)
        if not len(self.words):
            from affidavit.trainer.noise import fused

            for run, part in zip(runs, parts, strict=True):
                fused.fill(part, key, step=step, tensor=run.tensor, first_group=run.first)
            return parts
        words = self.words[:total]
        for run, part in zip(runs, words.split(sizes), strict=True):
            block = 3 * PAIRS * run.first // WORDS_PER_BLOCK
            write_words(part, key, step=step, tensor=run.tensor, block=block)
        _fill(out, words, *(item[:total] for item in self.floats))
        return parts


@cache
def has_triton() -> bool:
    """Whether the kernel can be compiled at all."""
    return find_spec("triton") is not None


def _fill(out: Tensor, words: Tensor, uniform: Tensor, other: Tensor, cosine: Tensor) -> None:
    """The transform; ``words`` and the last three are places, which are written to."""
    words[:, :2].bitwise_and_(0x7FFFFFFF)
    high, low, turn = words.unbind(1)
    # u = (high + (low + 1/2) 2^-31) 2^-31 lies in (0, 1]. Where high is large the second
    # word is below float32's resolution; where high is zero it is the tail.
    uniform.copy_(low).add_(0.5).mul_(2.0**-31).add_(other.copy_(high)).mul_(2.0**-31)
    radius = uniform.log_().mul_(-2).sqrt_()
    angle = other.copy_(turn).mul_(math.pi * 2.0**-31)
    torch.mul(radius, torch.cos(angle, out=cosine), out=out[:, 0])
    torch.mul(radius, angle.sin_(), out=out[:, 1])
