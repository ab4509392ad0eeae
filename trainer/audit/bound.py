"""Bounds: what a rate of right guesses proves about ε.

(ε, δ)-DP says P(S) ≤ e^ε P'(S) + δ for every set of outcomes and both orders of the two
worlds. Whoever guesses "first world" on S and "second" elsewhere is then right, on average
over the worlds, with a probability of at most

    p = (P(S) + 1 - P'(S)) / 2 ≤ (e^ε + δ) / (e^ε + 1).

With n independent runs, half of them in each world, the number of right guesses is a sum of
Bernoulli variables of mean p, whose upper tail is at most that of Binomial(n, p) (Hoeffding,
1956), so that the bound of Clopper and Pearson on p holds, and with it one on ε. It can only
falsify: nothing follows where it does not.

>>> round(lower_epsilon(180, 200, delta=0.0, alarm=0.05), 3)
1.799
>>> lower_epsilon(100, 200, delta=0.0, alarm=0.05)
0.0

References: W. Hoeffding, Ann. Math. Stat. 27 (1956) 713; Clopper and Pearson,
Biometrika 26 (1934) 404; Kairouz, Oh and Viswanath, arXiv:1311.0776 (the bound on p); Steinke,
Nasr and Jagielski, arXiv:2305.08846.
"""

from __future__ import annotations

import math

from scipy.stats import beta


def lower_epsilon(right: int, runs: int, *, delta: float, alarm: float) -> float:
    """The least ε, in nats, at ``delta`` that ``right`` of ``runs`` right guesses leave; 0 if all.

    The true ε is below it with probability at most ``alarm``, for a guess that was chosen
    before the runs were made.
    """
    if right <= runs / 2 + 1:  # below the mean the two tails are not in this order
        return 0.0
    low = float(beta.ppf(alarm, right, runs - right + 1))
    return math.log(max(1.0, (low - delta) / (1 - low)))
