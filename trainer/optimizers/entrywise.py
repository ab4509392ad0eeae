"""Optimisers that act on each entry: DP-SGD, DP-Adam, and variants of them.

**Heavy ball**, as in ``torch.optim.SGD``; the weight decay λ is an l2 penalty:

    d_t = G̃_t + λ θ,   M_t = β M_(t-1) + d_t,   θ ← θ - η M_t,   M_0 = 0

It is also the rule of DP-CorrSGD, of DP-Dice and of the matrix mechanisms, which differ in
their releases: the mean includes the noise w = N z of the certified strategy. Some
public trainers multiply it again by the weighting Λ_τ that the strategy was *chosen* by,
which leaves far less noise than was accounted. This code does not.
**Adam**, as in ``torch.optim.Adam``, with g_t = G̃_t + λ θ:

    m_t = β₁ m_(t-1) + (1-β₁) g_t,   v_t = β₂ v_(t-1) + (1-β₂) g_t²,
    m̂_t = m_t / (1-β₁^t),   v̂_t = v_t / (1-β₂^t),   θ ← θ - η m̂_t / D_t,   D_t = √v̂_t + 10⁻⁸

==================  ============================================================================
``dp_adamw``        ``decoupled`` decay, which never enters the moments: g_t = G̃_t, and θ first
                    becomes (1 - ηλ) θ. Also the rule of the auxiliary tensors of DP-Muon
``dp_adam_floor``   D_t = √max(v̂_t, ξ), ξ > 0 a public constant; nothing is added to the root
``dp_adambc``       D_t = √max(v̂_t - Φ, ξ): without the noise's share of the second moment,
                    Φ = (σ_g C_g / B)², a public constant of the block. If the noise changes from
                    step to step, the mean of E v̂_t is subtracted: Σ_s β₂^(t-s) Φ_s / Σ_s β₂^(t-s)
``dp_adam_lowpass`` m̂_t is filtered further; ``dp_sgd_lowpass`` filters G̃_t first
``dp_corrmom``      Adam, or the heavy ball if the plan gives ``momentum``, on means whose released
                    noise is anti-correlated across steps, w_t = z_t - λ z_(t-1)
==================  ============================================================================

The filter is the causal low-pass of first order,

    f_t = s f_(t-1) + (1-s) x_t,   f_0 = 0,   f̂_t = f_t / (1 - s^t)

With the division, the weights of x_1..x_t sum to one from the first step on. s = 0 leaves x
unchanged.

>>> states: list[State] = [{}]
>>> [round(float(low_pass([torch.tensor(x)], states, smoothing=0.5, step=t)[0]), 4)
...  for t, x in enumerate((1.0, 4.0), start=1)]
[1.0, 3.0]
>>> at = Update(release="all", step=1, learning_rate=0.1, weight_decay=0.0)
>>> for rule in (Adam(beta1=0.9, beta2=0.999), HeavyBall(0.0)):
...     parameter = torch.tensor(1.0)
...     rule([parameter], [torch.tensor(0.5)], [{}], at)
...     round(float(parameter), 6)
0.9
0.95

References: Abadi et al., arXiv:1607.00133, Algorithm 1; Kingma and Ba, arXiv:1412.6980; Loshchilov
and Hutter, arXiv:1711.05101, Algorithm 2; Tang, Shpilevskiy and Lécuyer, arXiv:2312.14334,
Algorithm 1 (Φ); Wang, An Optimization View of DP LLM Fine-tuning, Theorems 1 (Φ) and 7 to 9
(CorrSGD, CorrMom), dp-adam-ξ, dp-adam-lp; Zhang, Bu, Hong and Razaviyayn, DOPPLER, NeurIPS 2024,
Algorithm 1, with a₁ = -s, b₀ = 1-s (low-pass); arXiv:2202.08312, arXiv:2211.06530 (matrix
mechanisms); arXiv:2302.01463 (Λ_τ).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from affidavit.plan import Optimizer as Settings
from affidavit.trainer.optimizers.base import DPOptimizer, Rule, State, Tensors, Update, std_at
from affidavit.trainer.optimizers.inputs import Array, OptimizerInputs, refuse_optimizer

BETA1, BETA2 = 0.9, 0.999
"""Default decays."""
EPSILON = 1e-8
"""Added to √v̂, in units of an entry of the mean."""
FLOOR = 1e-8
"""Default ξ: the smallest value of the published sweep at ρ near 1 (Table 1)."""
SMOOTHING = 0.9
"""Default s."""


def bias_corrected(moments: Tensors, decay: float, step: int) -> Tensors:
    """Divide moments by 1 - decay^t, accurately for decays near 1. Shapes stay."""
    return torch._foreach_div(moments, -math.expm1(step * math.log(decay))) if decay else moments


def low_pass(values: Tensors, states: Sequence[State], *, smoothing: float, step: int) -> Tensors:
    """Return f̂_t of each tensor; the state is ``filtered``. The shapes are those of ``values``."""
    if not smoothing:
        return values
    before = torch._foreach_mul(_stored("filtered", states, values), smoothing)
    filtered = torch._foreach_add(before, values, alpha=1 - smoothing)
    _store("filtered", states, filtered)
    return bias_corrected(filtered, smoothing, step)


def _stored(name: str, states: Sequence[State], like: Tensors) -> Tensors:
    """Return what each state has by this name, or zeros."""
    return [
        state[name] if name in state else torch.zeros_like(item)
        for state, item in zip(states, like, strict=True)
    ]


def _store(name: str, states: Sequence[State], values: Iterable[Tensor]) -> None:
    for state, item in zip(states, values, strict=True):
        state[name] = item


@dataclass(frozen=True, slots=True)
class HeavyBall:
    """Heavy ball with decay β, and a filter s on the mean.

    The state is ``momentum``, ``filtered``.
    """

    momentum: float
    smoothing: float = 0.0

    def __call__(
        self, parameters: Tensors, means: Tensors, states: Sequence[State], at: Update
    ) -> None:
        """Update ``parameters`` in place."""
        means = directions = low_pass(means, states, smoothing=self.smoothing, step=at.step)
        if at.weight_decay:
            directions = torch._foreach_add(means, parameters, alpha=at.weight_decay)
        if self.momentum:
            if all("momentum" in state for state in states):
                before = [state["momentum"] for state in states]
                directions = torch._foreach_add(
                    torch._foreach_mul(before, self.momentum), directions
                )
            # The first buffers may be the means themselves, which belong to the caller.
            stored = [item.clone() for item in directions] if directions is means else directions
            _store("momentum", states, stored)
        torch._foreach_add_(parameters, directions, alpha=-at.learning_rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """Adam with β₁ and β₂; the state is ``first``, ``second`` and ``filtered``.

    ``floor`` is ξ, and ``phi`` is subtracted for each release at each step, (T,).
    """

    beta1: float
    beta2: float
    decoupled: bool = False
    smoothing: float = 0.0
    floor: float | None = None
    phi: dict[str, Array] | None = None

    def __call__(
        self, parameters: Tensors, means: Tensors, states: Sequence[State], at: Update
    ) -> None:
        """Update ``parameters`` in place."""
        if at.weight_decay and not self.decoupled:
            means = torch._foreach_add(means, parameters, alpha=at.weight_decay)
        before = torch._foreach_mul(_stored("first", states, means), self.beta1)
        first = torch._foreach_add(before, means, alpha=1 - self.beta1)
        before = torch._foreach_mul(_stored("second", states, means), self.beta2)
        second = torch._foreach_addcmul(before, means, means, value=1 - self.beta2)
        _store("first", states, first)
        _store("second", states, second)
        directions = low_pass(
            bias_corrected(first, self.beta1, at.step),
            states,
            smoothing=self.smoothing,
            step=at.step,
        )
        denominators = self._denominators(bias_corrected(second, self.beta2, at.step), at)
        if at.weight_decay and self.decoupled:
            torch._foreach_mul_(parameters, 1 - at.learning_rate * at.weight_decay)
        torch._foreach_addcdiv_(parameters, directions, denominators, value=-at.learning_rate)

    def _denominators(self, second: Tensors, at: Update) -> Tensors:
        if self.floor is None:
            result = torch._foreach_sqrt(second)
            torch._foreach_add_(result, EPSILON)
            return result
        if self.phi is not None:
            second = torch._foreach_sub(second, std_at(self.phi, at))
        return torch._foreach_sqrt(torch._foreach_clamp_min(second, self.floor))


def heavy_ball(inputs: OptimizerInputs, smoothing: float = 0.0) -> HeavyBall:
    """Return the heavy ball, by default without momentum."""
    return HeavyBall(inputs.settings.momentum or 0.0, smoothing)


def adam(inputs: OptimizerInputs, *, decoupled: bool = False, smoothing: float = 0.0) -> Adam:
    """Return Adam with the plan's β₁ and β₂."""
    settings = inputs.settings
    return Adam(
        beta1=BETA1 if settings.beta1 is None else settings.beta1,
        beta2=BETA2 if settings.beta2 is None else settings.beta2,
        decoupled=decoupled,
        smoothing=smoothing,
    )


