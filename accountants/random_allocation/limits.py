"""The parameters at which random allocations are bounded; refused outside, before work."""

from __future__ import annotations

from affidavit.accountants.protocol import OutOfReach
from affidavit.plan import RandomAllocationGaussian

NOISE_MULTIPLIERS = (0.1, 1000.0)
"""σ over the root of the epochs for which bins are kept."""
MOST_BINS = 1_000_000


def check_range(leaf: RandomAllocationGaussian) -> None:
    """Raise ``OutOfReach`` for parameters at which allocations are not bounded."""
    low, high = NOISE_MULTIPLIERS
    if not low <= leaf.noise_multiplier <= high:
        raise OutOfReach(
            f"noise multiplier {leaf.noise_multiplier:.4g} (over the root of the epochs) is "
            f"outside [{low:g}, {high:g}], where allocations are bounded.",
            "Choose a noise multiplier nearer to what training uses.",
        )
    if leaf.bins > MOST_BINS:
        raise OutOfReach(
            f"{leaf.bins} bins are more than the {MOST_BINS} that are accounted.",
            "Use larger lots.",
        )
