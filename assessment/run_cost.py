"""The cost of a certified run, in full or after some of its steps.

A certificate names its plan and the engine that decided. The plan is solved again with that engine,
and the result must match the certificate (noise, steps and lots), or nothing is charged. Releases
beside the steps (a metric) are charged whether or not they ran.

Fewer steps cost less only if the cost is a sum over steps for any stopping rule: fresh lots and
fixed orders with independent noise, phase by phase. Correlated noise, lots that stay the same in
all epochs, an optimiser accounted as one release, and a selection among repetitions are charged in
full from the first step: no theorem covers a run that is stopped because of its outputs.
``spending`` returns ε over steps; every value is an upper bound and at most the certificate's.

>>> from affidavit.accountants.privacy_filter import UNIT
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
from affidavit.accountants.privacy_filter import Cost, Steps, divergences
from affidavit.assessment import plan_summary
from affidavit.assessment.calibration import Solver, lower_open
from affidavit.assessment.charts import (
    Axis,
    Chart,
    Dots,
    Line,
    Mark,
    ReferenceLine,
)
from affidavit.mechanisms import Lowered, LoweredPhase
from affidavit.plan import (
    Plan,
    events,
)


class CertificateDiffers(Exception):
    """The solved plan differs from its certificate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CertifiedRun:
    """A certified run without unknowns.

    ``epsilon`` (nats) and ``delta`` are those of the certificate; ``certain`` is False if they hold
    with a confidence. The methods raise ``AccountantError`` for an event that the filter does not
    bound.
    """

    lowered: Lowered
    epsilon: float
    delta: float
    certain: bool = True

    @property
    def steps(self) -> int:
        """The steps of all phases."""
        return sum(phase.steps or 0 for phase in self.lowered.phases)

    def event_of(self, steps_run: int) -> events.Event:
        """Return the event of the first ``steps_run`` steps and of the releases beside them.

        Raises ``ValueError`` for a number of steps that the run does not have.
        """
        if not 0 <= steps_run <= self.steps:
            raise ValueError(f"steps run must lie between 0 and {self.steps}, got {steps_run}")
        if steps_run == self.steps or self.lowered.extra.selection is not None:
            return self.lowered.event()
        result, remaining = [], steps_run
        for phase in self.lowered.phases:
            length = phase.steps or 0
            ran = min(remaining, length)
            remaining -= ran
            if ran:
                result.append(replace(phase, steps=ran if _is_sum_over_steps(phase) else length))
        # The plan must have as many phases as the lowered run.
        plan = self.lowered.plan
        shorter = plan.model_copy(update={"phases": plan.phases[: len(result)]})
        return replace(self.lowered, phases=tuple(result), plan=shorter).event()

    def cost_of(self, steps_run: int) -> Cost:
        """Return the cost of ``steps_run`` steps, at most that of the whole run."""
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

    def _epsilon(self, event: events.Event, steps_run: int) -> float:
        """Return ε at the certificate's δ by composition, at most the certificate's own."""
        if steps_run == self.steps:
            return self.epsilon
        try:
            return min(self.epsilon, composed_epsilon([event], self.delta)[1].upper)
        except AccountantError:
            return self.epsilon


def run_of(plan: Plan, engine: str, *, predicate: dict[str, Any] | None = None) -> CertifiedRun:
    """Return the run of ``plan`` as ``engine`` solves it; ``predicate`` is the certificate's.

    Raises ``CertificateDiffers`` if ``predicate`` has another noise, length or sampling, and
    ``AccountantError`` if the engine does not cover the plan.
    """
    chosen = accountant(engine)
    lowered = Solver(lowered=lower_open(plan), engine=chosen).solve()
    if predicate is None:
        return CertifiedRun(lowered=lowered, epsilon=math.inf, delta=1.0)
    guarantee = predicate["guarantee"]
    if guarantee is None or not _matches(lowered, predicate):
        raise CertificateDiffers("this release closes the plan differently from its certificate")
    return CertifiedRun(
        lowered=lowered,
        epsilon=float(guarantee["epsilon"]["upper"]),
        delta=float(guarantee["delta"]["upper"]),
        certain="confidence" not in guarantee and not isinstance(chosen, Sampling),
    )


def composed_epsilon(runs: Sequence[events.Event], delta: float) -> tuple[str, Bracket]:
    """Return the first engine that covers the composition of ``runs`` and its bracket of ε.

    This is the cost of plans that were all fixed in advance; for plans chosen because of earlier
    results it is not a bound. Raises ``Unsupported``.
    """
    event = events.Composed(events=tuple(runs))
    for engine in certain_accountants():
        try:
            return engine.name, engine.curve(event).epsilon(delta)
        except (AccountantError, ArithmeticError, ValueError):
            continue
    raise Unsupported("no engine can compose these runs.", "Use the privacy filter's number.")


