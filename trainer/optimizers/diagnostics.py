"""Diagnostics that cost no privacy: they read released values and public constants only.

* The noise share ρ = Φ / v̂ says how much of Adam's second moment is noise. At ρ near 1 the
  second moment carries no signal, and Adam is momentum SGD with the step η/√Φ.
* The Muon probe compares the momentum M_t and its orthogonalisation O_t with the *next*
  release G̃_(t+1). Its noise is independent of both when noise is independent across steps, so
  that each inner product has the expectation of that with the clipped mean itself; the
  cosines are smaller than with the clipped mean by one common factor, and their order and
  signs are right on average.

The published probe compares with the unclipped, unnoised gradient. That is a release of raw
data which no certificate covers, and is not offered.

>>> noise_share(torch.tensor([1.0, 2.0, 4.0]), phi=1.0)
0.5

Reference: Wang, An Optimization View of DP LLM Fine-tuning, Theorem 3 and section 4.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from affidavit.trainer.optimizers.newton_schulz import wide_of


@dataclass(frozen=True, slots=True)
class Alignment:
    """Cosines to the next release: of the momentum, and of its orthogonalisation."""

    before: float
    after: float

    @property
    def gain(self) -> float:
        """What orthogonalisation adds to the cosine."""
        return self.after - self.before


def noise_share(second: Tensor, *, phi: float) -> float:
    """ρ = Φ over the median of v̂, the bias-corrected second moment of one block.

    It may pass 1 by chance, because v̂ is random; infinite where the median is zero.

    ``second`` has any shape. Raises ``ValueError`` for a Φ that is not positive, or no entries.
    """
    if phi <= 0 or second.numel() == 0:
        raise ValueError("Φ is positive and a block has entries")
    median = float(second.flatten().median())
    return phi / median if median > 0 else float("inf")


def muon_probe(momentum: Tensor, next_release: Tensor) -> Alignment:
    """Cosines of M_t and msign(M_t) = U Vᵀ with G̃_(t+1), all (m, n) or flattened to it."""
    matrix, target = momentum.flatten(1), next_release.flatten(1)
    left, _, right = torch.linalg.svd(wide_of(matrix), full_matrices=False)
    sign = left @ right
    if sign.shape != matrix.shape:
        sign = sign.mT
    return Alignment(cosine(matrix, target), cosine(sign, target))


def cosine(one: Tensor, other: Tensor) -> float:
    """⟨a, b⟩ / (‖a‖ ‖b‖), zero where either is zero. Of two tensors of any one shape."""
    a, b = one.flatten().double(), other.flatten().double()
    norms = float(torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b))
    return float(a @ b) / norms if norms > 0 else 0.0
