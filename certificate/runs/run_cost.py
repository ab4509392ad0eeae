"""What a certified run costs, in full or after some of its steps.

A certificate names its plan and the engine that decided. The plan is closed again with that
engine, and the result must match the certificate (noise, steps and lots), or nothing is
entered. Releases beside the steps (a metric) are charged whether or not they ran.

Fewer steps cost less only where the cost is a sum over steps whatever made the run stop: fresh
lots and fixed orders with independent noise, phase by phase. Correlated noise, lots kept for
all epochs, an optimiser accounted as one release, and a selection among repetitions are charged
in full from the first step: nobody has proved that a run stopped in view of its outputs costs
less. ``spending`` gives ε over steps; every value is an upper bound and at most the certificate's.

>>> from affidavit.plan.parse import plan_from
>>> plan = plan_from({"version": 1, "adjacency": "add_remove", "steps": 10,
...     "sampling": {"scheme": "full_batch"}, "target": {"delta": 1e-5},
...     "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 4}]})
>>> run = run_of(plan, "gaussian")
>>> run.steps, run.cost_of(10).mu_squared.written(UNIT), run.cost_of(4).mu_squared.written(UNIT)
(10, '0.625000000001', '0.250000000001')
>>> [(point.steps, round(point.epsilon, 3)) for point in spending(plan, "gaussian", 1e-5, points=2)]
[(0, 0.0), (3, 1.698), (10, 3.341)]

References: docs/theorems/privacy-filter.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from affidavit.accountants import (
    AccountantError,
    Bracket,
    Sampling,
    Unsupported,
    accountant,
    certain_accountants,
    decimal_up,
    joint_mu,
    parts,
)
from affidavit.accountants.privacy_filter import UNIT, Cost, Steps, divergences
from affidavit.certificate import plan_summary
from affidavit.certificate.calibration import Solver, lower_open
from affidavit.certificate.charts import Axis, Chart, Dots, Line, Mark, ReferenceLine
from affidavit.mechanisms import Lowered, LoweredPhase
from affidavit.plan import Composed, Event, Plan

__all__ = ["UNIT", "CertificateDiffers", "CertifiedRun", "composed_epsilon", "run_of"]


class CertificateDiffers(Exception):
    """The plan, closed again, is not what its certificate says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CertifiedRun:
    """A certified run with nothing open.

    ``epsilon`` (nats) and ``delta`` are those of the certificate, ``certain`` whether they hold
    without a confidence. Every method raises ``AccountantError`` for an event that the
    filter does not bound.
    """

    lowered: Lowered
    epsilon: float
    delta: float
    certain: bool = True

    @property
    def steps(self) -> int:
        """The steps of all phases."""
        return sum(phase.steps or 0 for phase in self.lowered.phases)

    def event_of(self, steps_run: int) -> Event:
        """What was released by the first ``steps_run`` steps, and by what stands beside them.

        Raises ``ValueError`` for a number of steps that the run does not have.
        """
        if not 0 <= steps_run <= self.steps:
            raise ValueError(f"steps run must lie between 0 and {self.steps}, got {steps_run}")
        if steps_run == self.steps or self.lowered.extra.selection is not None:
            return self.lowered.event()
        result, left = [], steps_run
        for phase in self.lowered.phases:
            length = phase.steps or 0
            ran = min(left, length)
            left -= ran
            if ran:
                result.append(replace(phase, steps=ran if _is_sum_over_steps(phase) else length))
        # The plan keeps as many phases as are left, so that the two stay in step.
        plan = self.lowered.plan
        shorter = plan.model_copy(update={"phases": plan.phases[: len(result)]})
        return replace(self.lowered, phases=tuple(result), plan=shorter).event()

    def cost_of(self, steps_run: int) -> Cost:
        """The cost of ``steps_run`` steps, never above that of the whole run."""
        event = self.event_of(steps_run)
        empty = not parts(event)
        return Cost.of(
            renyi=divergences(event),
            mu_squared=_mu_squared(event),
            epsilon=0.0 if empty else self._epsilon(event, steps_run),
            delta=0.0 if empty else self.delta,
            steps=Steps.of(event) if self._is_sum_over_steps else Steps(others=int(not empty)),
        )

    @property
    def _is_sum_over_steps(self) -> bool:
        phases = self.lowered.phases
        return self.lowered.extra.selection is None and all(map(_is_sum_over_steps, phases))

    def _epsilon(self, event: Event, steps_run: int) -> float:
        """ε at the certificate's δ for the plain sum; the certificate's own where no less."""
        if steps_run == self.steps:
            return self.epsilon
        try:
            return min(self.epsilon, composed_epsilon([event], self.delta)[1].upper)
        except AccountantError:
            return self.epsilon


def run_of(plan: Plan, engine: str, *, predicate: dict[str, Any] | None = None) -> CertifiedRun:
    """The run of ``plan`` as ``engine`` closes it; ``predicate`` is the certificate's.

    Raises ``CertificateDiffers`` where ``predicate`` gives another noise, length or sampling, and
    ``AccountantError`` where the engine does not cover the plan.
    """
    chosen = accountant(engine)
    lowered = Solver(lowered=lower_open(plan), engine=chosen).closed()
    if predicate is None:
        return CertifiedRun(lowered=lowered, epsilon=math.inf, delta=1.0)
    guarantee = predicate["guarantee"]
    if guarantee is None or not _agrees(lowered, predicate):
        raise CertificateDiffers("this release closes the plan differently from its certificate")
    return CertifiedRun(
        lowered=lowered,
        epsilon=float(guarantee["epsilon"]["upper"]),
        delta=float(guarantee["delta"]["upper"]),
        certain="confidence" not in guarantee and not isinstance(chosen, Sampling),
    )


