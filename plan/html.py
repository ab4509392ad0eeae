"""Tables in HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

VERDICT_COLORS = {"certified": "#1a7f37", "under_noised": "#b42318", "refused": "#b42318"}


def html_table(
    rows: Iterable[Sequence[Any]],
    *,
    headings: Sequence[str] = (),
    title: str = "",
    verdict: str = "",
) -> str:
    """Return an HTML table for notebooks below ``title``, which has the color of ``verdict``."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    color = VERDICT_COLORS.get(verdict, "#9a6700" if verdict else "inherit")
    caption = f'<p><strong style="color:{color}">{escape(title)}</strong></p>' if title else ""
    return f"{caption}<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _cell(value: Any) -> str:
    return f"<td>{escape('' if value is None else str(value))}</td>"
