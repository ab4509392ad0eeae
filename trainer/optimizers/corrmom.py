"""DP-CorrMom: momentum or Adam on means whose noise is anti-correlated across steps.

The noise of step t is w_t = z_t - λ z_(t-1); it comes with the release, from the plan's
bidiagonal strategy, and nothing here adds or scales any. What remains is a first moment:
Adam's, as published, or the heavy ball's where the plan gives ``momentum``.

Reference: Wang, An Optimization View of DP LLM Fine-tuning, Theorems 7 to 9.
"""

from __future__ import annotations

from affidavit.trainer.optimizers.adam import Adaptive, decays
from affidavit.trainer.optimizers.base import DPOptimizer, Rule
from affidavit.trainer.optimizers.inputs import OptimizerInputs, refused
from affidavit.trainer.optimizers.sgd import HeavyBall


def rule_of(inputs: OptimizerInputs, *, without_any: str) -> Rule:
    """Heavy ball for ``momentum``, Adam for a β; ``without_any`` says which where neither is.

    Raises ``RefusedPlan`` where the plan gives both.
    """
    settings = inputs.settings
    adaptive = settings.beta1 is not None or settings.beta2 is not None
    if settings.momentum is not None and adaptive:
        raise refused(
            "conflict",
            "momentum",
            f"{settings.name} is run with the heavy ball's momentum or with Adam's moments, and "
            "the plan gives both.",
            "Give momentum alone, or beta1 and beta2 alone.",
        )
    if adaptive or (settings.momentum is None and without_any == "adam"):
        beta1, beta2 = decays(settings)
        return Adaptive(beta1=beta1, beta2=beta2)
    return HeavyBall(settings.momentum or 0.0)


class CorrMom(DPOptimizer):
    """``dp_corrmom``."""

    def rule(self, inputs: OptimizerInputs) -> Rule:
        """Adam, unless the plan gives ``momentum``."""
        return rule_of(inputs, without_any="adam")
