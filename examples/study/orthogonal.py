"""How well orthogonalisations find a signal in the certified noise, on matrices drawn for it.

The momentum of one hidden matrix after all steps: the same gradient of low rank in each, and the
noise of DP-Muon's plan. A direction is scored by its cosine with the orthogonal factor of the
gradient alone, which a run without noise would follow; 1 is best. All of them are post-processing,
so none changes ε.

References: Muon and its correction as in ``affidavit.trainer.optimizers.muon``; Polar Express,
arXiv:2505.16932, Algorithm 1; NorMuon's normalisation of rows, of one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from affidavit.trainer.optimizers.muon import correct_bias, orthogonalize

POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
SAFETY = 1.01
"""By which Polar Express divides, so that rounding does not leave its interval."""


def polar_express(matrices: Tensor) -> Tensor:
    """Five steps of the optimal odd quintics, (k, m, n) to (k, m, n)."""
    iterate = matrices / (torch.linalg.matrix_norm(matrices, keepdim=True) * SAFETY)
    for a, b, c in POLAR_EXPRESS:
        square = iterate @ iterate.mT
        iterate = (
            a / SAFETY * iterate
            + (b / SAFETY**3 * square + c / SAFETY**5 * square @ square) @ iterate
        )
    return iterate


def normalize_rows(matrices: Tensor) -> Tensor:
    """Rows of equal norm, with the norm of the whole kept."""
    norms = torch.linalg.vector_norm(matrices, dim=-1, keepdim=True)
    whole = torch.linalg.matrix_norm(matrices, keepdim=True)
    return matrices / norms * whole / math.sqrt(matrices.shape[-2])


frobenius = partial(orthogonalize, start="frobenius")


@dataclass(frozen=True, kw_only=True)
class Momenta:
    """Momenta (k, m, n), the gradient in them, and the deviation of their noise."""

    values: Tensor
    gradient: Tensor
    deviation: float
    weight: float

    @classmethod
    def draw(
        cls, noise_std: float, norm: float, *, steps: int, rows: int, columns: int, beta: float
    ) -> Momenta:
        """Draw 16 momenta of a gradient of rank 4 and Frobenius norm ``norm``."""
        generator = torch.Generator().manual_seed(1)
        normal = partial(torch.randn, generator=generator, dtype=torch.float64)
        gradient = normal(16, rows, 4) @ normal(16, 4, columns)
        gradient *= norm / torch.linalg.matrix_norm(gradient, keepdim=True)
        weight = (1 - beta**steps) / (1 - beta)
        deviation = noise_std * math.sqrt((1 - beta ** (2 * steps)) / (1 - beta**2))
        noise = deviation * normal(16, rows, columns)
        values = weight * gradient + noise
        return cls(values=values, gradient=gradient, deviation=deviation, weight=weight)

    def corrected(self) -> Tensor:
        """DP-MuonBC's direction from the Frobenius norm, with one probe."""
        generator = torch.Generator().manual_seed(2)
        probe = torch.randn(self.values.shape, generator=generator, dtype=torch.float64)
        shift = list(self.deviation / self.weight * probe)
        return torch.stack(correct_bias(list(self.values / self.weight), [shift], frobenius))

    def cosine(self, directions: Tensor) -> float:
        """The mean cosine with the orthogonal factor of the gradient."""
        left, _, right = torch.linalg.svd(self.gradient, full_matrices=False)
        factor = left[..., :4] @ right[..., :4, :]
        products = (directions * factor).sum((-2, -1))
        norms = torch.linalg.matrix_norm(directions) * torch.linalg.matrix_norm(factor)
        return float((products / norms).mean())


METHODS: Mapping[str, Callable[[Momenta], Tensor]] = {
    "none: the momentum itself": lambda of: of.values,
    "Newton-Schulz, the paper's start": lambda of: orthogonalize(of.values),
    "Newton-Schulz, Frobenius norm": lambda of: frobenius(of.values),
    "the same, with DP-MuonBC's correction": Momenta.corrected,
    "Polar Express": lambda of: polar_express(of.values),
    "Newton-Schulz, rows normalised (NorMuon)": lambda of: normalize_rows(frobenius(of.values)),
    "the exact orthogonal factor": lambda of: orthogonalize(of.values, start="frobenius", steps=40),
}
AGREEMENTS = (1.0, 0.3, 0.1)
"""Norms of the mean gradient over the clip norm; 1 if all records agree."""


def table(
    noise_std: float, clip_norm: float, *, steps: int, rows: int, columns: int, beta: float
) -> Iterable[str]:
    """The lines of a table: singular values at the least agreement, and cosines at each."""
    drawn = [
        Momenta.draw(noise_std, clip_norm * of, steps=steps, rows=rows, columns=columns, beta=beta)
        for of in AGREEMENTS
    ]
    yield (
        "| orthogonalisation | least and largest singular value | "
        + " | ".join(f"cosine at {of:g} C" for of in AGREEMENTS)
        + " |"
    )
    yield "|---|---:|" + "---:|" * len(AGREEMENTS)
    for name, method in METHODS.items():
        results = [method(of) for of in drawn]
        values = torch.linalg.svdvals(results[-1])
        cosines = " | ".join(
            f"{of.cosine(result):.3f}" for of, result in zip(drawn, results, strict=True)
        )
        yield f"| {name} | {values.min():.3f}, {values.max():.3f} | {cosines} |"
