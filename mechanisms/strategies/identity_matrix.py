"""Identity: independent noise as a strategy, the yardstick of all others.

>>> from affidavit.mechanisms.strategies.participation import Participation
>>> epochs = Participation.fixed_epoch(participations=4, separation=5)
>>> round(identity(steps=20).sensitivity(epochs).value, 12)
2.0
"""

from __future__ import annotations

from affidavit.mechanisms.strategies.toeplitz import Toeplitz


def identity(steps: int) -> Toeplitz:
    """C = N = I; its sensitivity is √k, never 1 for k > 1 participations."""
    return Toeplitz.from_noise([1.0], steps, kind="independent")
