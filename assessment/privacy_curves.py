"""The privacy curves of a plan: what its guarantee implies beyond one ε at one δ.

All values derive from the privacy curve of the engine that decides the certificate, for the solved
plan. Ends are proved and rounded outward; null means that the method gives no bound. The
Gaussian-DP μ and the zCDP ρ are set only if the run is exactly one Gaussian mechanism; of others
``gaussian_bound`` has the least μ whose curve bounds theirs. A central-limit μ is not a bound and
never appears.

``Curves.digest`` is the sha256 of the document's RFC 8785 canonical JSON.

Units: ε, Rényi divergence and ``odds_exponent`` in nats; δ, rates and priors are probabilities.

References: Dong, Roth and Su, arXiv:1905.02383 (μ, trade-off); the modules of
``affidavit.accountants`` have those of each conversion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from affidavit.accountants import (
    AccountantError,
    Adjustable,
    Bracket,
    GaussianBound,
    Sampling,
    TradeOff,
    accountant,
    belief,
    decimal_up,
    gaussian_bound,
    guess_accuracy,
    odds_exponent,
    sample_trade_off,
)
from affidavit.assessment.assessment import Assessment, interval
from affidavit.assessment.calibration import Solver, lower_open
from affidavit.assessment.certification import certify
from affidavit.assessment.charts import (
    CURVE_KINDS,
    Axis,
    Band,
    Chart,
    Dots,
    Line,
    Mark,
    draw_panels,
)
from affidavit.plan import (
    Plan,
    Reason,
    digest_of,
    events,
)

DELTAS = tuple(10.0**-exponent for exponent in range(3, 13))
EPSILONS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 16.0)
ALPHAS = (1e-4, 1e-3, 0.01, 0.05, *(index / 20 for index in range(2, 20)), 0.99, 0.999)
FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
PRIORS = (0.001, 0.01, 0.1, 0.5)
WHOLE_ORDERS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 63, 128, 256)
PROFILE_WIDTH = 5e-4
"""The relative width of δ in the dense profile; a narrower one hardly changes the trade-off."""

Progress = Callable[[str, int], None]
"""A callback with the name of the current computation and its number of points."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """The curves of one solved plan, by the engine that decides about it.

    ``epsilon_of`` has pairs of δ and ε, ``delta_of`` of ε and δ, ``renyi`` of an order and a
    divergence, ``guesses`` of a prior and the probability of a right guess. At ``delta`` the target
    is drawn, and it is the probability with which a belief may exceed its bound: except with it,
    the odds of a belief rise by at most e to ``odds_exponent``. ``gaussian_bound`` is the least
    Gaussian curve that is shown to bound the run's.
    """

    assessment: Assessment
    engine: dict[str, str]
    delta: float
    epsilon_of: tuple[tuple[float, Bracket], ...]
    delta_of: tuple[tuple[float, Bracket], ...]
    trade_off: TradeOff
    renyi: tuple[tuple[float, float], ...]
    guesses: tuple[tuple[float, Bracket], ...]
    odds_exponent: float
    gaussian_bound: GaussianBound | None

    @property
    def mu(self) -> float | None:
        """The Gaussian-DP parameter, or None unless the run is exactly one Gaussian mechanism."""
        return self.assessment.mu

    @property
    def rho(self) -> float | None:
        """The zCDP parameter μ²/2, or None unless the run is exactly one Gaussian mechanism."""
        return None if self.mu is None else _rho(self.mu)

    def as_document(self) -> dict[str, Any]:
        """Return the document with its digest."""
        result = self._content()
        return {**result, "digest": digest_of(result)}

    @property
    def digest(self) -> str:
        """sha256 of the document."""
        return digest_of(self._content())

    def _content(self) -> dict[str, Any]:
        requested = self.assessment
        return {
            "plan_digest": requested.plan_digest,
            "verdict": requested.verdict,
            "accountant": self.engine,
            "adjacency": requested.adjacency,
            "unit": requested.unit,
            "target": {"epsilon": requested.target_epsilon, "delta": requested.target_delta},
            "epsilon_at_delta": [
                {"delta": delta, "epsilon": interval(result)} for delta, result in self.epsilon_of
            ],
            "delta_at_epsilon": [
                {"epsilon": epsilon, "delta": interval(result)} for epsilon, result in self.delta_of
            ],
            "mu": self.mu,
            "rho": self.rho,
            "gaussian_bound": None if self.gaussian_bound is None else asdict(self.gaussian_bound),
            "renyi": {
                "exact": self.mu is not None,
                "divergence_at_order": [
                    {"order": order, "upper": upper} for order, upper in self.renyi
                ],
            },
            "trade_off": [
                {"type_one": alpha, "type_two": interval(self.trade_off.type_two(alpha))}
                for alpha in ALPHAS
            ],
            "advantage": interval(self.trade_off.advantage),
            "true_positive_rate": [
                {
                    "false_positive_rate": rate,
                    "true_positive_rate": interval(self.trade_off.true_positive_rate(rate)),
                }
                for rate in FALSE_POSITIVE_RATES
            ],
            "posterior": [
                {
                    "prior": prior,
                    "right_guess": interval(right),
                    "belief": {
                        "upper": belief(prior, self.odds_exponent),
                        "except_with_probability": self.delta,
                    },
                }
                for prior, right in self.guesses
            ],
            "profile": [
                {"epsilon": epsilon, "delta": interval(result)}
                for epsilon, result in zip(
                    self.trade_off.epsilons, self.trade_off.deltas, strict=True
                )
            ],
        }


def curves(
    plan: Plan, *, engine: str | None = None, progress: Progress = lambda _what, _points: None
) -> Curves | Assessment:
    """Compute the curves of ``plan``, or return its assessment if nothing is proved."""
    progress("certificate", 0)
    assessment = certify(plan, engine=engine, second_opinion=False)
    if assessment.verdict in ("refused", "undecided") or assessment.delta is None:
        return assessment
    chosen = accountant(assessment.accountants[0].name)
    if isinstance(chosen, Sampling):
        return replace(assessment, verdict="refused", reasons=(SAMPLED,))
    solver = Solver(lowered=lower_open(plan), engine=chosen)
    closed = solver.solve()
    event, curve = closed.event(), solver.bracketing_curve(closed)
    delta = assessment.delta.upper
    epsilon_of = _ask(curve.epsilon, {*DELTAS, delta})
    target = assessment.target_epsilon
    delta_of = _ask(curve.delta, {*EPSILONS, *(() if target is None else (target,))})
    dense = curve.with_width(PROFILE_WIDTH) if isinstance(curve, Adjustable) else curve
    trade_off = sample_trade_off(dense, progress=lambda points: progress("profile", points))
    return Curves(
        assessment=assessment,
        engine={"name": chosen.name, "version": chosen.version},
        delta=delta,
        epsilon_of=tuple(reversed(epsilon_of)),
        delta_of=delta_of,
        trade_off=trade_off.refined(dict(delta_of)),
        renyi=_renyi(event, assessment.mu),
        guesses=_ask(lambda prior: guess_accuracy(curve, prior), PRIORS),
        odds_exponent=odds_exponent(curve, delta),
        gaussian_bound=gaussian_bound(trade_off, dense)
        if assessment.mu is None
        else GaussianBound(mu=assessment.mu, remainder=0.0, regret=0.0),
    )


SAMPLED = Reason(
    code="unsupported",
    message="the guarantee of this plan is a sampled bound at one δ; each point of a whole curve "
    "would take seconds and hold with a confidence of its own.",
    remedy="Ask `certify` for ε at the δ that matters.",
)
"""The reason why a sampled guarantee has no curve."""


def _ask(
    question: Callable[[float], Bracket], values: Iterable[float]
) -> tuple[tuple[float, Bracket], ...]:
    """Evaluate ``question`` at the ``values`` in order and leave out what the engine refuses."""
    result = []
    for value in sorted(values):
        try:
            result.append((value, question(value)))
        except AccountantError:
            continue
    return tuple(result)


def _renyi(event: events.Event, mu: float | None) -> tuple[tuple[float, float], ...]:
    """Return Rényi divergences at whole orders: exact for a Gaussian, else bounds, if any."""
    if mu is not None:
        return tuple((order, order * _rho(mu)) for order in WHOLE_ORDERS)
    # Importing its library takes a second.
    from affidavit.accountants import RdpAccountant, parts

    # A selection is bounded over all orders together, other events at each order separately.
    selects = any(isinstance(part, events.RepeatAndSelect) for part, _ in parts(event))
    engine = RdpAccountant(orders=None if selects else WHOLE_ORDERS)
    try:
        result = dict(engine.curve(event).divergences())
    except AccountantError:
        return ()
    return tuple((order, result[order]) for order in WHOLE_ORDERS if order in result)


def _rho(mu: float) -> float:
    """Return μ²/2, rounded up."""
    return mu * mu / 2 * (1 + 1e-15)


_MIN_SHOWN_DELTA = 1e-12
_ALPHAS = tuple(index / 100 for index in range(101))
_RATES = tuple(10 ** (-5 + index / 12) for index in range(61))
_PRIORS = tuple(10 ** (-4 + index / 10) for index in range(41))


def profile_chart(curves: Curves) -> Chart:
    """Return a chart of δ against ε, with the target if the plan has a full one."""
    known = curves.trade_off
    band = tuple(
        (epsilon, delta.lower, delta.upper)
        for epsilon, delta in zip(known.epsilons, known.deltas, strict=True)
        if delta.upper >= _MIN_SHOWN_DELTA / 10
    )
    marks: list[Mark] = [Band(name="proved bracket of δ(ε)", points=band)]
    target = curves.assessment.target_epsilon, curves.assessment.target_delta
    if target[0] is not None and target[1] is not None:
        marks.append(Dots(name="target", points=((target[0], target[1]),)))
    return Chart(
        title="Privacy profile",
        description=f"δ falls with ε; at δ = {decimal_up(curves.delta, 6)} ε is at most "
        f"{_certified(curves)}.",
        x=Axis(label="ε (nats)", low=0.0),
        y=Axis(label="δ (probability)", scale="log", low=_MIN_SHOWN_DELTA, high=1.0),
        marks=tuple(marks),
    )


def trade_off_chart(curves: Curves) -> Chart:
    """Return a chart of the least type II error against the type I error."""
    points = tuple((alpha, curves.trade_off.type_two(alpha)) for alpha in _ALPHAS)
    return Chart(
        title="Trade-off function",
        description="The share of members that an attack misses at a given false-positive rate; "
        "the diagonal is blind guessing, and the advantage over it is at most "
        f"{_up(curves.trade_off.advantage.upper)}.",
        x=Axis(label="type I error α (false-positive rate)", low=0.0, high=1.0),
        y=Axis(label="type II error f(α)", low=0.0, high=1.0),
        marks=(
            Band(name="proved bracket", points=tuple((a, f.lower, f.upper) for a, f in points)),
            Line(name="no leakage", points=((0.0, 1.0), (1.0, 0.0)), faint=True),
        ),
    )


def attack_chart(curves: Curves) -> Chart:
    """Return a chart of the true- against the false-positive rate of the best attack."""
    rates = [(rate, curves.trade_off.true_positive_rate(rate)) for rate in _RATES]
    rate = curves.trade_off.true_positive_rate(0.01).upper
    return Chart(
        title="Membership attack",
        description=f"At a false-positive rate of 1 % at most {_up(rate)} of members are found.",
        x=Axis(label="false-positive rate", scale="log", low=_RATES[0], high=1.0),
        y=Axis(label="true-positive rate", scale="log", low=_RATES[0], high=1.0),
        marks=(
            Band(
                name="best attack, bracket", points=tuple((r, t.lower, t.upper) for r, t in rates)
            ),
            Line(
                name="no leakage",
                points=((_RATES[0], _RATES[0]), (1.0, 1.0)),
                faint=True,
            ),
        ),
    )


def renyi_chart(curves: Curves) -> Chart:
    """Return a chart of the Rényi divergence against its order."""
    name = "exact" if curves.mu is not None else "proved upper bound"
    return Chart(
        title="Rényi divergence",
        description=f"The {name} at whole orders.",
        x=Axis(label="order", scale="log", low=2.0),
        y=Axis(label="divergence (nats)", scale="log"),
        marks=(Line(name=name, points=curves.renyi),),
    )


def belief_chart(curves: Curves) -> Chart:
    """Return a chart of the largest belief after the release against the belief before."""
    odds = math.exp(min(700.0, curves.odds_exponent))
    after = tuple((prior, prior * odds / (1 - prior + prior * odds)) for prior in _PRIORS[:-1])
    return Chart(
        title="Belief about one record",
        description="From a prior belief to the largest belief after the release, which is "
        f"exceeded with a probability of at most {decimal_up(curves.delta, 6)}.",
        x=Axis(label="belief before", scale="log", low=_PRIORS[0], high=1.0),
        y=Axis(label="belief after", low=0.0, high=1.0),
        marks=(
            Line(
                name=f"at most, except with probability {decimal_up(curves.delta, 6)}", points=after
            ),
            Line(name="unmoved", points=tuple((prior, prior) for prior in _PRIORS), faint=True),
        ),
    )


CURVE_CHARTS: dict[str, Callable[[Curves], Chart]] = dict(
    zip(
        CURVE_KINDS,
        (profile_chart, trade_off_chart, attack_chart, renyi_chart, belief_chart),
        strict=True,
    )
)
"""Every chart by its name."""


def draw_curves(curves: Curves, kinds: tuple[str, ...] = ()) -> str:
    """Draw the charts ``kinds``, by default all, as one SVG.

    The Rényi divergence is left out by default if the Rényi accountant does not cover the run.
    """
    shown = kinds or tuple(kind for kind in CURVE_CHARTS if kind != "renyi" or curves.renyi)
    name = curves.assessment.plan.get("name")
    delta = decimal_up(curves.delta, 6)
    title = f"ε ≤ {_certified(curves)} at δ = {delta}, {curves.assessment.adjacency}"
    title = title if name is None else f"{name}: {title}"
    charts = [CURVE_CHARTS[kind](curves) for kind in shown]
    columns = 1 if len(charts) == 1 else 2
    return draw_panels(title, charts, columns=columns, standalone=True)


def _certified(curves: Curves) -> str:
    epsilon = curves.assessment.epsilon
    return "?" if epsilon is None else _up(epsilon.upper)


def _up(value: float) -> str:
    return decimal_up(value, 4)
