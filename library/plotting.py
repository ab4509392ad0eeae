"""Matplotlib, which only plots need."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def axes(ax: Axes | None) -> Axes:
    """``ax``, or axes of a new figure; raises ``ImportError`` where Matplotlib is missing."""
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ImportError("plots need Matplotlib: pip install 'affidavit[plots]'") from None
    return pyplot.subplots()[1]