def heavy_ball_or_adam(inputs: OptimizerInputs, *, without_any: Callable[..., Rule]) -> Rule:
    """Return the heavy ball for ``momentum``, Adam for a β, and ``without_any`` otherwise.

    Raises ``RefusedPlan`` if the plan gives both momentum and a β.
    """
    settings = inputs.settings
    adaptive = settings.beta1 is not None or settings.beta2 is not None
    if settings.momentum is not None and adaptive:
        raise refuse_optimizer(
            "conflict",
            "momentum",
            f"{settings.name} takes either momentum or Adam's moments, but the plan gives both.",
            "Give momentum alone, or beta1 and beta2 alone.",
        )
    if settings.momentum is None:
        return adam(inputs) if adaptive else without_any(inputs)
    return heavy_ball(inputs)


def _smoothing_of(settings: Settings) -> float:
    return SMOOTHING if settings.smoothing is None else settings.smoothing


def _adam_with_floor(inputs: OptimizerInputs, phi: dict[str, Array] | None = None) -> Rule:
    """Return Adam with √max(v̂ - Φ, ξ) as denominator; raises ``RefusedPlan`` for ξ = 0."""
    floor = inputs.settings.floor
    if floor == 0:
        raise refuse_optimizer(
            "unsupported",
            "floor",
            "without a floor, an entry whose second moment is zero would be divided by zero.",
            f"Give a positive floor (default: {FLOOR:g}), or use dp_adam.",
        )
    return replace(adam(inputs), floor=FLOOR if floor is None else floor, phi=phi)


