"""Certify a plan with every combination of some fields, as a table."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from affidavit.library.api import Source, certify, load
from affidavit.library.certification import Certification, axes
from affidavit.plan import html_table

if TYPE_CHECKING:
    import pandas
    import polars
    from matplotlib.axes import Axes

MAX_ROWS = 100_000


@dataclass(frozen=True, slots=True, repr=False)
class Sweep:
    """One row per combination of the ``grid``; the last field varies fastest.

    ``certifications`` are in the order of the rows. ε is in nats, δ a probability and noise
    multipliers in clip norms.
    """

    grid: Mapping[str, tuple[Any, ...]]
    certifications: tuple[Certification, ...]

    def __len__(self) -> int:
        return len(self.certifications)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows())

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows as dictionaries of grid fields and proved values.

        ``epsilon`` and ``delta`` are upper bounds and ``epsilon_lower`` is the lower bound; grid
        fields of these names become ``target_epsilon`` and ``target_delta``.
        """
        names = [f"target_{name}" if name in ("epsilon", "delta") else name for name in self.grid]
        combinations = itertools.product(*self.grid.values())
        return [
            _row(dict(zip(names, values, strict=True)), _proved_values(answer))
            for values, answer in zip(combinations, self.certifications, strict=True)
        ]

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows as a pandas data frame; raises ``ImportError`` without pandas."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_pandas needs pandas; run: pip install pandas") from None

        return pandas.DataFrame(self.rows())

    def to_polars(self) -> polars.DataFrame:
        """Return the rows as a Polars data frame; raises ``ImportError`` without Polars."""
        import polars

        return polars.DataFrame(self.rows())

    def plot(self, x: str = "", y: str = "epsilon", ax: Axes | None = None) -> Axes:
        """Draw ``y`` over ``x`` (default: the last field), one line per value of the other fields.

        Raises ``ValueError`` for an unknown column, and ``ImportError`` without affidavit[plots].
        """
        rows = self.rows()
        x = x or list(self.grid)[-1]
        for name in (x, y):
            if not rows or name not in rows[0]:
                raise ValueError(f"unknown column {name}; use one of {', '.join(rows[0])}.")
        ax = axes(ax)
        others = [name for name in self.grid if name != x and name in rows[0]]
        lines: dict[tuple[Any, ...], list[tuple[Any, Any]]] = {}
        for row in rows:
            if row[y] is not None:
                lines.setdefault(tuple(row[name] for name in others), []).append((row[x], row[y]))
        for values, points in lines.items():
            label = ", ".join(f"{n} = {v}" for n, v in zip(others, values, strict=True))
            ax.plot(*zip(*points, strict=True), marker="o", label=label or None)
        ax.set(xlabel=x, ylabel=y)
        if others:
            ax.legend()
        return ax

    def __repr__(self) -> str:
        return f"<sweep of {len(self)} plans over {', '.join(self.grid)}>"

    def _repr_html_(self) -> str:
        rows = self.rows()
        return html_table(
            (list(row.values()) for row in rows), headings=list(rows[0]) if rows else ()
        )


def sweep(
    source: Source, grid: Mapping[str, Iterable[Any]], /, *, second_opinion: bool = False
) -> Sweep:
    """Certify the plan with every combination of the fields in ``grid`` (as in ``PlanFields``).

    Plans with the same sampling probability and noise share computations. Raises ``MalformedPlan``
    for the first malformed plan, ``TypeError`` for values that are no list, and ``ValueError``
    unless the grid has 1 to 100,000 plans.
    """
    for name, choices in grid.items():
        if isinstance(choices, str) or not isinstance(choices, Iterable):
            raise TypeError(f"{name} takes a list of values, not {choices!r}")
    values = {name: tuple(choices) for name, choices in grid.items()}
    count = 1
    for choices in values.values():
        count *= len(choices)
    if not values or not 0 < count <= MAX_ROWS:
        raise ValueError(f"the grid has {count if values else 0} plans; give 1 to {MAX_ROWS}.")
    plan = load(source)
    answers = []
    for combination in itertools.product(*values.values()):
        fields: Any = dict(zip(values, combination, strict=True))
        answers.append(certify(plan, second_opinion=second_opinion, **fields))
    return Sweep(values, tuple(answers))


def _row(fields: dict[str, Any], proved: dict[str, Any]) -> dict[str, Any]:
    """Return ``fields`` and ``proved`` merged; a None of the grid takes its solved value."""
    return fields | {key: v for key, v in proved.items() if v is not None or key not in fields}


def _proved_values(answer: Certification) -> dict[str, Any]:
    epsilon, delta = answer.epsilon, answer.delta
    return {
        "verdict": answer.verdict,
        "epsilon": None if epsilon is None else epsilon.upper,
        "epsilon_lower": None if epsilon is None else epsilon.lower,
        "delta": None if delta is None else delta.upper,
        "noise_multiplier": answer.noise_multiplier,
        "steps": answer.steps,
    }
