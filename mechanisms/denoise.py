"""Singular-value denoising: any optimiser, reading shrunken releases instead of noisy ones.

A released mean of one matrix is a low-rank signal plus noise of known standard deviation σ'
= σC/B in each entry. Noise turns a singular value λ into about
((λ + σ'²n/λ)(λ + σ'²m/λ))^½; where the largest exceeds κ σ'(√n + √m), each is mapped back and
shrunk by the alignment that its singular vectors have kept, the others are dropped, and the
result is scaled to the norm that it came with. All of it is computed from the release and
from public constants: post-processing, whatever the optimiser, sampler or noise.

Reference: "Sample-efficient DP fine-tuning via gradient matrix denoising", equations 3 to 9;
Shabalin and Nobel, arXiv:1007.4148; Gavish and Donoho, arXiv:1405.7511.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from affidavit.mechanisms.protocol import Mechanism
from affidavit.plan import Denoise

THRESHOLD = Denoise().threshold


def shrink(
    matrix: NDArray[np.float64], noise_std: float, *, threshold: float = THRESHOLD
) -> NDArray[np.float64]:
    """The denoised m x n release; ``noise_std`` is σ', and below the threshold nothing changes.

    σ' is in the unit of the entries, ``threshold`` κ is the factor on σ'(√n + √m).
    """
    rows, columns = matrix.shape
    edge = noise_std * (math.sqrt(rows) + math.sqrt(columns))
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    if not values.size or values[0] <= threshold * edge:
        return matrix
    shrunk = np.array([_shrunk(float(v), noise_std, rows, columns, edge) for v in values])
    scale = float(np.linalg.norm(values) / np.linalg.norm(shrunk))
    found: NDArray[np.float64] = (left * (scale * shrunk)) @ right
    return found


def _shrunk(value: float, noise_std: float, rows: int, columns: int, edge: float) -> float:
    """η of equation 8 for one singular value of the release."""
    if value <= edge:
        return 0.0
    variance = noise_std**2
    sums = value**2 - variance * (rows + columns)
    square = (sums + math.sqrt(sums**2 - 4 * rows * columns * variance**2)) / 2
    kept = square**2 - rows * columns * variance**2
    return math.sqrt(square) * math.sqrt(
        kept
        / (square**2 + rows * square * variance)
        * kept
        / (square**2 + columns * square * variance)
    )


MECHANISM = Mechanism(
    name="denoise",
    kind="wrapper",
    title="Singular-value denoising of any optimiser",
    releases="nothing: it reads what the optimiser's mechanism releases",
    sensitivity="that of the optimiser it is used with",
    proof="Post-processing of a release with public constants",
    post_processing=(
        "shrinkage of the singular values of each released mean that is a matrix",
        "its threshold, and scaling back to the released norm",
    ),
    clipping="that of the optimiser it is used with",
    sources=(
        "Sample-efficient DP fine-tuning via gradient matrix denoising, equations 3 to 9",
        "arXiv:1007.4148",
    ),
    example={"optimizer": {"name": "dp_adam", "denoise": True}},
)
