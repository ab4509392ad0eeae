"""DP-SGD: heavy-ball momentum and weight decay on the noisy mean.

    d_t = G̃_t + λ θ,   M_t = β M_(t-1) + d_t,   θ ← θ - η M_t,   M_0 = 0

as in ``torch.optim.SGD``; the weight decay λ is an l2 penalty. It is also the rule of DP-CorrSGD,
of DP-Dice and of the matrix mechanisms, whose difference lies in what is released: the noise
w = N z of exactly the certified strategy comes with the mean. Some public trainers multiply it
here once more by the weighting Λ_τ that the strategy was *chosen* by, which leaves far less noise
than was accounted; nothing here touches it.

>>> theta, buffer = update(torch.tensor(1.0), torch.tensor(0.5), None, learning_rate=0.1)
>>> round(float(theta), 6), buffer is None
(0.95, True)

References: Abadi et al., arXiv:1607.00133, Algorithm 1; Wang, An Optimization View of DP LLM
Fine-tuning, Theorems 7 to 9 (CorrSGD); arXiv:2202.08312, arXiv:2211.06530 (matrix mechanisms);
arXiv:2302.01463 (Λ_τ).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from affidavit.trainer.optimizers.base import At, DPOptimizer, Rule, State, smoothed, smoothing_of
from affidavit.trainer.optimizers.inputs import OptimizerInputs


def update(
    parameter: Tensor,
    mean: Tensor,
    buffer: Tensor | None,
    *,
    learning_rate: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """θ and M after one step; ``buffer`` is M, None before the first step and without momentum.

    All of the parameter's shape.
    """
    direction = torch.add(mean, parameter, alpha=weight_decay) if weight_decay else mean
    if momentum:
        direction = buffer = direction if buffer is None else buffer * momentum + direction
    return torch.add(parameter, direction, alpha=-learning_rate), buffer


@dataclass(frozen=True, slots=True)
class HeavyBall:
    """The rule; the state is ``momentum``."""

    momentum: float

    def __call__(self, parameter: Tensor, mean: Tensor, state: State, at: At) -> Tensor:
        """The next value of ``parameter``."""
        result, buffer = update(
            parameter,
            mean,
            state.get("momentum"),
            learning_rate=at.learning_rate,
            momentum=self.momentum,
            weight_decay=at.weight_decay,
        )
        if buffer is not None:
            # The first buffer may be the mean itself, which is the caller's.
            state["momentum"] = buffer.clone() if buffer is mean else buffer
        return result


class SGD(DPOptimizer):
    """``dp_sgd``; momentum is 0 where the plan gives none."""

    def rule(self, inputs: OptimizerInputs) -> Rule:
        """Heavy ball."""
        return HeavyBall(inputs.settings.momentum or 0.0)


class SGDLowpass(DPOptimizer):
    """DP-SGD with a low-pass filter: the noisy mean is smoothed, then momentum and weight decay.

        G̃_t → f̂_t (``lowpass``),   d_t = f̂_t + λ θ,   M_t = β M_(t-1) + d_t,   θ ← θ - η M_t

    With smoothing 0 it is DP-SGD.

    Reference: Zhang, Bu, Hong and Razaviyayn, DOPPLER, NeurIPS 2024, Algorithm 1.
    """

    def rule(self, inputs: OptimizerInputs) -> Rule:
        """Heavy ball on the filtered mean."""
        smoothing = smoothing_of(inputs.settings)
        heavy_ball = HeavyBall(inputs.settings.momentum or 0.0)

        def filtered(parameter: Tensor, mean: Tensor, state: State, at: At) -> Tensor:
            smooth = smoothed(mean, state, smoothing=smoothing, step=at.step)
            return heavy_ball(parameter, smooth, state, at)

        return filtered
