"""A replaced record on two and three bins, by quadrature."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from affidavit import delta
from affidavit.accountants.random_allocation.replaced import ReplacedCurve


def released(bins: int, rate: float, sign: float, line: np.ndarray) -> np.ndarray:
    """Chances of outputs on a lattice, in standard deviations of the noise."""
    step = line[1] - line[0]
    still, moved = (
        step * np.exp(-((line - at) ** 2) / 2) / math.sqrt(2 * math.pi) for at in (0, sign * rate)
    )
    parts = [[moved if here == there else still for there in range(bins)] for here in range(bins)]
    return np.asarray(sum(functools.reduce(np.multiply.outer, part) for part in parts)) / bins


@pytest.mark.parametrize(
    ("bins", "rate", "epsilon"),
    [(2, 1.0, 0.0), (2, 1.0, 2.5), (2, 2.0, 6.0), (3, 0.2, 0.1), (3, 1.5, 3.0)],
)
def test_the_upper_end_is_hardly_above_what_few_bins_show(
    bins: int, rate: float, epsilon: float
) -> None:
    line = np.linspace(-8 - rate, 8 + rate, 161 if bins == 3 else 801)
    p, q = (released(bins, rate, sign, line) for sign in (1.0, -1.0))
    truth = float(np.maximum(p - math.exp(epsilon) * q, 0).sum())
    upper = ReplacedCurve(bins=bins, rate=rate).delta(epsilon).upper
    assert truth * (1 - 2e-4) <= upper <= truth * 1.1


def test_epsilon_is_about_where_delta_is() -> None:
    curve = ReplacedCurve(bins=100, rate=1.58)
    assert curve.delta(curve.epsilon(1e-6).upper).upper == pytest.approx(1e-6, rel=0.1)


def test_a_plan_of_several_epochs_is_bounded_by_it() -> None:
    document = {
        "version": 1,
        "adjacency": "replace_one",
        "dataset": {"size": 1000},
        "sampling": {"scheme": "balls_in_bins", "lot_size": 100},
        "epochs": 4,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 4.0}],
        "target": {"delta": 1e-4},
    }
    own = ReplacedCurve(bins=10, rate=0.5).delta(1.0).upper
    assert delta(document, epsilon=1.0) == pytest.approx(own, rel=1e-3)
