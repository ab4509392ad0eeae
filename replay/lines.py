"""The lines of the user's files that ran, in order.

Only functions of files below one folder are traced. Lines that run while a record is read are
counted as run, but not put in order: a data set may well branch on the record that it reads.
"""

from __future__ import annotations

import sys
import sysconfig
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

LINE_BITS = 20
MOST_LINES = 2_000_000
"""Lines of a run that are kept in order; later ones are only counted as run."""


class LineTrace:
    """Records the executed lines of files below ``folder``."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = str(Path(folder).resolve()) + "/"
        self._site = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))
        self._files: dict[str, int | None] = {}
        self._others: set[str] = set()
        self._order = array("I")
        self._ran: set[int] = set()
        self._reading = 0
        self.before_line: Callable[[FrameType], None] | None = None
        """Is called with the frame of each line of the user's before it runs."""
        self._watch: Callable[[], str] | None = None
        self._watched: list[list[Any]] = []

    def start(self) -> None:
        """Trace this thread from now on.

        A run calls a million functions of packages, so these are left at once. Neither ``id`` nor
        ``f_code`` is read for it: both call the audit hook.
        """
        others = self._others

        def on_call(frame: FrameType, event: str, argument: Any) -> Any:
            if frame.f_globals.get("__file__") in others:
                return None
            return self._on_call(frame, event, argument)

        sys.settrace(on_call)

    def stop(self) -> None:
        """Stop tracing."""
        sys.settrace(None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Trace nothing; a package's loops of Python take half of the time."""
        tracing = sys.gettrace()
        sys.settrace(None)
        try:
            yield
        finally:
            sys.settrace(tracing)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Leave lines out of the order, while a record is read."""
        self._reading += 1
        try:
            yield
        finally:
            self._reading -= 1

    def watch(self, digest: Callable[[], str]) -> None:
        """Record the line before each later change of ``digest``, and how many ran until then."""
        self._watch = digest
        self._watched = [[self.current(), digest(), self.position()]]

    def position(self) -> int:
        """Return the number of lines that ran until now, in order."""
        return len(self._order)

    def current(self) -> str | None:
        """Return the innermost line of the user's files, as ``file:line``."""
        return next(map(self.place_of, self.frames()), None)

    def frames(self) -> Iterator[FrameType]:
        """Return the frames of the user's files, the innermost first."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self._number(frame.f_code) is not None:
                yield frame
            frame = frame.f_back

    def place_of(self, frame: FrameType) -> str | None:
        """Return the line of ``frame``, or None outside of the user's files."""
        if self._number(frame.f_code) is None:
            return None
        return f"{self._relative(frame.f_code.co_filename)}:{frame.f_lineno}"

    def to_json(self) -> dict[str, Any]:
        """Return the files, the order of their lines, and which ran."""
        if self._watch is not None:
            self._note_change()
        names = [self._relative(name) for name, at in self._files.items() if at is not None]
        return {
            "files": names,
            "order": self._order.tolist(),
            "ran": sorted(self._ran),
            "watched": self._watched,
        }

    def _relative(self, name: str) -> str:
        return str(Path(name).resolve()).removeprefix(self._folder)

    def _number(self, code: CodeType) -> int | None:
        return self._number_of(code.co_filename)

    def _number_of(self, name: str) -> int | None:
        if name not in self._files:
            path = "" if name.startswith("<") else str(Path(name).resolve())
            is_users = path.startswith(self._folder) and not path.startswith(self._site)
            count = sum(number is not None for number in self._files.values())
            self._files[name] = count if is_users and "/site-packages/" not in path else None
        return self._files[name]

    def _on_call(self, frame: FrameType, event: str, _: Any) -> Any:
        number = self._number(frame.f_code)
        if number is None or event != "call":
            module = frame.f_globals.get("__file__")
            if isinstance(module, str) and self._number_of(module) is None:
                self._others.add(module)
            return None
        base = number << LINE_BITS

        def on_line(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                if self.before_line is not None:
                    self.before_line(frame)
                place = base | frame.f_lineno
                self._ran.add(place)
                if not self._reading:
                    if self._watch is not None:
                        self._note_change()
                    if len(self._order) < MOST_LINES:
                        self._order.append(place)
            return on_line

        return on_line

    def _note_change(self) -> None:
        """Record the last line if it changed the watched value."""
        assert self._watch is not None
        if (digest := self._watch()) != self._watched[-1][1]:
            line = self._named(self._order[-1]) if self._order else None
            self._watched.append([line, digest, self.position()])

    def _named(self, place: int) -> str:
        names = [self._relative(name) for name, at in self._files.items() if at is not None]
        return f"{names[place >> LINE_BITS]}:{place & ((1 << LINE_BITS) - 1)}"
