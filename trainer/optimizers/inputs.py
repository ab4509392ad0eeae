"""The inputs of an optimiser: the tensors of each release, and the noise of their means.

A step releases a clipped sum plus noise for each block; its *mean* is the release over the fixed
divisor B. ν_t is the standard deviation of the noise in one entry of the mean of step t:
σ_g C_g / B for independent noise, times the norm of row t of N for noise N z.
Φ_t = ν_t² is what the noise adds to a second moment. Momentum M_t = β M_(t-1) + G_t has
the noise Σ_s β^(t-s) w_s, whose deviation over Σ β^j is the ρ_t of DP-MuonBC. These are
constants of the plan, computed once for all T steps.

>>> noise = MeanNoise(scale=(0.5,), strategies=(None,), steps=(3,))
>>> noise.std().tolist()
[0.5, 0.5, 0.5]
>>> [round(float(std), 4) for std in noise.momentum_std(0.5, normalised=False)]
[0.5, 0.559, 0.5728]

References: arXiv:2605.12994v1, Lemma C.1 (ρ_t); arXiv:2312.14334 (Φ).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Parameter

from affidavit.mechanisms import noise_multiplier
from affidavit.mechanisms.strategies import Strategy, TooLarge
from affidavit.plan import Optimizer as Settings
from affidavit.plan import Phase, Plan, RefusedPlan, pointer_to, schedule
from affidavit.trainer.distributed.shards import Shards

Array = NDArray[np.float64]

AUXILIARY = "aux"
"""Prefix of the name of a release whose tensors are no hidden matrices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanNoise:
    """The noise of one release's mean: σ_g C_g / B, strategy and steps of each phase.

    A strategy is None if the noise of the steps is independent; phases are independent.
    """

    scale: tuple[float, ...]
    strategies: tuple[Strategy | None, ...]
    steps: tuple[int, ...]

    def std(self) -> Array:
        """Return ν_t, shape (T,)."""
        return self.momentum_std(0.0, normalised=False)

    def momentum_std(self, momentum: float, *, normalised: bool) -> Array:
        """Return the deviation of Σ_s β^(t-s) w_s, shape (T,); ``normalised`` by Σ_j<t β^j."""
        carried, result = 0.0, []
        for scale, strategy, steps in zip(self.scale, self.strategies, self.steps, strict=True):
            own = scale**2 * _momentum_variance(strategy, momentum, steps)
            result.append(own + carried * momentum ** (2.0 * np.arange(1, steps + 1)))
            carried = float(result[-1][-1])
        std = np.sqrt(np.concatenate(result))
        return std / _decayed_sum(np.ones(len(std)), momentum) if normalised else std

    def second_moment(self, decay: float) -> Array:
        """Return the expected share of the noise in Adam's v̂_t: a weighted mean of Φ_s, s ≤ t.

        Shape (T,).
        """
        phi = self.std() ** 2
        return _decayed_sum(phi, decay) / _decayed_sum(np.ones(len(phi)), decay)


def _decayed_sum(values: Array, decay: float) -> Array:
    """Return Σ_s decay^(t-s) x_s along the first axis."""
    # Imported late: it takes half a second, and few optimisers need it.
    from scipy.signal import lfilter

    return np.asarray(lfilter([1.0], [1.0, -decay], values, axis=0))