def _matches(lowered: Lowered, predicate: dict[str, Any]) -> bool:
    """Whether the noise, steps and lots of ``lowered`` cost no less than ``predicate`` states."""
    provided = plan_summary.releases_of(lowered.plan, lowered.plan, 1.0)
    stated = predicate["noise_multiplier"]["releases"]
    if [item.name for item in provided] != [entry["name"] for entry in stated]:
        return False
    for release, entry in zip(provided, stated, strict=True):
        sigma = entry["given"] if entry["given"] is not None else entry["required"]
        if release.given is None or sigma is None:
            return False
        if release.given > float(sigma) * (1 + 1e-11):
            return False
    sampling = plan_summary.sampling_of(lowered)
    return all(
        (phase["scheme"], phase["steps"], phase.get("lot_size"))
        == (entry["scheme"], entry["steps"], entry.get("lot_size"))
        and _is_drawn_as_often(phase["probability"], entry["probability"])
        for phase, entry in zip(sampling, predicate["sampling"], strict=True)
    )


def _is_drawn_as_often(probability: float | None, stated: str | None) -> bool:
    """Whether a record is drawn at least as often as the predicate states, up to its digits."""
    if probability is None or stated is None:
        return probability is None and stated is None
    return probability * (1 + 1e-11) >= float(stated)


def _is_sum_over_steps(phase: LoweredPhase) -> bool:
    return phase.correlation is None and phase.whole is None and phase.sampled.run is None


def _mu_squared(event: events.Event) -> float:
    """Return μ² of Gaussian DP, rounded up; infinite unless the run is exactly one Gaussian."""
    try:
        mu = joint_mu(event)
    except AccountantError:
        return math.inf
    return mu * mu * (1 + 1e-15)


DEFAULT_POINTS = 16
AXIS_HEADROOM = 1.1
"""The end of the axis over the certified ε, so that its line does not lie on the frame."""


@dataclass(frozen=True, slots=True)
class PrivacySpent:
    """An upper bound of ε, in nats, after ``steps`` steps."""

    steps: int
    epsilon: float


def spending(
    plan: Plan,
    engine: str,
    delta: float,
    *,
    points: int = DEFAULT_POINTS,
    extra_steps: Iterable[int] = (),
) -> tuple[PrivacySpent, ...]:
    """Return ε at ``delta`` after about ``points`` numbers of steps and after ``extra_steps``.

    The points are denser at the beginning. ``engine`` is the one that decided; a point that it does
    not bound is left out. Raises ``AccountantError`` if it does not cover the plan.
    """
    run = run_of(plan, engine)
    spread = {math.ceil(run.steps * (index / points) ** 2) for index in range(points + 1)}
    requested = sorted(spread | {steps for steps in extra_steps if 0 <= steps <= run.steps})
    total = _epsilon(run, engine, run.steps, delta)
    result = []
    for steps in requested:
        try:
            result.append(PrivacySpent(steps, min(total, _epsilon(run, engine, steps, delta))))
        except AccountantError:
            continue
    return tuple(result)


def spending_chart(
    spent: tuple[PrivacySpent, ...], *, certified: float, delta: float, run: int | None = None
) -> Chart:
    """Return a chart of ε over steps up to the certified bound.

    ``run`` is the number of steps that a run was charged. The line has stairs at the height of the
    later point, so that it is a bound everywhere: a straight line could run below ε.
    """
    marks: list[Mark] = [
        Line(name="ε at most, as certified", points=_stairs(spent)),
        ReferenceLine(name="certified for the whole run", at=certified),
    ]
    description = f"ε grows with the steps to the certified {certified:.6g}."
    if len(spent) > 2 and spent[1].epsilon == spent[-1].epsilon:
        description = f"The certified {certified:.6g} is charged in full from the first step on."
    charged = next((point.epsilon for point in spent if point.steps == run), None)
    if run is not None and charged is not None:
        ran = tuple(point for point in spent if point.steps <= run)
        marks.append(Line(name="the actual run", points=_stairs(ran)))
        marks.append(Dots(name=f"charged for {run} steps", points=((run, charged),)))
        description += f" The run was charged for {run} steps."
    high = AXIS_HEADROOM * certified if math.isfinite(certified) and certified > 0 else None
    return Chart(
        title="ε over steps",
        description=description,
        x=Axis(label="steps run", low=0.0),
        y=Axis(label=f"ε (nats) at δ = {decimal_up(delta, 6)}", low=0.0, high=high),
        marks=tuple(marks),
    )


def _stairs(spent: tuple[PrivacySpent, ...]) -> tuple[tuple[float, float], ...]:
    """Return the points as stairs, each at the height of its end."""
    result: list[tuple[float, float]] = [(item.steps, item.epsilon) for item in spent[:1]]
    for before, after in pairwise(spent):
        result += [(before.steps, after.epsilon), (after.steps, after.epsilon)]
    return tuple(result)


def _epsilon(run: CertifiedRun, engine: str, steps: int, delta: float) -> float:
    event = run.event_of(steps)
    if not parts(event):
        return 0.0
    return accountant(engine).curve(event).epsilon(delta).upper
