"""DP-Adam with a floor: D_t = √max(v̂_t, ξ), ξ > 0 a public constant.

It is DP-AdamBC without its subtraction: what is left when only the bound on the step length
is wanted. Other than in DP-Adam nothing is added to the root, because ξ bounds it already.

>>> floored(torch.tensor([4.0, 0.0]), 0.01).tolist()
[2.0, 0.10000000149011612]

Reference: Wang, An Optimization View of DP LLM Fine-tuning (dp-adam-ξ); arXiv:2312.14334.
"""

from __future__ import annotations

import torch
from torch import Tensor

from affidavit.plan import Optimizer as Settings
from affidavit.trainer.optimizers.adam import Adaptive, decays
from affidavit.trainer.optimizers.given import Given, refused
from affidavit.trainer.optimizers.released import At, Released, Rule

FLOOR = 1e-8
"""ξ of a plan that gives none: the smallest of the published sweep at ρ near 1 (Table 1)."""


def floored(second: Tensor, floor: float) -> Tensor:
    """√max(v, ξ)."""
    return torch.clamp(second, min=floor).sqrt()


def floor_of(settings: Settings) -> float:
    """ξ of a plan; raises ``RefusedPlan`` for zero."""
    if settings.floor == 0:
        raise refused(
            "unsupported",
            "floor",
            "without a floor an entry whose second moment is zero would be divided by zero.",
            f"Give a positive floor ({FLOOR:g} is used where none is given), or use dp_adam.",
        )
    return FLOOR if settings.floor is None else settings.floor


class AdamFloor(Released):
    """``dp_adam_floor``."""

    def rule(self, given: Given) -> Rule:
        """Adam over √max(v̂, ξ)."""
        (beta1, beta2), floor = decays(given.settings), floor_of(given.settings)

        def denominator(second: Tensor, _at: At) -> Tensor:
            return floored(second, floor)

        return Adaptive(beta1=beta1, beta2=beta2, denominator=denominator)
