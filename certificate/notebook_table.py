"""Tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

COLORS = {"certified": "#1a7f37", "under_noised": "#b42318", "refused": "#b42318"}


def html_table(
    rows: Iterable[Sequence[Any]],
    *,
    headings: Sequence[str] = (),
    title: str = "",
    verdict: str = "",
) -> str:
    """An HTML table; ``title`` stands above it, in the color of ``verdict``."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    color = COLORS.get(verdict, "#9a6700" if verdict else "inherit")
    above = f'<p><strong style="color:{color}">{escape(title)}</strong></p>' if title else ""
    return f"{above}<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _cell(value: Any) -> str:
    return f"<td>{escape('' if value is None else str(value))}</td>"
