"""The chart of what a guarantee means: recognised records against false alarms."""

from __future__ import annotations

from collections.abc import Iterable

from affidavit.assessment.charts import Axis, Chart, Dots, Line
from affidavit.assessment.meaning import FALSE_ALARM_RATE, Point, recognised_at

_RATES = tuple(rate / 100 for rate in range(101))


def chart_recognition(
    points: Iterable[Point], mu: float | None = None, remainder: float = 0.0
) -> Chart:
    """Return the most that a test recognises at each rate of false alarms, in per cent.

    The guarantee holds at each of ``points``, and the Gaussian curve of ``mu`` bounds it, if there
    is one, but for the ``remainder`` of δ.

    >>> chart = chart_recognition([(1.0, 0.0)])
    >>> [round(y, 1) for x, y in chart.marks[0].points if x in (0, 10, 50, 100)]
    [0.0, 27.2, 81.6, 100.0]
    """
    points = list(points)
    bounds = [(100 * rate, 100 * recognised_at(rate, points, mu, remainder)) for rate in _RATES]
    recognised = recognised_at(FALSE_ALARM_RATE, points, mu, remainder)
    named = 100 * FALSE_ALARM_RATE, 100 * recognised
    return Chart(
        title="Recognised at most",
        description="The most that any attacker recognises, against the rate of false alarms.",
        x=Axis(label="false alarms (%)", low=0.0, high=100.0),
        y=Axis(label="recognised (%)", low=0.0, high=100.0),
        marks=(
            Line(name="by this guarantee", points=tuple(bounds)),
            Line(name="by chance", points=((0.0, 0.0), (100.0, 100.0)), faint=True),
            Dots(name=f"at {100 * FALSE_ALARM_RATE:g} % false alarms", points=(named,)),
        ),
    )
