"""The statistical test of released noise: its tails, and how tests share one false-alarm rate.

In a run with the certified noise, the squared norm of n entries of the noise over its variance has
a chi-square distribution with n degrees of freedom, whatever the entries are of. The trainer reads
its own sums (``trainer.noise.noise_statistics``), and the guard those of other trainers
(``guard.noise_statistics``).

Guarantees
    * A run with the certified noise is stopped with a probability of at most ``FALSE_ALARM``, for
      any number of steps and tensors: step t spends 6 / (π² t²) of it, in equal parts on every
      test. The noise is modelled as exactly Gaussian, with allowances for the rounding of the sums
      and for a relative ``MODEL_ERROR`` of its deviation.

>>> low, high = tails(0.0, 0.0, 100)
>>> bool(low < level(1, tests=6)), float(high)
(True, 1.0)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.special import gammainc, gammaincc

FALSE_ALARM = 1e-9
"""Probability that a run with the certified noise is ever stopped."""
MODEL_ERROR = 5e-4
"""Relative error of a standard deviation that is allowed."""


def level(step: int, *, tests: int, ranks: int = 1) -> float:
    """Return the probability that each of the ``tests`` of a step spends; steps count from 1.

    Each of ``ranks`` ranks with their own noise spends an equal part of ``FALSE_ALARM``.
    """
    return FALSE_ALARM / ranks * 6 / (math.pi * step) ** 2 / tests


def tails(root: Any, error: Any, entries: Any) -> tuple[Any, Any]:
    """Return P(chi ≤ ``root`` + ``error``) and P(chi ≥ ``root`` - ``error``), elementwise.

    ``root`` is the norm of ``entries`` entries of the noise in standard deviations, ``error`` a
    bound on its rounding, and chi has ``entries`` degrees of freedom.
    """
    largest = (root + error) * (1 + MODEL_ERROR)
    least = np.maximum(root - error, 0.0) * (1 - MODEL_ERROR)
    return gammainc(entries / 2, largest**2 / 2), gammaincc(entries / 2, least**2 / 2)
