"""δ by direct inversion, against closed forms, other engines, and with its steering spoilt."""

from __future__ import annotations

import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from affidavit.accountants import accountant
from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier import direct_inversion, quadrature
from affidavit.accountants.fourier.direct_inversion import invert_epsilon
from affidavit.accountants.fourier.dominating_pairs import directions
from affidavit.accountants.fourier.loss_laws import Kind, NormalMixtureLaw, RevealedMixtureLaw
from affidavit.accountants.fourier.privacy_loss import Array, LossLaw
from affidavit.accountants.fourier.quadrature import POINTS, AnalyticLaw, AnalyticPart, rule
from affidavit.accountants.fourier.schedules import ExtrapolatedLaw
from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.plan import events

LAWS = [
    NormalMixtureLaw(kind=kind, noise_multiplier=sigma, sampling_probability=q)
    for kind in ("remove", "add", "replace")
    for q, sigma in ((0.05, 0.7), (1e-4, 2.0), (0.8, 5.0))
] + [NormalMixtureLaw(kind="gaussian", noise_multiplier=1.5)]


PAIR = [
    NormalMixtureLaw(kind="remove", noise_multiplier=sigma, sampling_probability=0.05)
    for sigma in (1.05, 1.0)
]
SUMS: list[LossLaw] = [
    RevealedMixtureLaw(first=PAIR[0], second=PAIR[1], weight=0.3),
    ExtrapolatedLaw(lower=PAIR[0], near=PAIR[1], share=0.7),
]


def poisson(
    q: float, sigma: float, steps: int, pair: events.SubsampledPair = "add_remove"
) -> events.Repeated:
    leaf = events.PoissonSubsampledGaussian(
        sampling_probability=q, noise_multiplier=sigma, pair=pair
    )
    return events.Repeated(event=leaf, count=steps)


def answer(event: events.Event, delta: float) -> Bracket:
    result = invert_epsilon(directions(event), delta)
    assert result is not None
    return result


def moment(law: AnalyticLaw, s: complex) -> complex:
    """E[e^{sL}] from the two densities, by Gauss's rule on 200 panels."""
    return sum(weight * moment_of_part(part, s) for part, weight in law.parts)


def moment_of_part(one: AnalyticPart, s: complex) -> complex:
    nodes, weights = np.polynomial.legendre.leggauss(16)
    edges = np.linspace(one.low, one.high, 201)
    half = (edges[1] - edges[0]) / 2
    z = ((edges[1:] + edges[:-1]) / 2)[:, None] + half * nodes
    p, q = (
        sum(w * np.exp(-((z - m) ** 2) / 2) for w, m in mixture)
        for mixture in (one.law.p_mixture, one.law.q_mixture)
    )
    values = p * np.exp(s * np.log(p / q)) / math.sqrt(2 * math.pi)
    return complex(half * (values @ weights).sum())


