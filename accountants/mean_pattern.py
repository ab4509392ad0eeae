"""A run without a record against the run with it, where the record samples columns step by step.

With Γ_πρ = ⟨|C|π, |C|ρ⟩/σ² and X_π normal with these covariances, the likelihood ratio of the run
is L = E_π exp(X_π - Γ_ππ/2), and at least exp(E_π X_π - E_π Γ_ππ/2) by Jensen's inequality. So this
order costs no more than one Gaussian mechanism that moves by the mean pattern and a constant more,
half the variance of |C|π over σ².

>>> from affidavit.accountants.registry import accountant
>>> run = events.SampledColumns(
...     products=(1.0, 0.5), sampling_probability=0.1, separation=5, steps=100, noise_multiplier=2
... )
>>> round(without_record(run, (accountant("gaussian"),)).epsilon(1e-6).upper, 2)
3.13

Reference: docs/theorems/correlated-noise.md, Theorem 30.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.bracketing_curves import FirstAvailableCurve
from affidavit.accountants.protocol import Accountant, PrivacyCurve
from affidavit.accountants.rounding import Array
from affidavit.plan import events

_MAX_STEPS = 1 << 13
_ROUNDING = 1e-9
"""Relative allowance for chances that are computed one after the other, and their sums."""


def without_record(event: events.Event, engines: Sequence[Accountant]) -> RaisedCurve | None:
    """Return the upper ends of ``event`` without the record against it, by ``engines``.

    None if a run of columns in it has too many steps.
    """
    parts = event.events if isinstance(event, events.Composed) else (event,)
    shown, more = [], 0.0
    for part in parts:
        if not isinstance(part, events.SampledColumns):
            shown.append(part)
        elif part.steps > _MAX_STEPS:
            return None
        else:
            mean, variance = _mean_pattern(replace(part, noise_multiplier=1.0))
            scale, units = (1 + _ROUNDING) / part.noise_multiplier**2, part.records_per_unit
            mu = units * math.sqrt(mean * scale)
            shown.append(events.Gaussian(noise_multiplier=(1 - _ROUNDING) / mu))
            more += units * variance * scale / 2
    curve = FirstAvailableCurve(event=events.Composed(events=tuple(shown)), engines=engines)
    return RaisedCurve(curve=curve, more=more * (1 + _ROUNDING))


@lru_cache(maxsize=32)
def _mean_pattern(run: events.SampledColumns) -> tuple[float, float]:
    """Return bounds of ‖|C| E π‖², and of the variance of |C|π, of one record of ``run``."""
    steps, separation = run.steps, run.separation
    products = np.full(steps, run.beyond)
    shown = run.products[:steps]
    products[: len(shown)] = shown
    drawn = _chances(run.sampling_probability, separation, steps)
    again = np.zeros(steps)
    again[separation:] = drawn[: max(0, steps - separation)]
    mean, variance = 0.0, 0.0
    for lag in np.flatnonzero(products):
        first, later = drawn[: steps - lag], drawn[lag:]
        pairs = 1.0 if lag == 0 else 2.0
        mean += pairs * products[lag] * float(first @ later)
        together = np.maximum((again[lag] if lag else 1.0) - later, 0.0)
        variance += pairs * products[lag] * float(first @ together)
    return mean, float(variance)


def _chances(probability: float, separation: int, steps: int) -> Array:
    """Return the probability of each step for a record that waits for none at first."""
    drawn = np.zeros(steps)
    waiting = 0.0
    for step in range(steps):
        drawn[step] = probability * max(0.0, 1.0 - waiting)
        waiting += drawn[step]
        if step >= separation - 1:
            waiting -= drawn[step - separation + 1]
    return drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class RaisedCurve:
    """The upper ends of ``curve``, at an ε that is larger by ``more`` nats."""

    curve: PrivacyCurve
    more: float

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[0, ε]`` (nats) at ``delta``; raises like ``curve``."""
        upper = self.curve.epsilon(delta).upper + self.more
        return Bracket(lower=0.0, upper=upper * (1 + 2.0**-52))

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[0, δ]`` at ``epsilon`` (nats); raises like ``curve``."""
        left = (epsilon - self.more) * (1 - 2.0**-52)
        upper = self.curve.delta(max(0.0, left)).upper - math.expm1(min(0.0, left))
        return Bracket(lower=0.0, upper=min(1.0, upper * (1 + 2.0**-50)))
