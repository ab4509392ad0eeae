"""Same-lot joint release: the blocks of one step are one Gaussian mechanism.

At each step every block g = 1..G of the lot's records is clipped to l2 norm C_g, summed and
released with noise N(0, (σ_g C_g)² I), independent between blocks. All blocks see the same lot, so
one record moves the stacked, noise-normalised release by at most

    sqrt( Σ_g count_g / σ_g² ),      σ_joint = ( Σ_g count_g / σ_g² )^(-1/2).

The bound is tight, because all blocks can attain theirs at once. Under flat clipping one norm C
bounds all blocks together, and the worst record puts all of it where σ_g is smallest:
σ_joint = min_g σ_g.

Guarantees
    * ``joint_noise_multiplier`` is rounded down and ``allocate`` up, so neither claims more noise
      than is added.
    * The σ_g of ``allocate`` have a joint multiplier of at least the requested one.

References: arXiv:2605.12994v1, Theorem 2.1 (same-lot joint accounting).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from fractions import Fraction

from affidavit.plan import Allocation, Phase, Release

REQUIRED_DIGITS = 7
"""Significant digits of a required noise multiplier; rounding up adds at most 1e-6 of its
value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseEnergy:
    """The noise energy Σ_g count_g d_g σ_g² C_g² of a step, in the squared unit of C_g."""

    allocated: float
    uniform: float

    @property
    def saving(self) -> float:
        """The share of noise energy that the allocation saves over uniform σ_g."""
        return 1 - self.allocated / self.uniform


def noise_multiplier(release: Release) -> Fraction:
    """Return the given σ_g of a release, exactly, from the doubles that a trainer uses.

    Raises ``ValueError`` if the release has no noise.
    """
    if release.noise_multiplier is not None:
        return Fraction(release.noise_multiplier)
    if release.noise_std is None:
        raise ValueError(f"release {release.name} has no noise")
    return Fraction(release.noise_std) / Fraction(release.clip_norm)


def joint_noise_multiplier(phase: Phase) -> float | None:
    """Return σ_joint of one step, rounded down; None if the noise is to be solved for."""
    if phase.asks_for_noise:
        return None
    multipliers = [noise_multiplier(release) for release in phase.releases]
    if phase.clipping == "flat":
        return _double_down(min(multipliers))
    counts = [release.count for release in phase.releases]
    return joint_multiplier_of_blocks(zip(multipliers, counts, strict=True))


def joint_multiplier_of_blocks(blocks: Iterable[tuple[Fraction | float, int]]) -> float:
    """Return σ_joint of Gaussians of one lot, rounded down, from multipliers and their counts.

    Raises ``ZeroDivisionError`` if there are no blocks or a multiplier is zero.
    """
    precision = sum((count / Fraction(sigma) ** 2 for sigma, count in blocks), Fraction(0))
    return _root_down(1 / precision)


def add_same_lot_blocks(joint: float, same_lot: Sequence[float]) -> float:
    """Return σ_joint of a step with additional blocks on its lot, rounded down.

    >>> round(add_same_lot_blocks(1.0, [10.0]), 6)
    0.995037
    """
    return (
        joint_multiplier_of_blocks((sigma, 1) for sigma in (joint, *same_lot))
        if same_lot
        else joint
    )


def allocate(phase: Phase, joint: float, allocation: Allocation) -> tuple[float, ...]:
    """Return σ_g for each release of ``phase`` such that the multiplier of the step is ``joint``.

    ``uniform``: equal σ_g. ``proportional``: σ_g in proportion to the given weights.
    ``optimal``: least total noise energy, σ_g ∝ (√d_g C_g)^(-1/2), by Lagrange's condition
    d_g σ_g C_g² ∝ σ_g^(-3). Raises ``ValueError`` if a release lacks the required weight or
    dimension.
    """
    if phase.clipping == "flat":
        return tuple(rounded_up(joint) for _ in phase.releases)
    shapes = [_shape(release, allocation) for release in phase.releases]
    scale = joint * math.sqrt(
        math.fsum(
            release.count / shape**2 for release, shape in zip(phase.releases, shapes, strict=True)
        )
    )
    # The factor covers the rounding of the roots above.
    return tuple(rounded_up(scale * shape * (1 + 1e-14)) for shape in shapes)


def noise_energy(phase: Phase, sigmas: Sequence[float], joint: float) -> NoiseEnergy | None:
    """Return the noise energy of ``sigmas``; None for flat clipping or without dimensions."""
    dimensions = [release.dimension for release in phase.releases]
    if phase.clipping == "flat" or any(dimension is None for dimension in dimensions):
        return None
    energies = [
        release.count * (dimension or 0) * release.clip_norm**2
        for release, dimension in zip(phase.releases, dimensions, strict=True)
    ]
    blocks = sum(release.count for release in phase.releases)
    return NoiseEnergy(
        allocated=math.fsum(e * sigma**2 for e, sigma in zip(energies, sigmas, strict=True)),
        uniform=math.fsum(energies) * blocks * joint**2,
    )


def _shape(release: Release, allocation: Allocation) -> float:
    match allocation:
        case "uniform":
            return 1.0
        case "proportional":
            if release.weight is None:
                raise ValueError(f"release {release.name} has no weight")
            return release.weight
        case "optimal":
            if release.dimension is None:
                raise ValueError(f"release {release.name} has no dimension")
            return 1 / math.sqrt(math.sqrt(release.dimension) * release.clip_norm)


def rounded_up(sigma: float) -> float:
    """Return ``sigma`` rounded up to ``REQUIRED_DIGITS`` significant digits."""
    rounded = Context(prec=REQUIRED_DIGITS, rounding=ROUND_CEILING).create_decimal(repr(sigma))
    return float(str(rounded))


def _double_down(value: Fraction) -> float:
    nearest = float(value)
    return nearest if Fraction(nearest) <= value else math.nextafter(nearest, 0.0)


def _root_down(value: Fraction) -> float:
    """Return the largest double that is not above the square root of ``value``."""
    shift = 64 + value.denominator.bit_length()
    root = math.isqrt((value.numerator << 2 * shift) // value.denominator)
    return _double_down(Fraction(root, 1 << shift))
