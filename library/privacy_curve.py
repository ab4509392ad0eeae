"""The privacy curve of one plan: ε at any δ, and the success of attacks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from affidavit.accountants import Bracket, PrivacyCurve, accountant
from affidavit.assessment import (
    CURVE_CHARTS,
    Assessment,
    Curves,
    Solver,
    curves,
    draw_curves,
)
from affidavit.assessment.charts import (
    Band,
    Dots,
    Line,
)
from affidavit.library.certification import Bound, Certification, NotCertified, bound_of
from affidavit.mechanisms import lower
from affidavit.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, repr=False)
class Curve:
    """The privacy curve of ``certification.plan``, with every bound proved.

    ``values`` has tables of ε (nats), δ, errors of membership attacks and Rényi divergences.
    """

    certification: Certification
    values: Curves

    @cached_property
    def _curve(self) -> PrivacyCurve:
        lowered = lower(self.certification.plan)
        solver = Solver(lowered=lowered, engine=accountant(self.values.engine["name"]))
        return solver.bracketing_curve(lowered)

    def epsilon(self, delta: float) -> Bound:
        """Return the proved ε in nats at ``delta``; raises ``ValueError`` unless 0 < δ < 1."""
        return bound_of(self._curve.epsilon(delta))

    def delta(self, epsilon: float) -> Bound:
        """Return the proved δ at ``epsilon`` nats; raises ``ValueError`` unless ε ≥ 0."""
        return bound_of(self._curve.delta(epsilon))

    def type_two(self, type_one: float) -> Bracket:
        """Return the false-negative rate of a test with false-positive rate ``type_one``."""
        return self.values.trade_off.type_two(type_one)

    @property
    def advantage(self) -> Bound:
        """The largest difference of true- and false-positive rate of a membership attack."""
        return bound_of(self.values.trade_off.advantage)

    @property
    def mu(self) -> float | None:
        """The Gaussian-DP parameter, if the run is exactly one Gaussian mechanism."""
        return self.values.mu

    def as_dict(self) -> dict[str, Any]:
        """Return the document of ``affidavit curve --json``."""
        return self.values.as_document()

    def plot(self, ax: Axes | None = None, *, kind: str = "trade-off", label: str = "") -> Axes:
        """Draw ``kind`` (profile, trade-off, attack, renyi or belief) with Matplotlib.

        Raises ``ValueError`` for another kind, ``ImportError`` without affidavit[plots].
        """
        if kind not in CURVE_CHARTS:
            raise ValueError(f"kind is {kind!r}; use one of {', '.join(CURVE_CHARTS)}.")
        chart = CURVE_CHARTS[kind](self.values)
        ax = axes(ax)
        for mark in chart.marks:
            match mark:
                case Band(name=name, points=points):
                    x, low, high = zip(*points, strict=True)
                    line = ax.plot(x, high, label=label or name)
                    ax.fill_between(x, low, high, alpha=0.3, color=line[0].get_color())
                case Line(name=name, points=points):
                    x, y = zip(*points, strict=True)
                    if mark.faint:
                        ax.plot(x, y, color="gray", linestyle=":")
                    else:
                        ax.plot(x, y, label=label or name)
                case Dots(points=points):
                    ax.scatter(*zip(*points, strict=True))
        ax.set(xlabel=chart.x.label, ylabel=chart.y.label, title=chart.title)
        ax.set(xscale=chart.x.scale, yscale=chart.y.scale)
        ax.set_ylim(chart.y.low, chart.y.high)
        ax.legend()
        return ax

    def __repr__(self) -> str:
        return f"<curve of {self.certification!r}>"

    def _repr_html_(self) -> str:
        return draw_curves(self.values, ("profile", "trade-off"))


def curve_of(plan: Plan, *, engine: str | None = None) -> Curve:
    """Return the curve of ``plan``; raises ``NotCertified`` if nothing may be claimed."""
    values = curves(plan, engine=engine)
    if isinstance(values, Assessment):
        raise NotCertified(Certification(plan, values))
    return Curve(Certification(plan, values.assessment), values)


def axes(ax: Axes | None) -> Axes:
    """Return ``ax``, or the axes of a new figure; raises ``ImportError`` without Matplotlib."""
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ImportError("plots need Matplotlib: pip install 'affidavit[plots]'") from None
    return pyplot.subplots()[1]