def composed_epsilon(events: Sequence[Event], delta: float) -> tuple[str, Bracket]:
    """Name and bracket of ε of ``events`` composed, by the first engine that reaches them.

    This is what they would have cost had all of them been fixed in advance; of plans that
    were chosen in view of results it bounds nothing. Raises ``Unsupported``.
    """
    event = Composed(events=tuple(events))
    for engine in certain_accountants():
        try:
            return engine.name, engine.curve(event).epsilon(delta)
        except (AccountantError, ArithmeticError, ValueError):
            continue
    raise Unsupported("no engine can compose these runs.", "Use the privacy filter's number.")


def _agrees(lowered: Lowered, predicate: dict[str, Any]) -> bool:
    """Whether noise, steps and lots of ``lowered`` are as private as ``predicate`` states."""
    provided = plan_summary.releases_of(lowered.plan, lowered.plan, 1.0)
    stated = predicate["noise_multiplier"]["releases"]
    if [item.name for item in provided] != [entry["name"] for entry in stated]:
        return False
    for ours, theirs in zip(provided, stated, strict=True):
        requested = theirs["given"] if theirs["given"] is not None else theirs["required"]
        if ours.given is None or requested is None:
            return False
        if ours.given > float(requested) * (1 + 1e-11):
            return False
    sampling = plan_summary.sampling_of(lowered)
    return all(
        (ours["scheme"], ours["steps"], ours.get("lot_size"))
        == (theirs["scheme"], theirs["steps"], theirs.get("lot_size"))
        and _not_rarer(ours["probability"], theirs["probability"])
        for ours, theirs in zip(sampling, predicate["sampling"], strict=True)
    )


def _not_rarer(ours: float | None, theirs: str | None) -> bool:
    """Whether a record is drawn at least as often as the predicate states, in its digits."""
    if ours is None or theirs is None:
        return ours is None and theirs is None
    return ours * (1 + 1e-11) >= float(theirs)


def _is_sum_over_steps(phase: LoweredPhase) -> bool:
    return phase.correlation is None and phase.whole is None and phase.sampled.run is None


def _mu_squared(event: Event) -> float:
    """μ² of Gaussian DP, rounded up; infinite where the run is not exactly one Gaussian."""
    try:
        mu = joint_mu(event)
    except AccountantError:
        return math.inf
    return mu * mu * (1 + 1e-15)


POINTS = 16
HEADROOM = 1.1
"""Of the axis over the certified ε, so that its line does not lie on the frame."""


@dataclass(frozen=True, slots=True)
class PrivacySpent:
    """ε in nats, an upper bound, once ``steps`` steps were run."""

    steps: int
    epsilon: float


def spending(
    plan: Plan, engine: str, delta: float, *, points: int = POINTS, also: Iterable[int] = ()
) -> tuple[PrivacySpent, ...]:
    """ε at ``delta`` after about ``points`` numbers of steps, denser early on, and after ``also``.

    The engine is the one that decided. What it does not bound is left out. Raises
    ``AccountantError`` where it does not cover the plan at all.
    """
    run = run_of(plan, engine)
    whole = run.steps
    spread = {math.ceil(whole * (index / points) ** 2) for index in range(points + 1)}
    requested = sorted(spread | {item for item in also if 0 <= item <= whole})
    most = _epsilon(run, engine, whole, delta)
    result = []
    for steps in requested:
        try:
            result.append(PrivacySpent(steps, min(most, _epsilon(run, engine, steps, delta))))
        except AccountantError:
            continue
    return tuple(result)


def spending_chart(
    spent: tuple[PrivacySpent, ...], *, certified: float, delta: float, run: int | None = None
) -> Chart:
    """ε over steps up to the certified cap; ``run`` are the steps that a run was charged.

    Between two points the later one holds, so that what is drawn is a bound everywhere: ε
    rises with the steps, mostly ever more slowly, and a straight line would run below it.
    """
    marks: list[Mark] = [
        Line(name="ε at most, as certified", points=_held(spent)),
        ReferenceLine(name="certified for the whole run", at=certified),
    ]
    stated = f"ε grows with the steps to the certified {certified:.6g}."
    if len(spent) > 2 and spent[1].epsilon == spent[-1].epsilon:
        stated = f"The certified {certified:.6g} is charged in full from the first step on."
    if run is not None:
        at = next((item.epsilon for item in spent if item.steps == run), None)
        if at is not None:
            ran = tuple(entry for entry in spent if entry.steps <= run)
            marks.append(Line(name="the actual run", points=_held(ran)))
            marks.append(Dots(name=f"charged for {run} steps", points=((run, at),)))
            stated += f" The run was charged for {run} steps."
    above = HEADROOM * certified if math.isfinite(certified) and certified > 0 else None
    return Chart(
        title="ε over steps",
        description=stated,
        x=Axis(label="steps run", low=0.0),
        y=Axis(label=f"ε (nats) at δ = {decimal_up(delta, 6)}", low=0.0, high=above),
        marks=tuple(marks),
    )


def _held(spent: tuple[PrivacySpent, ...]) -> tuple[tuple[float, float], ...]:
    """The points as stairs, each at the height of its end."""
    result: list[tuple[float, float]] = [(item.steps, item.epsilon) for item in spent[:1]]
    for before, after in pairwise(spent):
        result += [(before.steps, after.epsilon), (after.steps, after.epsilon)]
    return tuple(result)


def _epsilon(run: CertifiedRun, engine: str, steps: int, delta: float) -> float:
    event = run.event_of(steps)
    if not parts(event):
        return 0.0
    return accountant(engine).curve(event).epsilon(delta).upper
