"""DP-SGD: heavy-ball momentum and weight decay on the noisy mean.

    d_t = G̃_t + λ θ,   M_t = β M_(t-1) + d_t,   θ ← θ - η M_t,   M_0 = 0

as in ``torch.optim.SGD``; the weight decay λ is an l2 penalty. It is also the rule of
DP-CorrSGD and of the matrix mechanisms, whose difference lies in the noise.

>>> theta, buffer = update(torch.tensor(1.0), torch.tensor(0.5), None, learning_rate=0.1)
>>> round(float(theta), 6), buffer is None
(0.95, True)

Reference: Abadi et al., arXiv:1607.00133, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from affidavit.trainer.optimizers.given import Given
from affidavit.trainer.optimizers.released import At, Released, Rule, State


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
        found, buffer = update(
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
        return found


class SGD(Released):
    """``dp_sgd``; momentum is 0 where the plan gives none."""

    def rule(self, given: Given) -> Rule:
        """Heavy ball."""
        return HeavyBall(given.settings.momentum or 0.0)
