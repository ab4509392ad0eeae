"""Ladders: powers of two, and of its roots, that what steers is moved to.

A tilt, step or cut that is a few per cent off costs a bracket next to nothing, and two plans
whose own values are near to one another then ask for the same measures and transforms.

>>> down(0.3, 1), up(0.3, 1), nearest(1.04, 16)
(0.25, 0.5, 1.0442737824274138)

A rung stays where it is, whatever its logarithm is rounded to.

>>> down(2**0.75, 4) == up(2**0.75, 4) == 2**0.75
True
"""

from __future__ import annotations

import math

_ROUNDED = 1e-9
"""More, of a rung, than rounding moves a logarithm."""


def down(value: float, rungs: float) -> float:
    """The highest rung not above ``value``, of so many an octave; raises ValueError unless > 0."""
    return float(2.0 ** (math.floor(rungs * math.log2(value) + _ROUNDED) / rungs))


def up(value: float, rungs: float) -> float:
    """The lowest rung not below ``value``, of so many an octave; raises ValueError unless > 0."""
    return float(2.0 ** (math.ceil(rungs * math.log2(value) - _ROUNDED) / rungs))


def nearest(value: float, rungs: float) -> float:
    """The rung nearest to ``value``, of so many an octave; raises ``ValueError`` unless > 0."""
    return float(2.0 ** (round(rungs * math.log2(value)) / rungs))
