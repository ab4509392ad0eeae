"""Holding one release's public parameters against what its step must be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from affidavit.certificate import StepRequirement
from affidavit.gate.guard.stopping import GuardStop


def require_public(
    required: StepRequirement,
    *,
    clip_norm: Mapping[str, float],
    noise_std: Mapping[str, float],
    divisor: float | None,
) -> None:
    """Clip norms at most, noise at least, the divisor exactly as certified.

    Raises ``GuardStop`` otherwise.
    """
    for release, most in required.clip_norm.items():
        if not 0 < clip_norm[release] <= most:
            raise GuardStop(
                "clip_norm_above",
                f"{release} is clipped to {clip_norm[release]:g}, and at most {most:g} was "
                "certified.",
                f"Clip to {most!r}, or certify the plan with the norm that you use.",
            )
    for release, least in required.noise_std.items():
        if not noise_std[release] >= least:
            raise GuardStop(
                "noise_below",
                f"{release} gets noise of standard deviation {noise_std[release]:.9g} on the sum, "
                f"and at least {least:.9g} was certified.",
                f"Add {least!r} (noise multiplier times clip norm), or certify the plan with the "
                "noise that you add.",
            )
    if divisor is not None and float(divisor) != float(Fraction(required.divisor)):
        raise GuardStop(
            "other_divisor",
            f"sums are divided by {divisor:g}, and {required.divisor} was certified.",
            "Divide by the fixed, certified number, whatever the lot came to.",
        )


def std_of(noise_multiplier: float, clip_norm: float) -> float:
    """σC rounded as a certificate rounds it: two equal pairs of doubles have one product."""
    exact = Fraction(noise_multiplier) * Fraction(clip_norm)
    nearest = float(exact)
    return nearest if Fraction(nearest) >= exact else math.nextafter(nearest, math.inf)