@pytest.mark.parametrize("points", POINTS)
def test_weights_are_those_of_the_rule_to_the_roundings_allowed(points: int) -> None:
    nodes, weights = rule(points)
    with mpmath.workdps(50):
        for k in (1, 2, points // 3):
            twice = 2 * mpmath.cos(2 * k * mpmath.pi / points)
            last, cosine, total = mpmath.mpf(1), twice / 2, mpmath.mpf(1)
            for j in range(1, points // 2 + 1):
                total -= (1 if 2 * j == points else 2) * cosine / (4 * j * j - 1)
                last, cosine = cosine, twice * cosine - last
            exact = 2 * total / points
            assert abs(weights[k] / exact - 1) < 16 * 2.0**-53
            place = mpmath.cos((points - k) * mpmath.pi / points)
            assert abs(nodes[k] - place) < 2.0**-52


@pytest.mark.parametrize("law", LAWS + SUMS)
@pytest.mark.parametrize(("order", "theta"), [(2.0, 5.0), (15.0, 40.0)])
@pytest.mark.parametrize("bar", [-33.0, -14.0, -8.0])
def test_transforms_and_moments_are_within_their_errors(
    law: LossLaw, order: float, theta: float, bar: float
) -> None:
    one = AnalyticLaw.of(law, 1e-14)
    orders = np.array([order, 1.5 * order, -3.0])
    transform = one.transform(orders, theta * np.arange(3), bar)
    for index, real in enumerate(orders):
        off = abs(math.exp(transform.log_moments[index]) / moment(one, real) - 1)
        assert off <= transform.moment_errors[index] + 1e-12
    scale = math.exp(transform.log_moments[0])
    for k in (1, 2):
        result = np.exp(transform.logs[k] + 1j * k * theta * transform.centre)
        off = abs(result - moment(one, complex(order, k * theta)) / scale)
        assert off <= transform.errors[k] + transform.moment_errors[0] + 1e-12
    assert max(transform.errors.max(), transform.moment_errors[0]) < 1e-11 or bar > -33.0


@pytest.mark.parametrize(
    ("kind", "q", "sigma", "order", "theta"),
    [
        ("remove", 1e-5, 0.87, 53.0, 1800.0),
        ("add", 1e-3, 1.0, 300.0, 900.0),
        ("replace", 1e-4, 0.6, 5.0, 40.0),
    ],
)
def test_small_losses_have_small_roundings(
    kind: Kind, q: float, sigma: float, order: float, theta: float
) -> None:
    """Less than 2^-53 for each term of the rule, and no less than 30 digits show."""
    law = NormalMixtureLaw(kind=kind, noise_multiplier=sigma, sampling_probability=q)
    one = AnalyticLaw.of(law, 1e-14)
    transform = one.transform(np.array([order]), theta * np.arange(2) / 2, -38.0)
    with mpmath.workdps(30):
        rate, mu, centre = mpmath.mpf(q), 1 / mpmath.mpf(sigma), mpmath.mpf(transform.centre)
        places = mpmath.linspace(one.parts[0][0].low, one.parts[0][0].high, 9)

        def tilted(s: complex) -> mpmath.mpc:
            def term(z: mpmath.mpf) -> mpmath.mpc:
                up = mpmath.log1p(rate * mpmath.expm1(mu * z - mu**2 / 2))
                down = mpmath.log1p(rate * mpmath.expm1(-mu * z - mu**2 / 2))
                loss = {"remove": up, "add": -down, "replace": up - down}[kind]
                p = mpmath.exp(0 if kind == "add" else up) * mpmath.npdf(z)
                return p * mpmath.exp(s * (loss - centre))

            return mpmath.quad(term, places, method="gauss-legendre", maxdegree=5)

        exact = tilted(mpmath.mpc(order, theta / 2)) / tilted(mpmath.mpf(order))
        off = abs(mpmath.exp(mpmath.mpc(complex(transform.logs[1]))) - exact)
    assert off < transform.errors[1] < 2e-13


@pytest.mark.parametrize("law", LAWS + SUMS)
def test_no_transform_exceeds_what_its_uniform_parts_allow(law: LossLaw) -> None:
    one, order = AnalyticLaw.of(law, 1e-12), 4.0
    atoms = one.atoms(2048)
    halves, weights = one.layers(order, atoms.log_moment(order))
    assert 0.4 < weights.sum() <= 1.0
    tilted = atoms.tilted(order)
    deviation = math.sqrt(tilted @ atoms.losses**2 - (tilted @ atoms.losses) ** 2)
    for theta in np.geomspace(0.1, 30.0, 60) / deviation:
        bound = 1.0 - float((1.0 - direct_inversion._sinc_bound(theta * halves)) @ weights)
        assert abs(np.exp(1j * theta * atoms.losses) @ tilted) <= bound + 1e-9


@pytest.mark.parametrize(
    ("sigma", "steps", "delta"),
    [
        (20.0, 100, 1e-6),
        (0.7, 40, 1e-12),
        (0.3, 1000, 1e-5),
        (300.0, 10**6, 0.3),
        (50.0, 30, 1e-40),
    ],
)
def test_gaussian_runs_meet_the_closed_form(sigma: float, steps: int, delta: float) -> None:
    event = events.Repeated(event=events.Gaussian(noise_multiplier=sigma), count=steps)
    result, exact = answer(event, delta), accountant("gaussian").curve(event).epsilon(delta)
    assert result.lower <= exact.upper
    assert result.upper >= exact.lower
    assert result.width < 1e-6 * result.upper


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "delta"),
    [(0.01, 0.8, 400, 1e-6), (0.1, 3.0, 500, 1e-5), (0.3, 1.0, 60, 1e-8)],
)
def test_poisson_runs_lie_between_dp_accounting_s_grids(
    q: float, sigma: float, steps: int, delta: float
) -> None:
    result = answer(poisson(q, sigma, steps), delta)
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), steps
    )
    grid = PLDAccountant(value_discretization_interval=1e-3)
    grid.compose(event)
    assert result.lower <= grid.get_epsilon(delta) * (1 + 1e-9)
    assert grid.get_epsilon(delta) <= result.upper * 1.02


