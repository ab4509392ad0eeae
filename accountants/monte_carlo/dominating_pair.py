"""The sampled pair: balls in bins as a mixture of Gaussians with given products.

One run with bins is the pair P = 1/b Σ_i N(m_i, I) against Q = N(0, I), in units of the noise. Only
the products Γ_ij = ⟨m_i, m_j⟩ matter, and the hockey-stick curves of both orders do not decrease in
any of them (docs/theorems/balls-in-bins-correlated.md, lemma 2). So Γ is replaced by the exact
products of a matrix A of doubles with A Aᵀ ≥ Γ entry by entry: the sampled pair dominates,
regardless of Cholesky's rounding. The lower bounds allow for how much larger it is (``excess``).

A composition is a product of such pairs. A Gaussian release beside them moves every mean by one
more coordinate, μ, and adds μ² to every product.

There are three errors: ``loss_error`` bounds the rounding of the log-likelihood of one draw,
``excess`` the distance of the products above Γ, and ``bias`` the total variation between the exact
law of bins and that of a table of rounded probabilities.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.linalg import LinAlgError, cholesky

from affidavit.accountants.protocol import OutOfReach, Unsupported
from affidavit.accountants.rounding import UNIT_ROUNDOFF, Array
from affidavit.plan import events

MAX_PRODUCT = 1e4
"""Largest ‖m_i‖² in units of the noise; beyond μ = 100 no bound is useful."""
MAX_COPIES = 64
"""Runs with their own bins in one composition; each is sampled."""
MAX_EXTRA_LENGTH = 40.0
"""A b-dimensional standard normal is longer than √b plus this with probability e^-800."""


@dataclass(frozen=True, kw_only=True)
class Bins:
    """``copies`` runs with bins: ``factor`` A and ``products`` A Aᵀ, (b, b) each.

    ``products`` and their ``excess`` over Γ are in squared noise deviations.
    """

    factor: Array
    products: Array
    copies: int
    excess: float

    @property
    def count(self) -> int:
        """b, the number of bins."""
        return len(self.products)

    @cached_property
    def squares(self) -> Array:
        """‖m_i‖², shape (b,)."""
        return np.ascontiguousarray(np.diag(self.products))

    @cached_property
    def square_of_mean(self) -> float:
        """‖m̄‖², with m̄ the mean of the m_i."""
        return float(self.products.mean())

    def loss_error(self, shift: float) -> float:
        """Return a bound (nats) on the rounding of a loss if draws move by ``shift`` means."""
        largest = float(self.squares.max())
        length = math.sqrt(self.count) + MAX_EXTRA_LENGTH
        reach = math.sqrt(largest) * length + (shift + 1) * largest + 1
        return 4 * (self.count + 16) * UNIT_ROUNDOFF * reach


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A composition of runs with bins. ``seed`` is 128 bits in hexadecimal."""

    bins: tuple[Bins, ...]
    seed: str

    @cached_property
    def width(self) -> int:
        """The number of normals of one draw."""
        return sum(item.count * item.copies for item in self.bins)

    @cached_property
    def max_square(self) -> float:
        """max ‖m_i‖² of the composition."""
        return math.fsum(float(item.squares.max()) * item.copies for item in self.bins)

    @cached_property
    def square_of_mean(self) -> float:
        """‖m̄‖² of the composition."""
        return math.fsum(item.square_of_mean * item.copies for item in self.bins)

    @cached_property
    def excess(self) -> float:
        """A bound on the distance of each product above the true one."""
        return math.fsum(item.excess * item.copies for item in self.bins)

    @cached_property
    def bias(self) -> float:
        """Total variation between the table's law of bins and the exact law, for one draw."""
        return math.fsum(24 * item.count**2 * item.copies * UNIT_ROUNDOFF for item in self.bins)

    def loss_error(self, shift: float) -> float:
        """Return a bound (nats) on the rounding of the loss of one draw."""
        return math.fsum(item.loss_error(shift) * item.copies for item in self.bins)


