"""DP-AdamW: DP-Adam with decoupled weight decay, which never enters the moments.

    θ ← (1 - ηλ) θ - η m̂_t / (√v̂_t + 10⁻⁸)

It is also the rule of the auxiliary tensors of DP-Muon. ``adam.moments`` and
``adam.update`` are its update, on a tensor that was decayed first.

Reference: Loshchilov and Hutter, arXiv:1711.05101, Algorithm 2.
"""

from __future__ import annotations

from affidavit.plan import Optimizer as Settings
from affidavit.trainer.optimizers.adam import Adaptive, decays
from affidavit.trainer.optimizers.given import Given
from affidavit.trainer.optimizers.released import Released, Rule


def rule_of(settings: Settings) -> Adaptive:
    """Adam with decoupled decay and the plan's β₁ and β₂."""
    beta1, beta2 = decays(settings)
    return Adaptive(beta1=beta1, beta2=beta2, decoupled=True)


class AdamW(Released):
    """``dp_adamw``."""

    def rule(self, given: Given) -> Rule:
        """Adam with decoupled decay."""
        return rule_of(given.settings)
