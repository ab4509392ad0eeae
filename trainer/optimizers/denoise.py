"""Singular-value denoising of released means, batched over equal shapes.

A mean is a low-rank signal plus noise of standard deviation σ' in each entry. Where the
largest singular value λ₁ exceeds κ σ'(√m + √n), each is mapped back through what noise makes
of it and shrunk by the alignment that its vectors have kept, those at or below σ'(√m + √n)
are dropped, and the result has the Frobenius norm that it came with. Other means stay as they
are, bit for bit; so do tensors that are no matrices. In units of σ', with y = λ/σ',

    x⁴-root:  2 x² = y² - m - n + √((y² - m - n)² - 4mn),
    η = x √((x⁴ - mn)/(x⁴ + m x²)) √((x⁴ - mn)/(x⁴ + n x²)).

>>> mean = torch.diag(torch.tensor([100.0, 1.0, 1.0]))
>>> shrunk(mean[None], 1.0, threshold=1.02)[0].diagonal().tolist()[1:]
[0.0, 0.0]

Reference: "Sample-efficient DP fine-tuning via gradient matrix denoising", equations 3 to 9;
Shabalin and Nobel, arXiv:1007.4148.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor


def all_shrunk(means: Sequence[Tensor], noise_std: float, *, threshold: float) -> list[Tensor]:
    """Every mean of one release, matrices denoised; ``noise_std`` is σ' of this step.

    Each keeps its shape; matrices are (m, n).
    """
    result = list(means)
    shapes: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, mean in enumerate(means):
        if mean.ndim == 2:
            shapes[(mean.shape, mean.dtype, mean.device)].append(place)
    for places in shapes.values():
        done = shrunk(
            torch.stack([means[place] for place in places]), noise_std, threshold=threshold
        )
        for place, mean in zip(places, done, strict=True):
            result[place] = mean
    return result


def shrunk(matrices: Tensor, noise_std: float, *, threshold: float) -> Tensor:
    """The denoised matrices, (k, m, n) to (k, m, n)."""
    rows, columns = matrices.shape[-2:]
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    wide = values.double()
    stored = shrinkage(wide / noise_std, rows, columns) * noise_std
    norm = torch.linalg.vector_norm(stored, dim=-1)
    edge = noise_std * (math.sqrt(rows) + math.sqrt(columns))
    acts = (wide[:, 0] > threshold * edge) & (norm > 0)
    scale = torch.linalg.vector_norm(wide, dim=-1) / torch.where(acts, norm, 1.0)
    stored = (stored * scale[:, None]).to(values.dtype)
    return torch.where(acts[:, None, None], (left * stored[:, None, :]) @ right, matrices)


def shrinkage(values: Tensor, rows: int, columns: int) -> Tensor:
    """η of equation 8 in units of σ', zero at or below √m + √n. The shape is that of ``values``."""
    sums = values.square() - (rows + columns)
    root = (sums.square() - 4 * rows * columns).clamp(min=0).sqrt()
    square = ((sums + root) / 2).clamp(min=1)
    signal = (square.square() - rows * columns).clamp(min=0)
    ratio = (
        signal / ((square.square() + rows * square) * (square.square() + columns * square)).sqrt()
    )
    above = values > math.sqrt(rows) + math.sqrt(columns)
    return torch.where(above, square.sqrt() * ratio, 0.0)
