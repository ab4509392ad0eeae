"""A disk that loses power: what was synchronised stays, and of the rest what happens to stay.

``fsync`` of a file keeps its content, ``fsync`` of a folder its names: POSIX promises no more. Of
what was written since then any beginning may be there. Of the names that were given, changed and
taken away since then the first so many may be: a name is changed whole or not at all, and in order.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class PowerCut(BaseException):
    """The machine is off; nobody can do anything about it."""


class Disk:
    """What of ``folder`` is kept, and the moments at which power can be cut."""

    def __init__(self, folder: Path, cut: int, drawn: random.Random | None) -> None:
        self.folder, self.events = folder, 0
        self.left: dict[str, bytes] = {}
        """What is there after the cut; ``drawn`` decides of what was not kept, or it is lost."""
        self._cut, self._drawn = cut, drawn
        self._contents: dict[int, bytes] = {}
        self._held: dict[int, int] = {}
        for item in os.scandir(folder) if folder.exists() else ():
            self._synchronised(self._hold(item.path))
        self._names = [self._now()]
        """Since the folder was synchronised: the first is kept, and the last is what is there."""

    def fsync(self, descriptor: int) -> None:
        """As ``os.fsync``; at the moment of the cut it does not come to that."""
        self.events += 1
        self._names.append(self._now())
        if self.events == self._cut:
            self.cut()
            raise PowerCut
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            self._synchronised(os.fstat(descriptor).st_ino)
        elif os.path.samefile(descriptor, self.folder):
            self._names = [self._now()]

    def cut(self) -> None:
        """Cut the power now; ``left`` is what is there then."""
        self.left = dict(self._survivors())

    def before(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """``real``, which changes names, with those from before it noted."""

        def noted(*given: Any, **named: Any) -> Any:
            self._names.append(self._now())
            return real(*given, **named)

        return noted

    def put(self, folder: Path) -> None:
        """Make the folder that is found when power is back."""
        folder.mkdir()
        for name, content in self.left.items():
            (folder / name).write_bytes(content)

    def close(self) -> None:
        """Let the files go."""
        for item in self._held.values():
            os.close(item)

    def _now(self) -> dict[str, int]:
        if not self.folder.exists():
            return {}
        return {item.name: self._hold(item.path) for item in os.scandir(self.folder)}

    def _hold(self, path: str) -> int:
        """The number of a file, which is held open so that no other gets it."""
        number = os.stat(path).st_ino
        if number not in self._held:
            self._held[number] = os.open(path, os.O_RDONLY)
        return number

    def _content(self, number: int) -> bytes:
        return Path(f"/proc/self/fd/{self._held[number]}").read_bytes()

    def _synchronised(self, number: int) -> None:
        self._contents[number] = self._content(number)

    def _survivors(self) -> Iterator[tuple[str, bytes]]:
        names = self._names[0] if self._drawn is None else self._drawn.choice(self._names)
        for name, number in names.items():
            stored, written = self._contents.get(number, b""), self._content(number)
            if self._drawn is not None and written.startswith(stored):
                stored = written[: self._drawn.randint(len(stored), len(written))]
            yield name, stored


@contextmanager
def disk(folder: Path, cut: int = 0, drawn: random.Random | None = None) -> Iterator[Disk]:
    """A disk under ``folder`` whose power is cut before its ``cut``-th ``fsync``, or never."""
    result = Disk(folder, cut, drawn)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", result.fsync)
            for name in ("link", "replace", "unlink"):
                patch.setattr(os, name, result.before(getattr(os, name)))
            yield result
    finally:
        result.close()
