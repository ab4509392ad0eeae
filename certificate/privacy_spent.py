"""What a certified run has cost after some of its steps: ε at the certificate's δ.

The steps are those of ``affidavit.certificate.costs``: a run that stopped early is charged for
what it ran only where its cost is a sum over steps; any other costs all of it from the first
step on, and its curve says so. Every value is an upper bound, and none is above the
certificate's.

>>> from affidavit.plan.parse import plan_from
>>> plan = plan_from({"version": 1, "adjacency": "add_remove", "steps": 100,
...     "sampling": {"scheme": "full_batch"}, "target": {"delta": 1e-5},
...     "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 40}]})
>>> [(at.steps, round(at.epsilon, 3)) for at in spending(plan, "gaussian", 1e-5, points=2)]
[(0, 0.0), (25, 0.434), (100, 0.926)]
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from affidavit.accountants import AccountantError, accountant, parts
from affidavit.certificate.charts import Axis, Chart, Dots, Line, Mark, Rule
from affidavit.certificate.costs import Run, run_of
from affidavit.plan import Plan

POINTS = 16
HEADROOM = 1.1
"""Of the axis over the certified ε, so that its line does not lie on the frame."""


@dataclass(frozen=True, slots=True)
class Spent:
    """ε in nats, an upper bound, once ``steps`` steps were run."""

    steps: int
    epsilon: float


def spending(
    plan: Plan, engine: str, delta: float, *, points: int = POINTS, also: Iterable[int] = ()
) -> tuple[Spent, ...]:
    """ε at ``delta`` after about ``points`` numbers of steps, denser early on, and after ``also``.

    The engine is the one that decided. What it does not bound is left out. Raises
    ``AccountantError`` where it does not cover the plan at all.
    """
    run = run_of(plan, engine)
    whole = run.steps
    spread = {math.ceil(whole * (index / points) ** 2) for index in range(points + 1)}
    wanted = sorted(spread | {item for item in also if 0 <= item <= whole})
    most = _epsilon(run, engine, whole, delta)
    found = []
    for steps in wanted:
        try:
            found.append(Spent(steps, min(most, _epsilon(run, engine, steps, delta))))
        except AccountantError:
            continue
    return tuple(found)


def spending_chart(
    spent: tuple[Spent, ...], *, certified: float, delta: float, run: int | None = None
) -> Chart:
    """ε over steps up to the certified cap; ``run`` are the steps that a run was charged.

    Between two points the later one holds, so that what is drawn is a bound everywhere: ε
    rises with the steps, mostly ever more slowly, and a straight line would run below it.
    """
    marks: list[Mark] = [
        Line(name="ε at most, as certified", points=_held(spent)),
        Rule(name="certified for the whole run", at=certified, axis="y"),
    ]
    said = f"ε grows with the steps to the certified {certified:.6g}."
    if len(spent) > 2 and spent[1].epsilon == spent[-1].epsilon:
        said = f"The certified {certified:.6g} is charged in full from the first step on."
    if run is not None:
        at = next((item.epsilon for item in spent if item.steps == run), None)
        if at is not None:
            ran = tuple(entry for entry in spent if entry.steps <= run)
            marks.append(Line(name="the actual run", points=_held(ran)))
            marks.append(Dots(name=f"charged for {run} steps", points=((run, at),)))
            said += f" The run was charged for {run} steps."
    return Chart(
        title="ε over steps",
        description=said,
        x=Axis(label="steps run", low=0.0),
        y=Axis(label=f"ε (nats) at δ = {delta:g}", low=0.0, high=_above(certified)),
        marks=tuple(marks),
    )


def _above(certified: float) -> float | None:
    return HEADROOM * certified if math.isfinite(certified) and certified > 0 else None


def _held(spent: tuple[Spent, ...]) -> tuple[tuple[float, float], ...]:
    """The points as stairs, each at the height of its end."""
    found: list[tuple[float, float]] = [(item.steps, item.epsilon) for item in spent[:1]]
    for before, after in pairwise(spent):
        found += [(before.steps, after.epsilon), (after.steps, after.epsilon)]
    return tuple(found)


def _epsilon(run: Run, engine: str, steps: int, delta: float) -> float:
    event = run.event_of(steps)
    if not parts(event):
        return 0.0
    return accountant(engine).curve(event).epsilon(delta).upper
