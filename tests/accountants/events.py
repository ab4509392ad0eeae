"""Events that several tests of accountants use."""

from __future__ import annotations

from affidavit.plan import events


def poisson(
    q: float, sigma: float, steps: int = 1, pair: events.SubsampledPair = "add_remove"
) -> events.Repeated:
    """``steps`` Poisson-subsampled Gaussian releases."""
    step = events.PoissonSubsampledGaussian(
        sampling_probability=q, noise_multiplier=sigma, pair=pair
    )
    return events.Repeated(event=step, count=steps)


def allocated(bins: int, sigma: float) -> events.RandomAllocationGaussian:
    """One random allocation."""
    return events.RandomAllocationGaussian(bins=bins, noise_multiplier=sigma)
