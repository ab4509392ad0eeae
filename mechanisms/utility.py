"""Utility estimates: the effect of a plan's noise on training.

They are information, never guarantees. They follow from the noise of the plan and its public
constants, for the trainer that the plan describes. Letters: σ noise multiplier, C clip norm, B
divisor of the sum, ν = σC/B the standard deviation of the noise in one entry of the released mean,
d entries of a block, β momentum. C, ν and norms are in the unit of the gradient, second moments and
Φ in its square, B in records; shares and ratios have none.

>>> nu = noise_std_of_the_mean(noise_multiplier=0.8, clip_norm=1 / 7, divisor=1024)
>>> round(momentum_norm(nu, entries=768 * 768, momentum=0.95), 2)
0.27

References: Wang, An Optimization View of DP LLM Fine-tuning, Theorems 1, 3 and 9 (with
z_0 = 0); arXiv:2605.12994v1, Lemma C.1; Tang et al., arXiv:2312.14334 (Φ).
"""

from __future__ import annotations

import math


def noise_std_of_the_mean(*, noise_multiplier: float, clip_norm: float, divisor: float) -> float:
    """Return ν = σC/B; noise adds its square Φ to Adam's second moment."""
    return noise_multiplier * clip_norm / divisor


def least_noise_share(*, noise_multiplier: float, divisor: float, entries: int) -> float:
    """Return the least share of noise, ρ = Φ / (v + Φ), in Adam's second moment.

    It holds for an average entry: a clipped mean has norm at most C, so v <= C²/d.
    """
    return 1 / (1 + (divisor / noise_multiplier) ** 2 / entries)


def most_signal_to_noise(*, noise_multiplier: float, divisor: float, entries: int) -> float:
    """Return B / (σ √d), the largest norm of a clipped mean over the norm of its noise."""
    return divisor / (noise_multiplier * math.sqrt(entries))


def momentum_norm(
    nu: float, *, entries: int, momentum: float, steps: float = math.inf, normalised: bool = False
) -> float:
    """Return the root mean square ‖M_t‖_F of the noise in M_t = βM_(t-1) + G_t after ``steps`` t.

    ``normalised`` divides M_t by Σ β^j, as in DP-MuonBC.
    """
    if normalised:
        return probe_std(nu, momentum=momentum, steps=steps) * math.sqrt(entries)
    grown = -math.expm1(2 * steps * math.log(momentum)) if momentum > 0 else 1.0
    return nu * math.sqrt(entries * grown / (1 - momentum**2))


def probe_std(nu: float, *, momentum: float, steps: float = math.inf) -> float:
    """Return ρ_t of DP-MuonBC after ``steps`` t: ρ_t² = ν² (1-β)/(1+β) · (1+β^t)/(1-β^t)."""
    power = math.exp(steps * math.log(momentum)) if momentum > 0 else 0.0
    return nu * math.sqrt((1 - momentum) / (1 + momentum) * (1 + power) / (1 - power))


def prefix_sum_std(nu: float, *, steps: int, lambda_: float = 0.0) -> float:
    """Return the noise standard deviation in an entry of the sum of all releases.

    The noise is w_t = z_t - λ z_(t-1), and ν is the standard deviation of an entry of z_t. The sum
    over ``steps`` T is Σ_(t<T) (1-λ) z_t + z_T; independent noise (λ = 0) gives √T ν.
    """
    return nu * math.sqrt(1 + (1 - lambda_) ** 2 * (steps - 1))
