"""DP-DiSK: a simplified Kalman filter on releases of combined gradients.

    release of step t:  Σ_i clip(c g_i(θ_t + γ d_(t-1)) + (1-c) g_i(θ_t), C) + noise,
    c = (1-κ)/(κγ),  d_t = θ_(t+1) - θ_t,  d_0 = 0
    g̃_t = (1-κ) g̃_(t-1) + κ G̃_t,   g̃_0 = G̃_1,   then a descent step along g̃_t

The filter is here. The loop combines the gradients before it clips: it reads the weights from
``points`` and, for each point, moves the parameters there while it computes every record's
gradient. The records' two gradients are combined *before* the one clipping, and the
noise is σC undivided; both points depend on released values only.

References: Zhang et al., arXiv:2410.03883; Zaki, MSc thesis, Helsinki 2025, Algorithm 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from affidavit.mechanisms import DEFAULT_GAMMA, DEFAULT_KAPPA, lookahead_weight
from affidavit.trainer.optimizers.base import DPOptimizer, Rule, Update
from affidavit.trainer.optimizers.entrywise import heavy_ball, heavy_ball_or_adam
from affidavit.trainer.optimizers.inputs import OptimizerInputs


def filter_mean(mean: Tensor, before: Tensor | None, *, kappa: float) -> Tensor:
    """Return g̃_t from G̃_t and g̃_(t-1), which is None in the first step; all of one shape."""
    return mean.clone() if before is None else torch.add(before * (1 - kappa), mean, alpha=kappa)


@dataclass(frozen=True, slots=True)
class Point:
    """A point where gradients are taken, and its weight in the combination.

    Inside ``with point.activate():``, the parameters are at the point. Afterwards they are restored
    bit for bit, also after a failure.
    """

    weight: float
    activate: Callable[[], AbstractContextManager[None]]


class DiSK(DPOptimizer):
    """``dp_disk``; the loop combines gradients at ``points()`` before it clips."""

    def __init__(self, inputs: OptimizerInputs) -> None:
        super().__init__(inputs)
        self._kappa, self._gamma = (
            inputs.settings.kappa or DEFAULT_KAPPA,
            inputs.settings.gamma or DEFAULT_GAMMA,
        )
        self._ahead = lookahead_weight(inputs.plan)

    def rule(self, inputs: OptimizerInputs) -> Rule:
        """Return the update after the filter."""
        return heavy_ball_or_adam(inputs, without_any=heavy_ball)

    def points(self) -> tuple[Point, ...]:
        """Return the points of the next step with their weights, which sum to 1, without zeros.

        In the first step d_0 = 0, so there is one point of weight 1.
        """
        if not self.state:
            return (Point(1.0, nullcontext),)
        both = (Point(self._ahead, self._at_point_ahead), Point(1 - self._ahead, nullcontext))
        return tuple(point for point in both if point.weight)

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    @contextmanager
    def _at_point_ahead(self) -> Iterator[None]:
        before = [(parameter, parameter.detach().clone()) for parameter in self._parameters()]
        try:
            with torch.no_grad():
                for parameter, _ in before:
                    parameter.add_(self.state[parameter]["direction"], alpha=self._gamma)
            yield
        finally:
            with torch.no_grad():
                for parameter, value in before:
                    parameter.copy_(value)

    def _update(self, parameters: list[Tensor], means: list[Tensor], at: Update) -> None:
        smooth = []
        for parameter, mean in zip(parameters, means, strict=True):
            state = self.state[parameter]
            state["filtered"] = filter_mean(mean, state.get("filtered"), kappa=self._kappa)
            state["direction"] = parameter.detach().clone()
            smooth.append(state["filtered"])
        super()._update(parameters, smooth, at)
        for parameter in parameters:
            before = self.state[parameter]["direction"]
            self.state[parameter]["direction"] = parameter.detach() - before
