"""Progress on standard error: steps, time left, and nothing that is private.

A bar where standard error is a terminal; else a line now and then. The loss on the lot is
private: it is shown only where the user asks for private values on their own screen, and is
never written anywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

LINES = 10
"""Lines of a whole run where there is no terminal."""

Show = Callable[[int, float | None], None]
"""Takes the number of completed steps, and the loss if it may be shown."""


@contextmanager
def shown(steps: int, summary: str) -> Iterator[Show]:
    """Show a progress bar, or lines without a terminal, for a run of ``steps``."""
    console = Console(stderr=True)
    console.print(f"{summary} after all {steps} steps", highlight=False)
    with Progress(
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task("training", total=steps)

        def show(done: int, loss: float | None) -> None:
            private = "" if loss is None else f"loss {loss:.4g} (private)"
            bar.update(task, completed=done, description=f"training {private}")
            if bar.disable and (done % max(1, steps // LINES) == 0 or done == steps):
                console.print(f"step {done} of {steps} {private}".rstrip(), highlight=False)

        yield show
