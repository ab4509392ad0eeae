"""Events that several tests of accountants use."""

from __future__ import annotations

from affidavit.plan import PoissonSubsampledGaussian, RandomAllocationGaussian, Repeated
from affidavit.plan.events import SubsampledPair


def poisson(
    q: float, sigma: float, steps: int = 1, pair: SubsampledPair = "add_remove"
) -> Repeated:
    """``steps`` Poisson-subsampled Gaussian releases."""
    step = PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma, pair=pair)
    return Repeated(event=step, count=steps)


def allocated(bins: int, sigma: float) -> RandomAllocationGaussian:
    """One random allocation."""
    return RandomAllocationGaussian(bins=bins, noise_multiplier=sigma)
