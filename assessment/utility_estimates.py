"""The utility figures of a closed plan: information for the user, never a guarantee.

There is one entry for each release of a phase with a known divisor B. Figures that need the number
of entries of a block are left out if the plan does not give its ``dimension``. The errors of other
correlated noise than bidiagonal are in ``strategy``. With adaptive clip norms the figures hold at
the plan's own clip norm.

References: ``affidavit.mechanisms.utility`` and ``affidavit.mechanisms.newton_schulz`` have the
formulas and units.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

from affidavit.assessment.assessment import Caveat
from affidavit.mechanisms import newton_schulz, noise_multiplier, utility
from affidavit.plan import Bidiagonal, Independent, Phase, Plan, Release, schedule

DEFAULT_MOMENTUM = 0.95
"""The published momentum of DP-Muon, for a plan that does not give it."""
MUON_OPTIMIZERS = frozenset({"dp_muon", "dp_muonbc"})
AUXILIARY_PREFIX = "aux"
"""The prefix of the name of the release of all tensors that are not matrices."""


def figures_of(closed: Plan) -> tuple[dict[str, Any], ...]:
    """Return the figures of every release of ``closed``, a plan without unknowns."""
    result = []
    for index, phase in enumerate(closed.phases):
        divisor, steps = schedule.divisor(closed, phase), schedule.steps(closed, phase)
        if divisor is None or steps is None:
            continue
        for release in phase.releases:
            entry = _release_figures(closed, phase, release, float(divisor), steps)
            if len(entry) > 1:
                result.append(entry if len(closed.phases) == 1 else {"phase": index, **entry})
    return tuple(result)


def warnings_of(figures: tuple[dict[str, Any], ...]) -> tuple[Caveat, ...]:
    """Return warnings about settings to change before training; they change no guarantee."""
    return tuple(
        Caveat(
            code="newton_schulz_start",
            message=f"the noise in the momentum of {entry['release']} is predicted to have "
            f"‖M‖_F = {entry['momentum_norm']:.3g}, below 1, so Newton-Schulz starts from M "
            f"itself: {entry['newton_schulz']['steps']} steps multiply it by about "
            f"{entry['newton_schulz']['gain']:.3g} and hardly orthogonalise (singular values of "
            f"about {entry['newton_schulz']['singular_value']:.2g} instead of 1). "
            "newton_schulz_start: frobenius normalises first, at no cost in privacy.",
        )
        for entry in figures
        if "newton_schulz" in entry
        and entry["newton_schulz"]["start"] == "paper"
        and entry["momentum_norm"] < 1
    )


def _release_figures(
    plan: Plan, phase: Phase, release: Release, divisor: float, steps: int
) -> dict[str, Any]:
    result: dict[str, Any] = {"release": release.name}
    try:
        sigma = float(noise_multiplier(release))
        nu = utility.noise_std_of_the_mean(
            noise_multiplier=sigma, clip_norm=release.clip_norm, divisor=divisor
        )
    except ArithmeticError:
        return result
    match phase.noise:
        case Independent():
            result |= _finite(
                noise_std_of_mean=lambda: nu,
                phi=lambda: nu**2,
                prefix_sum_std=lambda: utility.prefix_sum_std(nu, steps=steps),
            )
        case Bidiagonal(lambda_=float(lambda_), normalized=False):
            return result | _finite(
                noise_std_of_mean=lambda: nu * math.hypot(1, lambda_),
                prefix_sum_std=lambda: utility.prefix_sum_std(nu, steps=steps, lambda_=lambda_),
            )
        case _:
            return result
    entries = release.dimension
    if entries is not None:
        result |= _finite(
            signal_to_noise_at_most=lambda: utility.most_signal_to_noise(
                noise_multiplier=sigma, divisor=divisor, entries=entries
            ),
            noise_share_at_least=lambda: utility.least_noise_share(
                noise_multiplier=sigma, divisor=divisor, entries=entries
            ),
        )
        is_matrix = not release.name.lower().startswith(AUXILIARY_PREFIX)
        if plan.optimizer.name in MUON_OPTIMIZERS and is_matrix:
            result |= _muon_figures(plan, entries, nu, steps)
    return result


def _finite(**figures: Callable[[], float]) -> dict[str, float]:
    """Return the figures that are finite doubles; the others are left out."""
    result = {}
    for name, figure in figures.items():
        with contextlib.suppress(ArithmeticError):
            value = figure()
            if math.isfinite(value):
                result[name] = value
    return result


def _muon_figures(plan: Plan, entries: int, nu: float, steps: int) -> dict[str, Any]:
    optimizer = plan.optimizer
    corrected = optimizer.name == "dp_muonbc"
    momentum = DEFAULT_MOMENTUM if optimizer.momentum is None else optimizer.momentum
    degree = optimizer.newton_schulz_degree or newton_schulz.DEFAULT_DEGREE
    iterations = optimizer.newton_schulz_steps or newton_schulz.DEFAULT_STEPS
    start = optimizer.newton_schulz_start or "paper"
    result: dict[str, Any] = _finite(
        momentum_norm=lambda: utility.momentum_norm(
            nu, entries=entries, momentum=momentum, steps=steps, normalised=corrected
        )
    )
    if result:
        result["newton_schulz"] = {
            "start": start,
            "degree": degree,
            "steps": iterations,
            "gain": newton_schulz.gain(degree=degree, steps=iterations),
            "singular_value": newton_schulz.typical_singular_value(
                result["momentum_norm"],
                entries=entries,
                degree=degree,
                steps=iterations,
                start=start,
            ),
        }
    if corrected:
        result |= _finite(probe_std=lambda: utility.probe_std(nu, momentum=momentum, steps=steps))
    return result