def _adam_bias_corrected(inputs: OptimizerInputs) -> Rule:
    inputs.require_fixed_clip_norms()
    beta2 = adam(inputs).beta2
    return _adam_with_floor(
        inputs, {of.name: of.noise.second_moment(beta2) for of in inputs.releases}
    )


RULES: dict[str, Callable[[OptimizerInputs], Rule]] = {
    "dp_sgd": heavy_ball,
    "dp_sgd_lowpass": lambda inputs: heavy_ball(inputs, _smoothing_of(inputs.settings)),
    "dp_adam": adam,
    "dp_adamw": lambda inputs: adam(inputs, decoupled=True),
    "dp_adambc": _adam_bias_corrected,
    "dp_adam_floor": _adam_with_floor,
    "dp_adam_lowpass": lambda inputs: adam(inputs, smoothing=_smoothing_of(inputs.settings)),
    "dp_corrmom": lambda inputs: heavy_ball_or_adam(inputs, without_any=adam),
    "dp_corrsgd": heavy_ball,
    "dp_dice": heavy_ball,
    "dp_matrix_se": heavy_ball,
    "dp_matrix_se_lambda": heavy_ball,
    "dp_matrix_me": heavy_ball,
    "dp_matrix_me_lambda": heavy_ball,
}


class EntryWise(DPOptimizer):
    """The optimiser of each name in ``RULES``."""

    def rule(self, inputs: OptimizerInputs) -> Rule:
        """Return the rule of the plan's optimiser."""
        return RULES[inputs.settings.name](inputs)
