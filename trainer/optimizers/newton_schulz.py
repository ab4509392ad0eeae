"""Newton-Schulz orthogonalisation Q_(κ,q) of a batch of matrices.

For a matrix M of m rows and n columns, transposed if m > n,

    Y_0 = M / max(1, ‖M‖_F)  (start "paper")   or   M / ‖M‖_F  (start "frobenius"),
    Y_j = p_κ(Y_(j-1) Y_(j-1)ᵀ) Y_(j-1),   p_κ(x) = Σ_(s=0..κ) (2s)!/(4^s (s!)²) (1-x)^s.

A singular value y becomes y p_κ(y²), on its way to 1. It does *not* get there in a few steps
from small values, which grow by p_κ(0) a step: with the paper's start and ‖M‖_F < 1 five steps
of degree 2 are little more than a multiplication by 23.2. The zero matrix stays.

``dtype`` is what the products are taken in; norms are taken in the matrices' own type. In
bfloat16 singular values near 1 are met to about 1 %, and it is quick where there is hardware
for it. This is the batched, any-device twin of ``affidavit.mechanisms.newton_schulz``.

>>> small = 1e-6 * torch.eye(2).reshape(1, 2, 2)
>>> round(float(orthogonalised(small)[0, 0, 0] / small[0, 0, 0]), 1)
23.2

Reference: arXiv:2605.12994v1, Algorithm 1 and appendix C.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from affidavit.mechanisms import DEGREE, STEPS, Start, coefficients


def orthogonalised(
    matrices: Tensor,
    *,
    degree: int = DEGREE,
    steps: int = STEPS,
    start: Start = "paper",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Q of each of the matrices, (k, m, n) to (k, m, n)."""
    wide = wide_of(matrices)
    norms = torch.linalg.matrix_norm(wide, keepdim=True)
    scale = norms.clamp(min=1) if start == "paper" else torch.where(norms > 0, norms, 1.0)
    iterate = wide / scale
    if dtype is not None:
        iterate = iterate.to(dtype)
    for _ in range(steps):
        iterate = _step(iterate, coefficients(degree))
    iterate = iterate.to(matrices.dtype)
    return iterate if wide is matrices else iterate.mT


def wide_of(matrices: Tensor) -> Tensor:
    """The transpose of matrices with more rows than columns, the others as they are.

    Shape (..., m, n).
    """
    return matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices


def _step(iterate: Tensor, series: tuple[float, ...]) -> Tensor:
    """p_κ(Y Yᵀ) Y by Horner's rule in I - Y Yᵀ, which keeps its digits near 1."""
    identity = torch.eye(iterate.shape[-2], dtype=iterate.dtype, device=iterate.device)
    rest = torch.baddbmm(identity, iterate, iterate.mT, alpha=-1)
    polynomial = series[-1] * rest + series[-2] * identity
    for coefficient in series[-3::-1]:
        polynomial = torch.baddbmm(identity, polynomial, rest, beta=coefficient)
    return polynomial @ iterate
