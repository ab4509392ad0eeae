"""The data of a chart: axes, the marks on them, and the scale from values to positions.

Points are (x, y) in the units of the axes. A point that an axis cannot show (not finite, or not
positive on a logarithmic one) is left out, and a line is broken there.

>>> scale = Scale.over(Axis(label="ε"), [0.3, 9.7], start=0, end=100)
>>> [tick.text for tick in scale.ticks()]
['0', '2', '4', '6', '8', '10']
>>> [tick.text for tick in Scale.over(Axis(label="δ", scale="log"), [1e-6, 0.5], 0, 1).ticks()]
['10⁻⁶', '10⁻⁵', '10⁻⁴', '10⁻³', '10⁻²', '10⁻¹', '1']
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """An axis with its label, including units; ends that are None follow the marks."""

    label: str
    scale: Literal["linear", "log"] = "linear"
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A polyline through ``points``; a faint one is a reference, such as a diagonal."""

    name: str
    points: tuple[Point, ...]
    faint: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """The area between a lower and an upper end: ``points`` are (x, lower, upper)."""

    name: str
    points: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dots:
    """Single points, with a text at each if ``labels`` are given."""

    name: str
    points: tuple[Point, ...]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceLine:
    """A line across the chart at one value of y, such as a budget."""

    name: str
    at: float


Mark = Line | Band | Dots | ReferenceLine


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A titled pair of axes with marks; ``description`` puts into words what it shows."""

    title: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    description: str = ""


_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MAX_TICKS = 7
LARGEST = 1e200
"""Beyond it, and below its inverse on a logarithmic axis, nothing is shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """A labelled value of an axis."""

    value: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """``low`` to ``high`` of an axis, shown from position ``start`` to ``end``."""

    axis: Axis
    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, axis: Axis, values: Iterable[float], start: float, end: float) -> Scale:
        """The scale that shows ``values``, or the range of the axis, with round ends."""
        shown = [value for value in values if is_shown(axis, value)] or [1.0]
        low = min(shown) if axis.low is None else axis.low
        high = max(shown) if axis.high is None else axis.high
        if axis.scale == "log":
            low = low if axis.low is not None else 10.0 ** math.floor(_exponent(low))
            high = high if axis.high is not None else 10.0 ** math.ceil(_exponent(high))
            if not low < high:
                low, high = low / 10, high * 10
        else:
            least = 1e-9 * max(abs(low), abs(high), 1e-90)
            step = _step(
                high - low if high - low > least else max(abs(high), least) if high else 1.0
            )
            low = low if axis.low is not None else step * math.floor(low / step + 1e-9)
            high = high if axis.high is not None else step * math.ceil(high / step - 1e-9)
            if high - low <= least:
                low, high = low - step, high + step
        return cls(axis=axis, low=low, high=high, start=start, end=end)

    def position(self, value: float) -> float:
        """Where ``value`` is shown."""
        if self.axis.scale == "log":
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        # Far outside is as good as just outside, and keeps the file small.
        return self.start + min(2.0, max(-1.0, share)) * (self.end - self.start)

    def holds(self, value: float) -> bool:
        """Whether ``value`` lies between the ends."""
        margin = 1e-9 * max(abs(self.low), abs(self.high))
        return self.low - margin <= value <= self.high + margin

    def ticks(self) -> list[Tick]:
        """Round values from ``low`` to ``high``, few enough to be legible."""
        values = self._decades() if self.axis.scale == "log" else self._round_steps()
        powers = self.axis.scale == "log" and (self.low < 1e-3 or self.high > 1e4)
        write = power_of_ten if powers else text_of
        return [Tick(value=value, text=write(value)) for value in values]

    def _round_steps(self) -> list[float]:
        step = _step(self.high - self.low)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        # A quotient of integers is nearer to the decimal than a multiple of the step.
        inverse = round(1 / step) if step < 1 else 0
        return [n / inverse if inverse else n * step for n in range(first, last + 1)]

    def _decades(self) -> list[float]:
        first = math.floor(_exponent(self.low) + 1e-9)
        last = math.floor(_exponent(self.high) + 1e-9)
        digits: tuple[int, ...] = (1,)
        stride = max(1, math.ceil((last - first + 1) / _MAX_TICKS))
        if last - first < 2:
            digits = (1, 2, 5)
        result = [
            digit * 10.0**exponent
            for exponent in range(first, last + 1, stride)
            for digit in digits
        ]
        return [v for v in result if self.low * (1 - 1e-9) <= v <= self.high * (1 + 1e-9)]


def is_shown(axis: Axis, value: float) -> bool:
    """Whether the axis can show ``value``."""
    return abs(value) <= LARGEST and (axis.scale == "linear" or value >= 1 / LARGEST)


def text_of(value: float) -> str:
    """A tick's text: plain from 0.001 to 9999, else with a power of ten."""
    if value == 0:
        return "0"
    if 0.000999 <= abs(value) < 1e4:
        return f"{value:.6g}".replace("-", "−")
    return power_of_ten(value)


def power_of_ten(value: float) -> str:
    """``value`` as a power of ten, or a multiple of one; 1 and 10 as they are."""
    if value in (1, 10):
        return f"{value:g}"
    exponent = math.floor(_exponent(abs(value)) + 1e-9)
    power = "10" + str(exponent).translate(_SUPERSCRIPTS)
    leading = value / 10.0**exponent
    if math.isclose(leading, 1, rel_tol=1e-9):
        return power
    return f"{leading:.3g}·{power}".replace("-", "−")


def _exponent(value: float) -> float:
    return math.log10(value)


def _step(span: float) -> float:
    """The least of 1, 2 and 5 times a power of ten with at most six steps in ``span``."""
    rough = span / (_MAX_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
