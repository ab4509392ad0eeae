"""The requirements of each step, as numbers that are never below the certified ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

from affidavit.assessment import Execution
from affidavit.plan import Plan


def test_the_noise_of_a_sum_is_the_least_number_that_is_not_below_it(
    plan_of: Callable[..., Plan],
) -> None:
    """σC is rarely a number itself; what a trainer draws is rounded up, by less than one place."""
    rng = random.Random(3)
    above = 0
    for _ in range(200):
        sigma, norm = rng.uniform(0.3, 30), rng.uniform(0.01, 3)
        plan = plan_of(releases=[{"name": "all", "clip_norm": norm, "noise_multiplier": sigma}])
        result = Execution.of(plan).at(0).noise_std["all"]
        exact = Fraction(sigma) * Fraction(norm)
        assert Fraction(math.nextafter(result, 0)) < exact <= Fraction(result)
        above += sigma * norm < result
    assert 20 < above < 180
