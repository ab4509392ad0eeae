"""DP-AdamBC: Adam without the noise's share of the second moment.

    D_t = √max(v̂_t - Φ, ξ),   Φ = (σ_g C_g / B)²

because E v̂_t = v_t + Φ for noise of variance Φ in each entry of the mean. Φ belongs to the
block and is a public constant. Where the variance of the noise changes from step to step
(a further phase, noise N z with rows of different norms) E v̂_t has the weighted mean of all
Φ_s so far, Σ_s β₂^(t-s) Φ_s / Σ_s β₂^(t-s), which is subtracted instead; it is Φ where Φ is
constant.

>>> float(denominator(torch.tensor(5.0), phi=1.0, floor=1e-8))
2.0

References: Tang, Shpilevskiy and Lécuyer, arXiv:2312.14334, Algorithm 1; Wang, An
Optimization View of DP LLM Fine-tuning, Theorem 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from affidavit.trainer.optimizers.adam import Adaptive, decays
from affidavit.trainer.optimizers.adam_floor import floor_of, floored
from affidavit.trainer.optimizers.given import Given
from affidavit.trainer.optimizers.released import At, Released, Rule, std_at


def denominator(second: Tensor, *, phi: float, floor: float) -> Tensor:
    """√max(v̂ - Φ, ξ). The shape is that of v̂."""
    return floored(torch.sub(second, phi), floor)


class AdamBC(Released):
    """``dp_adambc``."""

    def rule(self, given: Given) -> Rule:
        """Adam over √max(v̂ - Φ, ξ)."""
        given.require_fixed_clip_norms()
        (beta1, beta2), floor = decays(given.settings), floor_of(given.settings)
        phi = {release.name: release.noise.second_moment(beta2) for release in given.releases}

        def of_step(second: Tensor, at: At) -> Tensor:
            return denominator(second, phi=std_at(phi, at), floor=floor)

        return Adaptive(beta1=beta1, beta2=beta2, denominator=of_step)
