"""The privacy profile δ(ε), asked at enough points to draw it and to convert it.

``sample`` begins with evenly spaced ε and halves, in rounds, every interval in which the
trade-off function would be known less well than the tolerance, even if every δ asked for
were exact (``affidavit.accountants.tradeoff.gaps``). Nothing is interpolated: each point is
a bracket that the accountant proved. A point that it refuses is left out, which makes what
is derived from the profile looser and never wrong.

>>> from affidavit.accountants.gaussian import GaussianCurve
>>> profile = sample(GaussianCurve(mu=1.0))
>>> profile.epsilons[0], round(profile.deltas[0].upper, 6)
(0.0, 0.382925)
"""

from __future__ import annotations

import math
from collections.abc import Callable

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.protocol import AccountantError, OutOfReach, PrivacyCurve
from affidavit.accountants.tradeoff import LARGEST_EPSILON, TradeOff, gaps

SMALLEST_DELTA = 1e-12
"""The profile is followed until δ is about this small."""
TOLERANCE = 3e-4
"""To what, a probability, the error of type II is known beside what the accountant leaves."""
FIRST, MOST = 17, 257
"""Points to begin with, and at most."""

Progress = Callable[[int], None]
"""Told how many points there are, whenever there is one more."""


def sample(
    curve: PrivacyCurve, *, tolerance: float = TOLERANCE, progress: Progress = lambda _: None
) -> TradeOff:
    """δ of ``curve`` from ε = 0 to where it is ``SMALLEST_DELTA``, as a trade-off function.

    ``tolerance`` is in the error of type II, as ``TOLERANCE``.

    Raises ``AccountantError`` if the accountant gives no point at all.
    """
    asked: dict[float, Bracket | None] = {}

    def ask(epsilon: float) -> None:
        try:
            asked[epsilon] = curve.delta(epsilon)
        except AccountantError:
            asked[epsilon] = None
        progress(len(asked))

    top = min(_top(curve), LARGEST_EPSILON)
    wanted = [top * index / (FIRST - 1) for index in range(FIRST)]
    while wanted and len(asked) < MOST:
        for epsilon in wanted[: MOST - len(asked)]:
            ask(epsilon)
        known = {each: found for each, found in sorted(asked.items()) if found is not None}
        wanted = [item for item in _wanted(known, tolerance) if item not in asked]
    if not known:
        raise OutOfReach("δ is not bounded at any ε.", "Use another accountant.")
    return TradeOff(epsilons=tuple(known), deltas=tuple(known.values()))


def _wanted(known: dict[float, Bracket], tolerance: float) -> list[float]:
    """The middles of the intervals in which too little is known, the worst first."""
    if len(known) < 2:
        return []
    epsilons = list(known)
    found = gaps(epsilons, [item.upper for item in known.values()])
    worst = sorted(range(len(found)), key=lambda index: -found[index])
    return [
        (epsilons[index] + epsilons[index + 1]) / 2 for index in worst if found[index] > tolerance
    ]


def _top(curve: PrivacyCurve) -> float:
    """The ε up to which the profile is followed."""
    for exponent in range(round(-math.log10(SMALLEST_DELTA)), 0, -1):
        try:
            top = curve.epsilon(10.0**-exponent).upper
        except AccountantError:
            continue
        if math.isfinite(top):
            return max(top, 1e-3)
    return 1.0
