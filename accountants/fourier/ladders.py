"""Ladders: powers of two, and of its roots, that what steers is moved to.

A tilt, step or cut that is a few per cent off costs a bracket next to nothing, and two plans
whose own values are near to one another then ask for the same measures and transforms.

>>> down(0.3, 1), down(0.25, 1), nearest(1.04, 16)
(0.25, 0.25, 1.0442737824274138)
"""

from __future__ import annotations

import math


def down(value: float, rungs: float) -> float:
    """The highest rung not above ``value``, of so many an octave; raises ValueError unless > 0."""
    return float(2.0 ** (math.floor(rungs * math.log2(value)) / rungs))


def nearest(value: float, rungs: float) -> float:
    """The rung nearest to ``value``, of so many an octave; raises ``ValueError`` unless > 0."""
    return float(2.0 ** (round(rungs * math.log2(value)) / rungs))