MIXED = events.Composed(
    events=(
        poisson(0.02, 0.9, 300),
        poisson(0.005, 2.0, 4000),
        events.Repeated(event=events.Gaussian(noise_multiplier=9.0), count=7),
    )
)
RUNS = [
    poisson(0.05, 1.2, 200),
    poisson(0.002, 0.6, 3000),
    poisson(0.03, 1.0, 200, pair="replace_one"),
    MIXED,
]


@pytest.mark.parametrize(
    ("event", "delta", "epsilons"),
    [
        (poisson(0.01, 2.0, 2000), 1e-6, (1.0349602115511396, 0.97637296228643419)),
        (poisson(0.05, 1.3, 300, "replace_one"), 1e-8, (8.1985488972288989,)),
        (poisson(0.2, 4.0, 500), 1e-5, (5.1461399399205652,)),
    ],
)
def test_brackets_hold_what_30_digits_show(
    event: events.Event, delta: float, epsilons: tuple[float, ...]
) -> None:
    """The same integral by Gauss's rule, in a window three times as wide, in 30 digits."""
    for direction, epsilon in zip(directions(event), epsilons, strict=False):
        result = invert_epsilon([direction], delta)
        assert result is not None
        assert result.lower < epsilon < result.upper < epsilon * (1 + 1e-9)


@pytest.mark.parametrize("event", RUNS)
@pytest.mark.parametrize("delta", [1e-9, 1e-3])
def test_lattices_overlap(event: events.Event, delta: float) -> None:
    result = answer(event, delta)
    inverse = accountant("fourier").curve(event).delta(result.upper)
    assert inverse.lower <= delta <= inverse.upper * (1 + 1e-4)
    lattice = FourierAccountant().curve(event)._epsilon_by_lattice(delta)
    assert max(lattice.lower, result.lower) <= min(lattice.upper, result.upper)
    assert result.width < lattice.width


@pytest.mark.parametrize("spoilt", ["window", "end", "rule", "tilt"])
@pytest.mark.parametrize("event", RUNS)
def test_what_only_steers_never_makes_a_bound_false(
    event: events.Event, spoilt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = answer(event, 1e-6)
    window, end, transform = (
        direct_inversion._window,
        direct_inversion._last_frequency,
        AnalyticLaw.transform,
    )

    def narrow(*arguments: object) -> tuple[float, float, float, float]:
        tilt, above, below, width = window(*arguments)  # type: ignore[arg-type]
        if spoilt == "tilt":
            return 0.7 * tilt, above, min(below, 0.5 * tilt), width
        return tilt, above, below, 0.35 * width

    def early(*arguments: object) -> tuple[float, float]:
        return end(*arguments[:-1], float(arguments[-1]) + 18.0)  # type: ignore[arg-type]

    def coarse(self: AnalyticLaw, orders: Array, thetas: Array, bar: float) -> quadrature.Transform:
        return transform(self, orders, thetas, max(bar, -17.0))

    if spoilt in ("window", "tilt"):
        monkeypatch.setattr(direct_inversion, "_window", narrow)
    elif spoilt == "end":
        monkeypatch.setattr(direct_inversion, "_last_frequency", early)
    else:
        monkeypatch.setattr(AnalyticLaw, "transform", coarse)
        monkeypatch.setattr(direct_inversion, "_MAX_MOMENT_ERROR", 1e-2)
    result = invert_epsilon(directions(event), 1e-6)
    if result is not None:
        assert result.lower <= true.upper
        assert result.upper >= true.lower
        assert spoilt == "tilt" or result.width > true.width


def test_a_long_run_at_a_tiny_rate_has_a_narrow_bracket() -> None:
    result = answer(poisson(1e-5, 1.0, 10**10), 1e-10)
    assert result.width < 1e-3 * result.upper
    # About 10^10 releases of variance q² (e - 1) each it is a Gaussian mechanism, nearly.
    near = events.Gaussian(noise_multiplier=1 / math.sqrt(10**10 * 1e-10 * math.expm1(1.0)))
    about = accountant("gaussian").curve(near).epsilon(1e-10).upper
    assert math.isclose(result.upper, about, rel_tol=0.01)


def test_kinds_are_all_covered() -> None:
    kinds: set[Kind] = {"gaussian", "remove", "add", "replace"}
    assert {law.kind for law in LAWS} == kinds
