"""About ε and δ in a millisecond, by the saddle point: where a search begins, never a bound.

The leading term of the saddle-point expansion is within some per cent of δ where many
releases are composed, and anything where the loss is a few rare jumps. The larger of the
directions is taken, as the accountant takes the larger bracket. Source: ``saddle``.

>>> from affidavit.plan.events import PoissonSubsampledGaussian, Repeated
>>> step = PoissonSubsampledGaussian(sampling_probability=0.01, noise_multiplier=1.0)
>>> round(approximate_epsilon(Repeated(event=step, count=1000), 1e-5), 1)
1.8
"""

from __future__ import annotations

import math

from affidavit.accountants.fourier.directions import directions
from affidavit.accountants.fourier.steering import Laws, saddle_at_delta, saddle_at_epsilon
from affidavit.plan import Event


def approximate_epsilon(event: Event, delta: float) -> float:
    """ε (nats) at ``delta`` by the saddle point. Not a bound; raises as ``directions`` does."""
    found = directions(event)
    return max(
        (saddle_at_delta(Laws.of(direction), delta).epsilon for direction in found), default=0.0
    )


def approximate_delta(event: Event, epsilon: float) -> float:
    """δ at ``epsilon`` (nats) by the saddle point. Not a bound; raises likewise."""
    found = directions(event)
    return max(
        (
            math.exp(min(0.0, saddle_at_epsilon(Laws.of(direction), epsilon)[0].log_delta))
            for direction in found
        ),
        default=0.0,
    )
