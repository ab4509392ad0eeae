"""The pictures of a plan's curves: profile, trade-off, attack rates, Rényi, belief.

Each is a chart of what ``affidavit.certificate.privacy_curves`` computed; nothing is computed here
beside what is read off it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from affidavit.accountants import decimal_up
from affidavit.certificate.charts import Axis, Band, Chart, Dots, Line, Mark, draw_panels
from affidavit.certificate.privacy_curves import Curves

_SHOWN_DELTA = 1e-12
_SPREAD = tuple(index / 100 for index in range(101))
_RATES = tuple(10 ** (-5 + index / 12) for index in range(61))
_PRIORS = tuple(10 ** (-4 + index / 10) for index in range(41))


def profile(found: Curves) -> Chart:
    """δ against ε, with the target where the plan has a full one."""
    known = found.trade_off
    band = tuple(
        (epsilon, delta.lower, delta.upper)
        for epsilon, delta in zip(known.epsilons, known.deltas, strict=True)
        if delta.upper >= _SHOWN_DELTA / 10
    )
    marks: list[Mark] = [Band(name="proved bracket of δ(ε)", points=band)]
    target = found.assessment.target_epsilon, found.assessment.target_delta
    if target[0] is not None and target[1] is not None:
        marks.append(Dots(name="target", points=((target[0], target[1]),)))
    return Chart(
        title="Privacy profile",
        description=f"δ falls with ε; at δ = {found.delta:g} ε is at most {_certified(found)}.",
        x=Axis(label="ε (nats)", low=0.0),
        y=Axis(label="δ (probability)", scale="log", low=_SHOWN_DELTA, high=1.0),
        marks=tuple(marks),
    )


def trade_off(found: Curves) -> Chart:
    """The least error of type II against the error of type I."""
    points = tuple((alpha, found.trade_off.type_two(alpha)) for alpha in _SPREAD)
    return Chart(
        title="Trade-off function",
        description="What an attack must miss to raise few false alarms; the diagonal is blind "
        f"guessing, and the advantage over it is at most {_up(found.trade_off.advantage.upper)}.",
        x=Axis(label="type I error α (false-positive rate)", low=0.0, high=1.0),
        y=Axis(label="type II error f(α)", low=0.0, high=1.0),
        marks=(
            Band(name="proved bracket", points=tuple((a, f.lower, f.upper) for a, f in points)),
            Line(name="no leakage", points=((0.0, 1.0), (1.0, 0.0)), faint=True),
        ),
    )


def attack(found: Curves) -> Chart:
    """True- against false-positive rate of the best membership attack, where both are small."""
    rates = [(rate, found.trade_off.true_positive_rate(rate)) for rate in _RATES]
    rate = found.trade_off.true_positive_rate(0.01).upper
    return Chart(
        title="Membership attack",
        description=f"At a false-positive rate of 1 % at most {_up(rate)} of members are found.",
        x=Axis(label="false-positive rate", scale="log", low=_RATES[0], high=1.0),
        y=Axis(label="true-positive rate", scale="log", low=_RATES[0], high=1.0),
        marks=(
            Band(
                name="best attack, bracket", points=tuple((r, t.lower, t.upper) for r, t in rates)
            ),
            Line(name="no leakage", points=((_RATES[0], _RATES[0]), (1.0, 1.0)), faint=True),
        ),
    )


def renyi(found: Curves) -> Chart:
    """Rényi divergence against its order."""
    what = "exact" if found.mu is not None else "proved upper bound"
    return Chart(
        title="Rényi divergence",
        description=f"The {what} at whole orders.",
        x=Axis(label="order", scale="log", low=2.0),
        y=Axis(label="divergence (nats)", scale="log"),
        marks=(Line(name=what, points=found.renyi),),
    )


def belief(found: Curves) -> Chart:
    """What an observer believes at most after the release, against what it believed before."""
    odds = math.exp(min(700.0, found.odds_exponent))
    after = tuple((prior, prior * odds / (1 - prior + prior * odds)) for prior in _PRIORS[:-1])
    return Chart(
        title="Belief about one record",
        description="From a prior belief to the belief after the release, which is passed with "
        f"a probability of at most {found.delta:g}.",
        x=Axis(label="belief before", scale="log", low=_PRIORS[0], high=1.0),
        y=Axis(label="belief after", low=0.0, high=1.0),
        marks=(
            Line(name=f"at most, except with probability {found.delta:g}", points=after),
            Line(name="unmoved", points=tuple((prior, prior) for prior in _PRIORS), faint=True),
        ),
    )


KINDS: dict[str, Callable[[Curves], Chart]] = {
    "profile": profile,
    "trade-off": trade_off,
    "attack": attack,
    "renyi": renyi,
    "belief": belief,
}
"""Every picture by its name."""


def picture(found: Curves, kinds: tuple[str, ...] = (), *, standalone: bool = True) -> str:
    """The pictures ``kinds``, or all that there are, as one SVG.

    A picture without data, as the Rényi divergence of a run that the Rényi accountant does
    not know, is left out unless it is asked for.
    """
    shown = kinds or tuple(kind for kind in KINDS if kind != "renyi" or found.renyi)
    name = found.assessment.plan.get("name")
    title = f"ε ≤ {_certified(found)} at δ = {found.delta:g}, {found.assessment.adjacency}"
    title = title if name is None else f"{name}: {title}"
    charts = [KINDS[kind](found) for kind in shown]
    columns = 1 if len(charts) == 1 else 2
    return draw_panels(title, charts, columns=columns, standalone=standalone)


def _certified(found: Curves) -> str:
    epsilon = found.assessment.epsilon
    return "?" if epsilon is None else _up(epsilon.upper)


def _up(value: float) -> str:
    return decimal_up(value, 4)
