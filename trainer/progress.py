"""Progress on standard error: steps, time left, and nothing that is private.

A bar where standard error is a terminal; else a line now and then. The loss on the lot is
private: it is shown only where the user asks for private values on their own screen, and is
never written anywhere.

>>> Quiet().step(3, None)
"""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINES = 10
"""Lines of a whole run where there is no terminal."""


class Quiet:
    """Shows nothing; the base of what does."""

    def __enter__(self) -> Quiet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def step(self, done: int, loss: float | None) -> None:
        """``done`` steps are over; ``loss`` is given only where it may be shown."""


class Shown(Quiet):
    """A bar, or lines, for a run of ``steps``."""

    def __init__(self, steps: int, said: str) -> None:
        self._steps, self._said = steps, said
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not sys.stderr.isatty(),
        )
        self._console = console
        self._task = self._bar.add_task("", total=steps)

    def __enter__(self) -> Shown:
        self._console.print(f"{self._said} after all {self._steps} steps", highlight=False)
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def step(self, done: int, loss: float | None) -> None:
        """One step more."""
        private = "" if loss is None else f"loss {loss:.4g} (private)"
        self._bar.update(self._task, completed=done, description=private)
        item = max(1, self._steps // LINES)
        if self._bar.disable and (done % item == 0 or done == self._steps):
            self._console.print(f"step {done} of {self._steps} {private}".rstrip(), highlight=False)
