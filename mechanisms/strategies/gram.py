"""Gram matrix of the means that one record can add, when it falls into one of b bins.

With the lots of an epoch as bins and the assignment kept over epochs, a record in bin i
takes part at steps i, i + b, i + 2b, ..., so that with C ≥ 0 it adds at most
m_i = Σ_j C[:, i + jb] in every direction. The run's privacy depends on the m_i through
their products ⟨m_i, m_j⟩ alone.

>>> from affidavit.mechanisms.strategies.identity_matrix import identity
>>> gram(identity(4), bins=2).round(6)
array([[2., 0.],
       [0., 2.]])

References: Choquette-Choo, Ganesh, Haque, Steinke and Thakurta, arXiv:2410.06266.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from affidavit.mechanisms.strategies.rounding import gamma
from affidavit.mechanisms.strategies.strategy import Strategy, TooLarge

Array = NDArray[np.float64]

MOST_ENTRIES = 50_000_000
"""Entries of all m_i together, 400 MB."""
EVALUATION = 1e-12
"""Slack for coefficients that were evaluated from a formula, as a share of each product."""


def gram(strategy: Strategy, bins: int) -> Array:
    """⟨m_i, m_j⟩ in clip norms², shape (bins, bins), each rounded up; zero where it is zero.

    Raises ``ValueError`` where C has a negative entry and ``TooLarge`` where the m_i do not
    fit.
    """
    if not strategy.is_nonnegative:
        raise ValueError("the Gram matrix of bins needs a strategy without negative entries")
    steps = strategy.steps
    if steps * bins > MOST_ENTRIES:
        raise TooLarge(f"{bins} bins over {steps} steps")
    means = _means(strategy, bins)
    found = means.T @ means
    found = np.maximum(found, found.T) * (1 + gamma(len(means) + steps) + EVALUATION)
    if strategy.residual:
        # C = (I + R)⁻¹ Ĉ moves each mean by at most ρ / (1 - ρ) of its length.
        norms = np.sqrt(np.diagonal(found))
        found += 2.1 * strategy.residual / (1 - strategy.residual) * np.outer(norms, norms)
    return np.asarray(found)


def _means(strategy: Strategy, bins: int) -> Array:
    """m_0, ..., m_{b-1} as columns."""
    column = strategy.strategy_coefficients
    if column is None:
        matrix = strategy.strategy_matrix()
        return np.stack([matrix[:, place::bins].sum(axis=1) for place in range(bins)], axis=1)
    steps = len(column)
    whole = -(-steps // bins)
    padded = np.zeros(whole * bins)
    padded[:steps] = column
    # Σ_j S^(jb) c, the first mean; the others are it shifted, cut off at the end.
    first = np.cumsum(padded.reshape(whole, bins), axis=0).ravel()[:steps]
    found = np.zeros((steps, bins))
    for place in range(min(bins, steps)):
        found[place:, place] = first[: steps - place]
    return found
