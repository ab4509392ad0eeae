"""What an answer will cost, before the work is done.

The work is the half cells whose masses are computed and the points that are transformed.
It follows from the grids that the search would choose, and these from the tilt and from
about where ε is, which coarse grids tell in a few milliseconds whatever the plan; a run of
ten million releases is no more work to foresee than one. ``Work`` does not depend on the
machine; ``seconds`` does, and ``seconds_a_point`` measures it where the default will not do.

Meant to be within a factor of three, for limits and progress. No bound rests on it.

>>> from affidavit.plan.events import PoissonSubsampledGaussian, Repeated
>>> step = PoissonSubsampledGaussian(sampling_probability=0.01, noise_multiplier=1.0)
>>> cost = estimate_cost(Repeated(event=step, count=1000), 1e-5)
>>> 1_000 < cost.points < 1_000_000
True
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from affidavit.accountants.fourier.discretization import Laws, Work, saddle_at_delta
from affidavit.accountants.fourier.dominating_pairs import directions
from affidavit.accountants.fourier.normal_masses import normal_masses
from affidavit.accountants.fourier.refinement import EpsilonSearch
from affidavit.plan import Event

SECONDS_A_POINT = 1.4e-7
"""Processor seconds for a point, on one core of a 2020s server."""
_FIXED_SECONDS = 4e-3
_PASSES = 1.1
_POINTS_A_CELL = 1.0
_POINTS_A_FREQUENCY = 0.1
_BYTES_A_CELL = 90
_BYTES_A_FREQUENCY = 14
_BYTES_FIXED = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Predicted work in points, its processor seconds, and the peak bytes of its arrays."""

    points: float
    seconds: float
    bytes: int


def points_of(work: Work) -> float:
    """Work in one number: half cells, and transformed points at their share of a half cell."""
    return _POINTS_A_CELL * work.cells + _POINTS_A_FREQUENCY * work.frequencies


def estimate_cost(
    event: Event,
    delta: float,
    *,
    relative_width: float = 1e-4,
    seconds_a_point: float = SECONDS_A_POINT,
) -> Cost:
    """The cost of ``epsilon(delta)`` for ``event``; raises ``OutOfReach`` as that would.

    ``relative_width`` is that of the bracket, relative to ε.
    """
    result = [Laws.of(direction) for direction in directions(event)]
    if not result:
        return Cost(points=0.0, seconds=0.0, bytes=0)
    # The other direction is only ruled out, on a coarse grid.
    worst = max(result, key=lambda laws: saddle_at_delta(laws, delta).epsilon)
    work = EpsilonSearch(worst, delta).next_work(relative_width)
    points = _PASSES * points_of(work)
    memory = _BYTES_FIXED + _BYTES_A_CELL * work.cells + _BYTES_A_FREQUENCY * work.frequencies
    return Cost(
        points=points,
        seconds=_FIXED_SECONDS * len(result[0].atoms) + seconds_a_point * points,
        bytes=memory,
    )


def seconds_a_point() -> float:
    """Processor seconds that this machine takes for a point, by the masses of 2^16 cells."""
    places = np.linspace(-6.0, 6.0, 1 << 16)
    started = time.process_time()
    for _ in range(4):
        normal_masses(places, 0.0)
    return (time.process_time() - started) / (4 * places.size) * 3.0
