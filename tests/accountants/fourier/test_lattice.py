"""Bounds of one release's curve, against the closed form in 40 digits."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affidavit.accountants.fourier.discretized_pld import (
    Grid,
    LatticeMeasure,
    LowerRange,
    lower_measure,
    upper_measure,
)
from affidavit.accountants.fourier.dominating_pairs import directions
from affidavit.accountants.fourier.loss_laws import Kind, NormalMixtureLaw, WorseOfBothLaw
from affidavit.accountants.fourier.privacy_loss import UNIT_ROUNDOFF, LossLaw
from affidavit.plan import events
from tests.support.random_seeds import examples


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


class Curve:
    """The hockey-stick curve of a measure, its nodes moved by ``sign`` times their error."""

    def __init__(self, measure: LatticeMeasure, sign: int = 1) -> None:
        with mpmath.workdps(60):
            error = sign * mpmath.mpf(measure.loss_error)
            self._nodes = [mpmath.mpf(float(loss)) + error for loss in measure.grid.losses()]
            # What the last node, the last two, ... have under P and under Q.
            self._tails = [(mpmath.mpf(measure.infinite), mpmath.mpf(0))]
            for mass, node in zip(measure.masses[::-1], self._nodes[::-1], strict=True):
                p, q = self._tails[-1]
                exact = mpmath.mpf(float(mass))
                self._tails.append((p + exact, q + exact * mpmath.exp(-node)))

    def __call__(self, epsilon: float) -> mpmath.mpf:
        with mpmath.workdps(60):
            at = mpmath.mpf(epsilon)
            p, q = self._tails[len(self._nodes) - bisect.bisect_right(self._nodes, at)]
            return p - mpmath.exp(at) * q


LAWS = [
    NormalMixtureLaw(kind=kind, noise_multiplier=sigma, sampling_probability=q)
    for kind in ("remove", "add", "replace")
    for q, sigma in ((0.01, 0.5), (0.3, 2.0), (1e-4, 0.5), (1e-3, 1.0), (0.9, 0.4), (0.5, 50.0))
] + [NormalMixtureLaw(kind="gaussian", noise_multiplier=sigma) for sigma in (0.3, 2.0, 90.0)]


def upper(law: LossLaw, grid: Grid) -> LatticeMeasure:
    return upper_measure(grid.cells(law), grid)


def lower(
    law: LossLaw, grid: Grid, first: int = 0, open_left: bool = False, joined: int = 0
) -> LatticeMeasure:
    span = LowerRange(
        first=first, last=grid.size - 1, open_left=open_left, open_right=False, joined=joined
    )
    return lower_measure(grid.cells(law), grid, span)


def grid_over(law: NormalMixtureLaw, cells: int, shift: float = 0.0) -> Grid:
    top, atoms = law.upper_quantile(1e-13), law.atoms()
    floor = float(atoms.losses[int(np.searchsorted(np.cumsum(atoms.weights), 1e-13))])
    step = (top - floor) / cells
    return Grid(origin=floor + (shift - 1) * step, step=step, size=cells + 3)


def places(law: NormalMixtureLaw, grid: Grid) -> list[float]:
    """Losses where mass sits, between nodes and at them, and both ends."""
    bulk = law.loss(np.linspace(-4.0, 4.0 + law.distance / law.noise_multiplier, 9))
    nodes = grid.losses()
    return [*map(float, bulk), *map(float, nodes[:: max(1, grid.size // 7)]), float(nodes[-1])]


@pytest.mark.ordinary("not 400-*")
@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("cells", [40, 400])
def test_upper_is_nowhere_below_and_lower_nowhere_above(law: NormalMixtureLaw, cells: int) -> None:
    grid = grid_over(law, cells)
    above, below = Curve(upper(law, grid)), Curve(lower(law, grid), -1)
    opened = Curve(lower(law, grid, first=cells // 4, open_left=True), -1)
    for epsilon in places(law, grid):
        value = exact(law, epsilon)
        assert above(epsilon) >= value
        assert below(epsilon) <= value
        assert opened(epsilon) <= value


@settings(max_examples=examples(60))
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
    assert Curve(upper(law, grid))(epsilon) >= value
    assert Curve(lower(law, grid), -1)(epsilon) <= value


def masses(law: NormalMixtureLaw, low: float, high: float) -> tuple[mpmath.mpf, mpmath.mpf]:
    """P- and Q-mass of the z between two numbers, in high precision."""
    mu, q = mpmath.mpf(law.distance) / mpmath.mpf(law.noise_multiplier), law.sampling_probability

    def normal(mean: mpmath.mpf) -> mpmath.mpf:
        return mpmath.ncdf(high - mean) - mpmath.ncdf(low - mean)

    both = {
        "gaussian": (((1, mu),), ((1, 0),)),
        "remove": (((1 - mpmath.mpf(q), 0), (q, mu)), ((1, 0),)),
        "add": (((1, 0),), ((1 - mpmath.mpf(q), 0), (q, -mu))),
        "replace": (((1 - mpmath.mpf(q), 0), (q, mu)), ((1 - mpmath.mpf(q), 0), (q, -mu))),
    }[law.kind]
    p, q_mass = (sum(w * normal(m) for w, m in mixture) for mixture in both)
    return p, q_mass


@pytest.mark.ordinary("*-0.6", "*-1e-05")
@pytest.mark.parametrize("width", [1e-5, 1e-3, 0.05, 0.6])
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_errors_of_cells_are_within_their_bounds(law: NormalMixtureLaw, width: float) -> None:
    """The masses at the z that were used, and the loss of that z against the edge."""
    for start in (-7.0, -0.3, 0.9, 5.0, 11.0):
        edges = law.loss(start + width * np.arange(4.0))
        if not np.all(np.diff(edges) > 0):
            continue
        cells = law.cells(edges)
        with mpmath.workdps(60):
            place = [mpmath.mpf(float(z)) for z in law.inverse_loss(edges)]
            for index in range(3):
                p, q = masses(law, place[index], place[index + 1])
                bound = cells.relative_error[index + 1]
                assert abs(cells.p[index + 1] - p) <= bound * p
                assert abs(cells.q[index + 1] - q) <= bound * q
                # Not idle either: it is a matter of roundings.
                assert bound < 1e5 * UNIT_ROUNDOFF
                loss = exact_loss(law, place[index])
                assert abs(loss - mpmath.mpf(float(edges[index]))) <= cells.edge_error[index + 1]


def exact_loss(law: NormalMixtureLaw, z: mpmath.mpf) -> mpmath.mpf:
    mu, q = mpmath.mpf(law.distance) / mpmath.mpf(law.noise_multiplier), law.sampling_probability

    def mixture(exponent: mpmath.mpf) -> mpmath.mpf:
        return mpmath.log(1 - mpmath.mpf(q) + q * mpmath.e**exponent)

    up, down = mixture(mu * z - mu * mu / 2), mixture(-mu * z - mu * mu / 2)
    match law.kind:
        case "gaussian":
            return mu * z - mu * mu / 2
        case "remove":
            return up
        case "add":
            return -down
        case "replace":
            return up - down


@pytest.mark.parametrize(("sample", "sigma"), [(0.01, 1.0), (0.3, 4.0), (1e-4, 0.5)])
@pytest.mark.parametrize("origin", [-1.0, -0.2, 0.03])
def test_the_atom_at_zero_is_in_the_cell_that_holds_it(
    sample: float, sigma: float, origin: float
) -> None:
    size = 10_000
    leaf = events.WithoutReplacementGaussian(
        dataset_size=size, sample_size=round(sample * size), noise_multiplier=sigma
    )
    (direction,) = directions(leaf)
    law = direction.laws[0][0]
    assert isinstance(law, WorseOfBothLaw)
    cells = law.cells(origin + 0.013 * np.arange(60))
    assert cells.p.sum() == pytest.approx(1.0, abs=1e-12)
    assert cells.q.sum() == pytest.approx(1.0, abs=1e-12)
    edges = origin + 0.013 * np.arange(60)
    tail, _ = law.tails(edges[5:6])
    assert cells.p[6:].sum() == pytest.approx(float(tail[0]), abs=1e-12)


def test_negative_masses_are_removed_without_raising_the_curve() -> None:
    """A steep end leaves negative masses; the result is a measure below the signed one."""
    law = NormalMixtureLaw(kind="remove", noise_multiplier=0.5, sampling_probability=1e-5)
    for step in (4e-3, 7e-4):
        grid = Grid(origin=-2 * step - 3e-5, step=step, size=int(4 / step))
        opened = lower(law, grid, first=2, open_left=True)
        assert opened.masses.min() >= 0
        curve = Curve(opened, -1)
        for epsilon in (0.0, 3 * step, 0.2, 1.0, 3.0):
            value = exact(law, epsilon)
            assert 0 < curve(epsilon) <= value


@pytest.mark.ordinary("*-5")
@pytest.mark.parametrize("joined", [0, 1, 5, 40])
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_cells_that_join_the_first_never_raise_the_curve(
    law: NormalMixtureLaw, joined: int
) -> None:
    grid = grid_over(law, 60)
    opened = lower(law, grid, first=3, open_left=True, joined=joined)
    assert np.count_nonzero(opened.masses[4 : 4 + joined]) == 0
    curve = Curve(opened, -1)
    for epsilon in places(law, grid):
        assert curve(epsilon) <= exact(law, epsilon)


def test_both_measures_are_second_order_in_the_step() -> None:
    law = NormalMixtureLaw(kind="remove", noise_multiplier=1.0, sampling_probability=0.1)
    epsilon = 0.4
    value = float(exact(law, epsilon))
    gaps = []
    for cells in (200, 400, 800):
        grid = grid_over(law, cells)
        gaps.append(
            (
                float(Curve(upper(law, grid))(epsilon)) - value,
                value - float(Curve(lower(law, grid), -1)(epsilon)),
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
    above = upper(law, grid)
    thinned = LatticeMeasure(
        grid=grid, masses=above.masses * (1 - 1e-3), infinite=0.0, loss_error=0.0
    )
    curve = Curve(thinned)
    assert any(curve(epsilon) < exact(law, epsilon) for epsilon in places(law, grid))


def test_an_edge_near_zero_is_off_by_roundings_of_the_origin() -> None:
    law = NormalMixtureLaw(kind="add", noise_multiplier=0.2, sampling_probability=1e-4)
    grid = Grid(origin=-30.0000123, step=1e-3 / 3, size=100_000)
    cells, edges = grid.cells(law), grid.edges()
    for index in np.argsort(np.abs(edges))[:2000]:
        true = Fraction(grid.origin) + Fraction(grid.step) * Fraction(int(index) - 1, 2)
        error = abs(Fraction(float(edges[index])) - true)
        assert error <= min(cells.edge_error[index], cells.edge_error[index + 1])