def build_pair(parts: tuple[tuple[events.Leaf, int], ...]) -> Pair:
    """Return the pair of a composition, with Gaussian releases added to the first run with bins.

    Raises ``Unsupported`` for other kinds of release, and ``OutOfReach``.
    """
    precisions: list[float] = []
    binned: list[tuple[events.BallsInBinsGaussian, int]] = []
    for leaf, count in parts:
        match leaf:
            case events.Gaussian(noise_multiplier=sigma):
                precisions.append(count / sigma / sigma * (1 + 8 * UNIT_ROUNDOFF))
            case events.BallsInBinsGaussian():
                binned.append((leaf, count))
            case _:
                raise Unsupported(
                    "the Monte-Carlo accountant takes balls in bins, and Gaussian releases "
                    "beside it.",
                    "Use another accountant.",
                )
    if not binned:
        raise Unsupported(
            "this run does not use balls in bins.", "Use the gaussian or fourier accountant."
        )
    copies = sum(count for _, count in binned)
    if copies > MAX_COPIES:
        raise OutOfReach(
            f"{copies} runs with their own bins exceed the limit of {MAX_COPIES}.",
            "Keep the bins of the first epoch in the later ones.",
        )
    result = []
    mu_squared = math.fsum(precisions) * (1 + 8 * UNIT_ROUNDOFF)
    for leaf, count in binned:
        first = 1 if mu_squared else 0
        if first:
            result.append(_bins(leaf, 1, mu_squared))
            mu_squared = 0.0
        if count > first:
            result.append(_bins(leaf, count - first, 0.0))
    pair = Pair(bins=tuple(result), seed=_seed(binned))
    if pair.max_square > MAX_PRODUCT:
        raise OutOfReach(
            f"a record moves the run by {math.sqrt(pair.max_square):.4g} times its noise.",
            "Add noise.",
        )
    return pair


def _seed(binned: list[tuple[events.BallsInBinsGaussian, int]]) -> str:
    """Return the seed, which the strategies and a published word determine, but not the noise.

    Nobody chooses the seed and everybody can reproduce it. Since all noise multipliers share their
    normals, a search over the noise sees a smooth curve.
    """
    words = [f"{leaf.gram.digest}*{count}" for leaf, count in binned]
    stated = "affidavit monte_carlo 1 " + " ".join(words)
    return hashlib.sha256(stated.encode()).hexdigest()[:32]


def _bins(leaf: events.BallsInBinsGaussian, copies: int, mu_squared: float) -> Bins:
    gram = np.array(leaf.gram.rows, dtype=np.float64)
    requested = gram / leaf.noise_multiplier**2 * (1 + 8 * UNIT_ROUNDOFF) + mu_squared
    factor, products, slack = _dominating_factor(requested)
    return Bins(
        factor=factor,
        products=products,
        copies=copies,
        excess=float(np.max(products + slack - requested * (1 - 32 * UNIT_ROUNDOFF))),
    )


def _dominating_factor(requested: Array) -> tuple[Array, Array, float]:
    """Return A with A Aᵀ ≥ ``requested`` entry by entry, fl(A Aᵀ), and a bound on its rounding.

    A constant added to every entry keeps positive entries above, and one added to the diagonal
    makes a singular matrix factor. Both are as small as the check allows.
    """
    bins = len(requested)
    scale = float(np.max(np.diag(requested)))
    slack = 4 * (bins + 4) * UNIT_ROUNDOFF * scale
    lift = 4 * slack
    while lift <= 1e-8 * scale:
        raised = requested + lift
        raised[np.diag_indices(bins)] += bins * lift
        try:
            factor = np.asarray(cholesky(raised, lower=True, check_finite=False))
        except LinAlgError:
            lift *= 8
            continue
        products = factor @ factor.T
        products = (products + products.T) / 2
        # |fl(A Aᵀ) - A Aᵀ| ≤ (b + 2) u |A| |Aᵀ|, and the rows of A are no longer than √max.
        if np.all(products - slack >= requested):
            return factor, products, slack
        lift *= 8
    raise Unsupported(
        "the products of the means are not a valid Gram matrix.",
        "Give the Gram matrix of the strategy.",
    )
