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

DP-CorrMom is momentum or Adam on means whose noise is anti-correlated across steps. The noise of
step t is w_t = z_t - λ z_(t-1); it comes with the release, from the plan's bidiagonal strategy,
and nothing here adds or scales any. What remains is a first moment: Adam's, as published, or the
heavy ball's where the plan gives ``momentum``.

References: Kingma and Ba, arXiv:1412.6980; Abadi et al., arXiv:1607.00133; Wang, An Optimization
View of DP LLM Fine-tuning, Theorems 7 to 9 (DP-CorrMom).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from affidavit.plan import Optimizer as Settings
from affidavit.trainer.optimizers.base import (
    At,
    DPOptimizer,
    Rule,
    State,
    corrected,
    smoothed,
    smoothing_of,
    std_at,
)
from affidavit.trainer.optimizers.inputs import OptimizerInputs, refused
from affidavit.trainer.optimizers.sgd import HeavyBall

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
        return torch.addcdiv(parameter, direction, denominator, value=-at.learning_rate)


def decays(settings: Settings) -> tuple[float, float]:
    """β₁ and β₂ of a plan."""
    return (
        BETA1 if settings.beta1 is None else settings.beta1,
        BETA2 if settings.beta2 is None else settings.beta2,
    )


class Adam(DPOptimizer):
    """``dp_adam``."""

    def rule(self, inputs: OptimizerInputs) -> Rule:
        """Adam with an l2 penalty."""
        beta1, beta2 = decays(inputs.settings)
        return Adaptive(beta1=beta1, beta2=beta2)


def adamw_rule(settings: Settings) -> Adaptive:
    """Adam with decoupled decay and the plan's β₁ and β₂."""
    beta1, beta2 = decays(settings)
    return Adaptive(beta1=beta1, beta2=beta2, decoupled=True)


class AdamW(DPOptimizer):
    """DP-AdamW: DP-Adam with decoupled weight decay, which never enters the moments.

        θ ← (1 - ηλ) θ - η m̂_t / (√v̂_t + 10⁻⁸)

    It is also the rule of the auxiliary tensors of DP-Muon. ``adam.moments`` and
    ``adam.update`` are its update, on a tensor that was decayed first.

    Reference: Loshchilov and Hutter, arXiv:1711.05101, Algorithm 2.
    """

    def rule(self, inputs: OptimizerInputs) -> Rule:
        """Adam with decoupled decay."""
        return adamw_rule(inputs.settings)


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
            "without a floor, an entry whose second moment is zero would be divided by zero.",
            f"Give a positive floor (default: {FLOOR:g}), or use dp_adam.",
        )
    return FLOOR if settings.floor is None else settings.floor


class AdamFloor(DPOptimizer):
    """DP-Adam with a floor: D_t = √max(v̂_t, ξ), ξ > 0 a public constant.

    It is DP-AdamBC without its subtraction: what is left when only the bound on the step length
    is wanted. Other than in DP-Adam nothing is added to the root, because ξ bounds it already.

    >>> floored(torch.tensor([4.0, 0.0]), 0.01).tolist()
    [2.0, 0.10000000149011612]

    Reference: Wang, An Optimization View of DP LLM Fine-tuning (dp-adam-ξ); arXiv:2312.14334.
    """

    def rule(self, inputs: OptimizerInputs) -> Rule:
        """Adam over √max(v̂, ξ)."""
        (beta1, beta2), floor = decays(inputs.settings), floor_of(inputs.settings)

        def denominator(second: Tensor, _at: At) -> Tensor:
            return floored(second, floor)

        return Adaptive(beta1=beta1, beta2=beta2, denominator=denominator)


def denominator(second: Tensor, *, phi: float, floor: float) -> Tensor:
    """√max(v̂ - Φ, ξ). The shape is that of v̂."""
    return floored(torch.sub(second, phi), floor)


class AdamBC(DPOptimizer):
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

    def rule(self, inputs: OptimizerInputs) -> Rule:
        """Adam over √max(v̂ - Φ, ξ)."""
        inputs.require_fixed_clip_norms()
        (beta1, beta2), floor = decays(inputs.settings), floor_of(inputs.settings)
        phi = {release.name: release.noise.second_moment(beta2) for release in inputs.releases}

        def of_step(second: Tensor, at: At) -> Tensor:
            return denominator(second, phi=std_at(phi, at), floor=floor)

        return Adaptive(beta1=beta1, beta2=beta2, denominator=of_step)


class AdamLowpass(DPOptimizer):
    """DP-Adam with a low-pass filter on the first moment, which is already private.

        θ ← θ - η f̂_t / (√v̂_t + 10⁻⁸),   f̂_t the filter of ``lowpass`` on m̂_t

    With smoothing 0 it is DP-Adam.

    Reference: Wang, An Optimization View of DP LLM Fine-tuning (dp-adam-lp).
    """

    def rule(self, inputs: OptimizerInputs) -> Rule:
        """Adam on a filtered m̂."""
        (beta1, beta2), smoothing = decays(inputs.settings), smoothing_of(inputs.settings)

        def smooth(first: Tensor, state: State, at: At) -> Tensor:
            return smoothed(first, state, smoothing=smoothing, step=at.step)

        return Adaptive(beta1=beta1, beta2=beta2, smooth=smooth)


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
            f"{settings.name} takes either momentum or Adam's moments, but the plan gives both.",
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