@lru_cache(maxsize=4)
def _momentum_variance(strategy: Strategy | None, momentum: float, steps: int) -> Array:
    """Return the variance of Σ_s β^(t-s) (N z)_s at unit z: squared row norms of (β^(t-s)) N.

    The result is cached because all releases of a phase share it.
    """
    if strategy is None:
        return _decayed_sum(np.ones(steps), momentum**2)
    if strategy.injected is not strategy:
        return _momentum_variance(strategy.injected, momentum, steps)
    try:
        return strategy.variances(partial(_decayed_sum, decay=momentum))
    except TooLarge:
        raise RefusedPlan.with_reason(
            code="too_large",
            pointer="/noise",
            message=f"this optimiser needs the noise of each of {strategy.steps} steps, which "
            "is only computed for Toeplitz strategies.",
            remedy="Use an optimiser that needs no noise variance (dp_sgd, dp_adam, dp_muon) "
            "without denoise, or Toeplitz noise.",
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleasedTensors:
    """The trainable tensors of one release, by name, and the noise of their means."""

    name: str
    tensors: Mapping[str, Parameter]
    noise: MeanNoise

    @property
    def auxiliary(self) -> bool:
        """Whether the release's name begins with ``aux``: its tensors are not hidden matrices."""
        return self.name.lower().startswith(AUXILIARY)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerInputs:
    """All inputs of an optimiser; all of them are public.

    ``probe_key`` (32 bytes, only for the probes of DP-MuonBC), ``newton_schulz_dtype`` (the type of
    Newton-Schulz; None is the parameters' own) and ``shards`` (tensors are then their local rows)
    are not in the plan: they change no guarantee.
    """

    plan: Plan
    releases: tuple[ReleasedTensors, ...]
    probe_key: bytes | None = None
    newton_schulz_dtype: torch.dtype | None = None
    shards: Shards | None = None

    @property
    def settings(self) -> Settings:
        """The plan's optimiser."""
        return self.plan.optimizer

    @property
    def learning_rate(self) -> float:
        """η of the plan, which must define it; raises ``RefusedPlan``."""
        if self.settings.learning_rate is None:
            raise refuse_optimizer(
                "missing_learning_rate",
                "learning_rate",
                "the plan has no learning rate.",
                "Give optimizer.learning_rate; it costs no ε, and is part of the plan's digest.",
            )
        return self.settings.learning_rate

    def require_fixed_clip_norms(self) -> None:
        """Raise ``RefusedPlan`` if clip norms are adaptive, so that ν_t is unknown beforehand."""
        if any(event.kind == "adaptive_clipping_quantile" for event in self.plan.extra):
            raise refuse_optimizer(
                "unsupported",
                "name",
                f"{self.settings.name} needs to know the noise of every step beforehand, but "
                "adaptive clip norms change it.",
                "Remove adaptive_clipping_quantile from extra, or use dp_sgd, dp_adam or dp_muon "
                "without denoise.",
            )


def optimizer_inputs(
    plan: Plan,
    tensors: Mapping[str, Mapping[str, Parameter]],
    *,
    strategies: Sequence[Strategy | None] | None = None,
    probe_key: bytes | None = None,
    newton_schulz_dtype: torch.dtype | None = None,
    shards: Shards | None = None,
) -> OptimizerInputs:
    """Build the inputs from a closed plan and its ``tensors`` by release and name.

    ``strategies`` has the injected strategy of each phase, None for independent noise. Raises
    ``ValueError`` for tensors that are not those of the plan's releases.
    """
    strategies = [None] * len(plan.phases) if strategies is None else strategies
    names = {release.name for phase in plan.phases for release in phase.releases}
    if names != tensors.keys():
        raise ValueError(f"the plan releases {sorted(names)}, not {sorted(tensors)}")
    steps = tuple(schedule.steps(plan, phase) or 0 for phase in plan.phases)
    _require_strategies(plan, strategies, steps)
    releases = tuple(
        ReleasedTensors(
            name=name,
            tensors=dict(tensors[name]),
            noise=MeanNoise(
                scale=tuple(_scale(plan, phase, name) for phase in plan.phases),
                strategies=tuple(strategies),
                steps=steps,
            ),
        )
        for name in tensors
    )
    return OptimizerInputs(
        plan=plan,
        releases=releases,
        probe_key=probe_key,
        newton_schulz_dtype=newton_schulz_dtype,
        shards=shards,
    )


def refuse_optimizer(code: str, field: str, message: str, remedy: str) -> RefusedPlan:
    """Return a refusal that points to a field of the plan's optimiser."""
    pointer = pointer_to("optimizer", field)
    return RefusedPlan.with_reason(code=code, pointer=pointer, message=message, remedy=remedy)


def _require_strategies(
    plan: Plan, strategies: Sequence[Strategy | None], steps: Sequence[int]
) -> None:
    for phase, strategy, length in zip(plan.phases, strategies, steps, strict=True):
        if (phase.noise.kind == "independent") != (strategy is None):
            raise ValueError(f"noise {phase.noise.kind}: give a strategy for correlated noise only")
        if strategy is not None and strategy.steps != length:
            raise ValueError(f"a strategy of {strategy.steps} steps in a phase of {length}")


def _scale(plan: Plan, phase: Phase, name: str) -> float:
    """Return σ_g C_g / B of a release in a phase of a closed plan."""
    (release,) = (release for release in phase.releases if release.name == name)
    divisor = schedule.divisor(plan, phase)
    assert divisor is not None  # a run is bound to a plan that says it
    return float(noise_multiplier(release)) * release.clip_norm / float(divisor)
