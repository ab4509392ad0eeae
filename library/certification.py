"""The proved bounds of one plan, its privacy curve, and its signed certificate.

>>> bound = Bound(1.0000001, lower=0.9)
>>> f"{bound:.3f}", bound.lower, bound + 1 > 2
('1.001', 0.9, True)
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Decimal, localcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from affidavit.accountants import Bracket, PrivacyCurve, accountant
from affidavit.assessment import (
    CURVE_CHARTS,
    Assessment,
    Curves,
    Solver,
    closed_plan,
    curves,
    draw_curves,
    with_gaussian_bound,
)
from affidavit.assessment.charts import Band, Dots, Line
from affidavit.certificate import Certificate, issue_here
from affidavit.mechanisms import lower
from affidavit.plan import Plan, Reason, html_table
from affidavit.trust import (
    KeyFailure,
    SigningPort,
    write_atomically,
)
from affidavit.trust.signers import own_signing_key

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from affidavit.accountants import GaussianBound


class Bound(float):
    """A proved upper bound, which is a float, and the proved ``lower`` bound on the tight value.

    ε is in nats, δ a probability. ``confidence`` is the probability with which a sampled bound
    holds, or None if it is certain. Formatting rounds up, so that a shorter number is a bound too.
    """

    __slots__ = ("_confidence", "_lower")
    _lower: float
    _confidence: float | None

    def __new__(cls, upper: float, *, lower: float = 0.0, confidence: float | None = None) -> Bound:
        """Create a bound; raises ``ValueError`` unless ``lower <= upper``."""
        Bracket(lower=lower, upper=upper)
        bound = super().__new__(cls, upper)
        bound._lower, bound._confidence = lower, confidence
        return bound

    @property
    def upper(self) -> float:
        """The bound itself, as a plain float."""
        return float(self)

    @property
    def lower(self) -> float:
        """The proved lower bound, in the same unit; 0 if the method has none."""
        return self._lower

    @property
    def confidence(self) -> float | None:
        """The probability with which the bound holds; None if it is certain."""
        return self._confidence

    def __format__(self, spec: str) -> str:
        if not spec:
            return float.__repr__(self)
        with localcontext(rounding=ROUND_CEILING):
            return format(Decimal(float.__repr__(self)), spec)

    def __getnewargs_ex__(self) -> tuple[tuple[float], dict[str, Any]]:
        return (float(self),), {"lower": self._lower, "confidence": self._confidence}


def bound_of(bracket: Bracket, confidence: float | None = None) -> Bound:
    """Return ``bracket`` as a ``Bound``."""
    return Bound(bracket.upper, lower=bracket.lower, confidence=confidence)


class NotCertified(Exception):
    """A plan is not certified; ``certification`` has the details."""

    def __init__(self, certification: Certification) -> None:
        self.certification = certification
        self.verdict = certification.verdict
        self.reasons = certification.reasons
        reasons = "; ".join(str(reason) for reason in self.reasons)
        super().__init__(f"{self.verdict}: {reasons}" if reasons else self.verdict)


@dataclass(frozen=True, slots=True, repr=False)
class Certification:
    """The proved bounds of a plan, and the values of its unknowns.

    ε is in nats, δ a probability, noise in clip norms on the sum. ``assessment`` has more details.
    """

    source: Plan
    assessment: Assessment

    @property
    def verdict(self) -> str:
        """``certified``, ``under_noised``, ``unproved``, ``refused`` or ``undecided``."""
        return self.assessment.verdict

    @property
    def certified(self) -> bool:
        """Whether the guarantee may be claimed and meets the target, if there is one."""
        return self.verdict == "certified"

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why the plan is not certified, each with a code and a remedy."""
        return self.assessment.reasons

    @property
    def epsilon(self) -> Bound | None:
        """The proved bound on ε in nats at ``delta``; None if nothing may be claimed."""
        return self._bound("epsilon")

    @property
    def delta(self) -> Bound | None:
        """The proved bound on δ at ``epsilon``; None if nothing may be claimed."""
        return self._bound("delta")

    def _bound(self, name: str) -> Bound | None:
        bracket = getattr(self.assessment, name)
        if bracket is None or self.verdict in ("refused", "undecided"):
            return None
        level = self.assessment.confidence
        return bound_of(bracket, None if level is None else level.level)

    @property
    def noise_multipliers(self) -> dict[str, float]:
        """The noise multiplier of each release by name: given in the plan, or solved for.

        With several phases the names are ``0/NAME``, ``1/NAME`` and so on.
        """
        releases = self.assessment.releases
        noise = {
            release.name if release.phase is None else f"{release.phase}/{release.name}": (
                release.required if release.given is None else release.given
            )
            for release in releases
        }
        return {name: value for name, value in noise.items() if value is not None}

    @property
    def noise_multiplier(self) -> float | None:
        """The noise multiplier of all releases; None if they differ."""
        values = set(self.noise_multipliers.values())
        return values.pop() if len(values) == 1 else None

    @property
    def joint_noise_multiplier(self) -> float | None:
        """The noise multiplier of one step as a whole, rounded down."""
        return self.assessment.joint

    @property
    def steps(self) -> int | None:
        """The steps of the whole run; None if nothing may be claimed."""
        steps = [entry["steps"] for entry in self.assessment.sampling]
        return sum(steps) if steps and None not in steps else None

    @property
    def lot_size(self) -> int | None:
        """Records in a lot, expected or fixed; None if phases differ."""
        sizes = {entry.get("lot_size") for entry in self.assessment.sampling}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def plan(self) -> Plan:
        """The plan with its unknowns solved; raises ``NotCertified`` if they are not."""
        if not self.source.is_open:
            return self.source
        if not self.certified:
            raise NotCertified(self)
        return closed_plan(self.assessment)

    def require(self) -> Certification:
        """Return this certification; raises ``NotCertified`` unless the plan is certified."""
        if not self.certified:
            raise NotCertified(self)
        return self

    def sign(self, key: SigningPort | None = None, *, requester: str | None = None) -> Certificate:
        """Sign with ``key``, or the newest key of this machine (``affidavit keys new``).

        Refusals are signed too. Raises ``KeyFailure`` without a key.
        """
        if (key := key or own_signing_key()) is None:
            raise KeyFailure("there is no signing key; create one with `affidavit keys new`.")
        return issue_here(self.assessment, key, requester=requester)

    def write(self, path: str | os.PathLike[str], key: SigningPort | None = None) -> Certificate:
        """Sign, and write the bundle to ``path``; raises ``KeyFailure`` and ``OSError``."""
        certificate = self.sign(key)
        write_atomically(Path(path), certificate.bundle)
        return certificate

    def curve(self) -> Curve:
        """Return the privacy curve; raises ``NotCertified`` if nothing may be claimed."""
        return curve_of(self.source)

    def with_gaussian_bound(self) -> Certification:
        """Return a copy that also states, and signs, the least μ whose curve bounds the run's."""
        return replace(self, assessment=with_gaussian_bound(self.assessment))

    def plot(self, ax: Axes | None = None, *, kind: str = "trade-off") -> Axes:
        """Draw the curve ``kind`` with Matplotlib; raises ``NotCertified`` and ``ImportError``."""
        return self.curve().plot(ax, kind=kind)

    def as_dict(self) -> dict[str, Any]:
        """Return the result document of the command line and the HTTP API."""
        return self.assessment.as_result()

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        return self.assessment.headline

    def __repr__(self) -> str:
        return f"<{self.headline}>"

    def _repr_html_(self) -> str:
        rows: list[tuple[str, Any]] = [(str(reason.code), reason) for reason in self.reasons]
        rows += [(f"noise multiplier {name}", v) for name, v in self.noise_multipliers.items()]
        rows += [("joint noise multiplier", self.joint_noise_multiplier), ("steps", self.steps)]
        rows += [
            (
                f"ε by {opinion.name}",
                f"{opinion.epsilon.lower:.6g} to {bound_of(opinion.epsilon):.6g}",
            )
            for opinion in self.assessment.accountants
        ]
        rows += [(warning.code, warning.message) for warning in self.assessment.warnings]
        return html_table(rows, title=self.headline, verdict=self.verdict)


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

    @property
    def gaussian_bound(self) -> GaussianBound | None:
        """The least Gaussian curve that is proved to bound δ at every ε, if there is one."""
        return self.values.gaussian_bound

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
