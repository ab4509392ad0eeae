"""What a guarantee means for one record, in words: how well an attacker can recognise it.

Two numbers, both upper bounds over every attacker, who may know all other records and see every
intermediate model:

* of the records that were used, the share that a test recognises whose rate of false alarms about
  records that were not used is ``FALSE_ALARM_RATE``;
* how often a guess is right whether a record was used, if both were equally likely before.

They follow from points (ε, δ) of the guarantee, and from μ if one Gaussian mechanism bounds the
run: exactly if the run is one, else up to a remainder that is added. By definition of (ε, δ)-DP in
both directions, the power of a test with false alarms α is at most
min(e^ε α + δ, 1 − e^−ε (1 − δ − α)), and the total variation distance of the two outputs is at most
(e^ε − 1 + 2δ) / (e^ε + 1), half of which a guess gains. Every point bounds both, so that the
smallest bound holds.

References: Kairouz, Oh and Viswanath, arXiv:1311.0776, theorem 2.1 (the region of tests); Dong,
Roth and Su, arXiv:1905.02383, section 2 (the Gaussian trade-off).

>>> meaning_of([(0.0, 0.0)])
Meaning(recognised=0.01, guessed=0.5)
>>> round(meaning_of([(1.0, 1e-5)], mu=0.5).guessed, 3)
0.599
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from affidavit.accountants import decimal_up

FALSE_ALARM_RATE = 0.01
ROUNDING = 1e-12
"""More than the rounding errors of the formulas below; it is added to every bound."""
_NORMAL = NormalDist()
Point = tuple[float, float]
"""An ε in nats and the δ with which a guarantee holds at it."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """Upper bounds: of used records recognised at ``FALSE_ALARM_RATE``, and of right guesses."""

    recognised: float
    guessed: float

    def sentences(self, unit: str, adjacency: str) -> tuple[str, str]:
        """Return both bounds in words, for the guarantee's privacy unit and adjacency."""
        alarm = f"{100 * FALSE_ALARM_RATE:g} %"
        was = "was in the training data"
        if adjacency == "replace_one":
            was = "and not another given one was in the training data"
        return (
            f"An attacker who tests whether one {unit} {was}, with false alarms in {alarm} of "
            f"cases, recognises it with a probability of at most {percent(self.recognised)} "
            f"({alarm} by chance).",
            f"An attacker to whom it is as likely as not that one {unit} {was} guesses right in at "
            f"most {percent(self.guessed)} of cases (50 % by chance).",
        )


def meaning_of(points: Iterable[Point], mu: float | None = None, remainder: float = 0.0) -> Meaning:
    """Return what a guarantee means that holds at each of ``points`` (ε in nats, δ).

    ``mu`` is that of a Gaussian curve which bounds the guarantee but for the ``remainder`` of δ, if
    there is one.
    """
    points = list(points)
    guessed = [1.0, *(_right_guesses(epsilon, delta) for epsilon, delta in points)]
    if mu is not None:
        guessed.append(_NORMAL.cdf(mu / 2) + remainder / 2 + ROUNDING)
    recognised = recognised_at(FALSE_ALARM_RATE, points, mu, remainder)
    return Meaning(recognised, _exact(min(guessed), 0.5))


def recognised_at(
    rate: float, points: Iterable[Point], mu: float | None = None, remainder: float = 0.0
) -> float:
    """Return the most that a test recognises whose rate of false alarms is ``rate``."""
    recognised = [1.0, *(_power(rate, epsilon, delta) for epsilon, delta in points)]
    if mu is not None and 0 < rate < 1:
        recognised.append(_NORMAL.cdf(_NORMAL.inv_cdf(rate) + mu) + remainder + ROUNDING)
    return _exact(min(recognised), rate)


def explain_guarantee(guarantee: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what the ``guarantee`` of a signed statement means, by its signed numbers alone.

    There is no sentence for a bound that holds only with a confidence.
    """
    bounds = signed_bounds(guarantee)
    if bounds is None:
        return ()
    return meaning_of(*bounds).sentences(guarantee["unit"], guarantee["adjacency"])


def signed_bounds(guarantee: Mapping[str, Any]) -> tuple[list[Point], float | None, float] | None:
    """Return the points, μ and its remainder, or None if the guarantee holds with a confidence."""
    if guarantee.get("confidence") is not None:
        return None
    point = float(guarantee["epsilon"]["upper"]), float(guarantee["delta"]["upper"])
    return [point], *gaussian_bound_in(guarantee)


def gaussian_bound_in(guarantee: Mapping[str, Any]) -> tuple[float | None, float]:
    """Return μ of a Gaussian curve that bounds a signed ``guarantee``, and its remainder."""
    if (mu := guarantee.get("mu")) is not None:
        return float(mu), 0.0
    bound = guarantee.get("gaussian_bound")
    return (None, 0.0) if bound is None else (float(bound["mu"]), float(bound["remainder"]))


def percent(probability: float) -> str:
    """Return a probability in per cent, rounded up, with three digits.

    >>> percent(0.0337), percent(0.99999), percent(1.0)
    ('3.37 %', '100 %', '100 %')
    """
    return f"{decimal_up(min(100.0, 100 * probability), 3)} %"


def _power(alpha: float, epsilon: float, delta: float) -> float:
    upper = math.inf if epsilon > 700 else math.exp(epsilon) * alpha + delta
    return min(upper, 1 - math.exp(-epsilon) * max(0.0, 1 - delta - alpha)) + ROUNDING


def _right_guesses(epsilon: float, delta: float) -> float:
    # (1 + TV) / 2, written so that no large ε overflows.
    shrink = math.exp(-epsilon)
    return (1 + delta * shrink) / (1 + shrink) + ROUNDING


def _exact(bound: float, least: float) -> float:
    """Return ``least``, which holds without a release, for a bound just above it."""
    return least if bound <= least + 2 * ROUNDING else min(1.0, bound)
