"""Bounds of one release's curve, against the closed form in 40 digits."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affidavit.accountants.fourier.lattice import (
    Grid,
    LatticeMeasure,
    lower_measure,
    upper_measure,
)
from affidavit.accountants.fourier.losses import UNIT_ROUNDOFF, Kind, NormalMixtureLaw


def exact(law: NormalMixtureLaw, epsilon: float) -> mpmath.mpf:
    """The hockey-stick curve of ``law`` at e^ε, by its closed form."""
    with mpmath.workdps(60):
        mu = mpmath.mpf(law.distance) / mpmath.mpf(law.noise_multiplier)
        q, alpha = mpmath.mpf(law.sampling_probability), mpmath.e ** mpmath.mpf(epsilon)

        def remove(a: mpmath.mpf) -> mpmath.mpf:
            if a <= 1 - q:
                return 1 - a
            b = (a - (1 - q)) / q
            z = mpmath.log(b) / mu
            return q * (mpmath.ncdf(mu / 2 - z) - b * mpmath.ncdf(-mu / 2 - z))

        match law.kind:
            case "gaussian" | "remove":
                return remove(alpha)
            case "add":
                # The difference of near-equal terms may come out below zero by its rounding.
                return max(mpmath.mpf(0), 1 - alpha + alpha * remove(1 / alpha))
            case "replace":
                c = (1 - q) / q * mpmath.e ** (mu * mu / 2)
                z = (
                    mpmath.log(alpha) / 2 + mpmath.asinh(c * mpmath.sinh(mpmath.log(alpha) / 2))
                ) / mu
                tail = mpmath.ncdf(-z)
                p = (1 - q) * tail + q * mpmath.ncdf(mu - z)
                return p - alpha * ((1 - q) * tail + q * mpmath.ncdf(-mu - z))


def curve(measure: LatticeMeasure, epsilon: float, sign: int = 1) -> mpmath.mpf:
    """The hockey-stick curve of a measure at e^ε, its nodes moved by ``sign`` times their error."""
    with mpmath.workdps(40):
        losses = measure.grid.losses()
        total = mpmath.mpf(measure.infinite)
        for mass, loss in zip(measure.masses, losses, strict=True):
            raised = mpmath.mpf(float(loss)) + sign * mpmath.mpf(measure.loss_error)
            if mass > 0 and raised > epsilon:
                total += mpmath.mpf(float(mass)) * (1 - mpmath.e ** (mpmath.mpf(epsilon) - raised))
        return total


LAWS = [
    NormalMixtureLaw(kind=kind, noise_multiplier=sigma, sampling_probability=q)
    for kind in ("remove", "add", "replace")
    for q, sigma in ((0.01, 0.5), (0.3, 2.0), (1e-4, 0.5), (1e-3, 1.0), (0.9, 0.4), (0.5, 50.0))
] + [NormalMixtureLaw(kind="gaussian", noise_multiplier=sigma) for sigma in (0.3, 2.0, 90.0)]


def grid_over(law: NormalMixtureLaw, cells: int, shift: float = 0.0) -> Grid:
    top, atoms = law.top(1e-13), law.atoms()
    floor = float(atoms.losses[int(np.searchsorted(np.cumsum(atoms.weights), 1e-13))])
    step = (top - floor) / cells
    return Grid(origin=floor + (shift - 1) * step, step=step, size=cells + 3)


def places(law: NormalMixtureLaw, grid: Grid) -> list[float]:
    """Losses where mass sits, between nodes and at them, and both ends."""
    bulk = law.loss(np.linspace(-4.0, 4.0 + law.distance / law.noise_multiplier, 9))
    nodes = grid.losses()
    return [*map(float, bulk), *map(float, nodes[:: max(1, grid.size // 7)]), float(nodes[-1])]


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("cells", [40, 400])
def test_upper_is_nowhere_below_and_lower_nowhere_above(law: NormalMixtureLaw, cells: int) -> None:
    grid = grid_over(law, cells)
    upper, lower = upper_measure(law, grid), lower_measure(law, grid)
    opened = lower_measure(law, Grid(origin=grid.origin, step=grid.step, size=20), open_left=True)
    for epsilon in places(law, grid):
        value = exact(law, epsilon)
        assert curve(upper, epsilon) >= value
        assert curve(lower, epsilon, -1) <= value
        assert curve(opened, epsilon, -1) <= value


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(("remove", "add", "replace")),
    log_q=st.floats(math.log(1e-6), math.log(0.999)),
    log_sigma=st.floats(math.log(0.2), math.log(1000.0)),
    cells=st.integers(8, 200),
    shift=st.floats(0.0, 1.0),
    at=st.floats(-6.0, 8.0),
)
def test_bounds_hold_for_any_law_and_grid(
    kind: Kind, log_q: float, log_sigma: float, cells: int, shift: float, at: float
) -> None:
    law = NormalMixtureLaw(
        kind=kind, noise_multiplier=math.exp(log_sigma), sampling_probability=math.exp(log_q)
    )
    grid = grid_over(law, cells, shift)
    epsilon = float(law.loss(np.array([at]))[0])
    value = exact(law, epsilon)
    assert curve(upper_measure(law, grid), epsilon) >= value
    assert curve(lower_measure(law, grid), epsilon, -1) <= value


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_survival_errors_are_within_their_bounds(law: NormalMixtureLaw) -> None:
    """P(L >= l) at the z used, whose loss may be off by ``loss_error``."""
    losses = np.sort(law.loss(np.linspace(-8.0, 30.0, 60)))
    survival = law.survival(losses)
    mu, q = law.distance / law.noise_multiplier, law.sampling_probability
    with np.errstate(divide="ignore", over="ignore"):
        z = law.place(losses)
    for index, place in enumerate(z):
        if not abs(place) < 37.0:
            continue
        with mpmath.workdps(40):
            tail = mpmath.ncdf(-mpmath.mpf(float(place)))
            shifted = mpmath.ncdf(mpmath.mpf(mu) - mpmath.mpf(float(place)))
            match law.kind:
                case "gaussian":
                    p = shifted
                case "add":
                    p = tail
                case _:
                    p = (1 - mpmath.mpf(q)) * tail + mpmath.mpf(q) * shifted
            assert abs(survival.p[index] - p) <= survival.relative[index] * p
            # The bound is not idle either: a hundredth of it would be roundings only.
            assert survival.relative[index] < 1e5 * UNIT_ROUNDOFF


def test_both_measures_are_second_order_in_the_step() -> None:
    law = NormalMixtureLaw(kind="remove", noise_multiplier=1.0, sampling_probability=0.1)
    epsilon = 0.4
    value = float(exact(law, epsilon))
    gaps = []
    for cells in (200, 400, 800):
        grid = grid_over(law, cells)
        gaps.append(
            (
                float(curve(upper_measure(law, grid), epsilon)) - value,
                value - float(curve(lower_measure(law, grid), epsilon, -1)),
            )
        )
    # At one place the gap swings with the distance to the nodes; over two halvings of the
    # step it must still fall by about 16.
    assert gaps[2][0] < gaps[0][0] / 4 + 1e-9
    assert gaps[2][1] < gaps[0][1] / 4 + 1e-9


def test_a_chord_measure_with_a_mass_removed_fails_the_check() -> None:
    """The check above can fail: without the last 1e-6 of its mass an upper bound is none."""
    law = NormalMixtureLaw(kind="remove", noise_multiplier=1.0, sampling_probability=0.1)
    grid = grid_over(law, 400)
    upper = upper_measure(law, grid)
    thinned = LatticeMeasure(
        grid=grid, masses=upper.masses * (1 - 1e-3), infinite=0.0, loss_error=0.0
    )
    assert any(curve(thinned, epsilon) < exact(law, epsilon) for epsilon in places(law, grid))
