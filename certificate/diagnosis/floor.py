"""A lower bound on ε where the engine that certifies has only an upper one.

Adding noise to a release is post-processing, and so is not looking at some releases. A run
whose noise is raised into the reach of the two-sided accountant, its other releases left
out, therefore costs at most what the run itself costs, and its lower bound is one of the run.
"""

from __future__ import annotations

from dataclasses import replace

from affidavit.accountants import AccountantError, FourierAccountant, parts
from affidavit.mechanisms import lower
from affidavit.plan import (
    Composed,
    Gaussian,
    Plan,
    PoissonSubsampledGaussian,
    RefusedPlan,
    Repeated,
    WithoutReplacementGaussian,
)

LEAST_NOISE = 0.2
"""The accountant's own least noise multiplier."""
DOUBLINGS = 12


def at_least(plan: Plan, delta: float) -> float:
    """A lower bound on ε, in nats, of ``plan`` at ``delta``; 0 where none is found."""
    try:
        event = lower(plan).event()
    except RefusedPlan:
        return 0.0
    known = [
        (part, times)
        for part, times in parts(event)
        if isinstance(part, Gaussian | PoissonSubsampledGaussian | WithoutReplacementGaussian)
    ]
    for doubling in range(DOUBLINGS):
        least = LEAST_NOISE * 2**doubling
        noisier = Composed(
            events=tuple(
                Repeated(
                    event=replace(part, noise_multiplier=max(part.noise_multiplier, least)),
                    count=times,
                )
                for part, times in known
            )
        )
        try:
            return FourierAccountant(relative_width=1e-3).curve(noisier).epsilon(delta).lower
        except AccountantError:
            continue
    return 0.0
