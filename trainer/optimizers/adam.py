"""DP-Adam: both moments of the noisy mean, with bias correction.

    m_t = β₁ m_(t-1) + (1-β₁) g_t,   v_t = β₂ v_(t-1) + (1-β₂) g_t²,
    m̂_t = m_t / (1-β₁^t),   v̂_t = v_t / (1-β₂^t),   θ ← θ - η m̂_t / D_t

with D_t = √v̂_t + 10⁻⁸, as in ``torch.optim.Adam``, where weight decay λ is an l2 penalty:
g_t = G̃_t + λ θ. With ``decoupled`` decay (AdamW) g_t = G̃_t and θ first becomes (1 - ηλ) θ.
The relatives of DP-Adam differ in D_t, or filter m̂_t further; they give it as a function.

>>> rule, state = Adaptive(beta1=0.9, beta2=0.999), {}
>>> at = At(release="all", step=1, learning_rate=0.1, weight_decay=0.0)
>>> round(float(rule(torch.tensor(1.0), torch.tensor(0.5), state, at)), 6)
0.9

References: Kingma and Ba, arXiv:1412.6980; Abadi et al., arXiv:1607.00133.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from affidavit.plan import Optimizer as Settings
from affidavit.trainer.optimizers.given import Given
from affidavit.trainer.optimizers.released import At, Released, Rule, State

BETA1, BETA2 = 0.9, 0.999
"""Decays of a plan that gives none."""
EPSILON = 1e-8
"""What is added to √v̂, in units of an entry of the mean."""


def moments(
    mean: Tensor, first: Tensor | None, second: Tensor | None, *, beta1: float, beta2: float
) -> tuple[Tensor, Tensor]:
    """m and v after one step; None is zero. All of the parameter's shape."""
    first = torch.zeros_like(mean) if first is None else first
    second = torch.zeros_like(mean) if second is None else second
    return (
        torch.add(first * beta1, mean, alpha=1 - beta1),
        torch.addcmul(second * beta2, mean, mean, value=1 - beta2),
    )


def corrected(moment: Tensor, decay: float, step: int) -> Tensor:
    """A moment over 1 - decay^t, exact for decays near 1. Its shape stays."""
    return moment / -math.expm1(step * math.log(decay)) if decay else moment


def update(
    parameter: Tensor, first: Tensor, denominator: Tensor, *, learning_rate: float
) -> Tensor:
    """θ - η m̂ / D; all of one shape."""
    return torch.addcdiv(parameter, first, denominator, value=-learning_rate)


def root_plus_epsilon(second: Tensor, _at: At) -> Tensor:
    """D_t of Adam: √v̂ + ``EPSILON``, in the shape of v̂."""
    return second.sqrt().add_(EPSILON)


def unfiltered(first: Tensor, _state: State, _at: At) -> Tensor:
    """m̂_t as it is, in its shape."""
    return first


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptive:
    """The rule; the state is ``first`` and ``second``, and what ``smooth`` keeps."""

    beta1: float
    beta2: float
    decoupled: bool = False
    denominator: Callable[[Tensor, At], Tensor] = root_plus_epsilon
    smooth: Callable[[Tensor, State, At], Tensor] = unfiltered

    def __call__(self, parameter: Tensor, mean: Tensor, state: State, at: At) -> Tensor:
        """The next value of ``parameter``."""
        if at.weight_decay:
            if self.decoupled:
                parameter = parameter * (1 - at.learning_rate * at.weight_decay)
            else:
                mean = torch.add(mean, parameter, alpha=at.weight_decay)
        first, second = moments(
            mean, state.get("first"), state.get("second"), beta1=self.beta1, beta2=self.beta2
        )
        state["first"], state["second"] = first, second
        direction = self.smooth(corrected(first, self.beta1, at.step), state, at)
        denominator = self.denominator(corrected(second, self.beta2, at.step), at)
        return update(parameter, direction, denominator, learning_rate=at.learning_rate)


def decays(settings: Settings) -> tuple[float, float]:
    """β₁ and β₂ of a plan."""
    return (
        BETA1 if settings.beta1 is None else settings.beta1,
        BETA2 if settings.beta2 is None else settings.beta2,
    )


class Adam(Released):
    """``dp_adam``."""

    def rule(self, given: Given) -> Rule:
        """Adam with an l2 penalty."""
        beta1, beta2 = decays(given.settings)
        return Adaptive(beta1=beta1, beta2=beta2)
