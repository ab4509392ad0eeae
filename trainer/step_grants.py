"""Supervision: how far a run may go now, and what others may have charged of it before.

Whoever starts a trainer on behalf of somebody else must be able to go on elsewhere although the
trainer may still live: stopped, cut off, forgotten. No clock and no lock of a file system
shows that it does not. So a supervised run charges no step beyond its *allowance*, a number that
its supervisor raises as it goes. Who takes over passes over every step that was allowed: it
charges them, with the keys that they have if they were taken, and takes none of them again.
Between two trainers of one run each step is then charged once, and has one key.

Guarantees
    * No step t is charged before the allowance was seen to be above t.
    * A file that is not there or has no number allows nothing.

>>> import tempfile
>>> with tempfile.NamedTemporaryFile() as file:
...     _ = Path(file.name).write_text("3")
...     allowance = Allowance(Path(file.name))
...     [allowance.waited_for(step, asked=lambda: True) for step in (2, 3)]
[True, False]
>>> Allowance(None).waited_for(10**9, asked=lambda: False)
True
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PAUSE = 0.02
"""Seconds between two looks at the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervision:
    """What the supervisor of a run says; nobody's says nothing.

    ``allowance`` is the file with the number of steps that may be charged by now, and ``charged``
    how many others may have charged before. Once the file ``stop`` exists the run is over: its
    record ends, and its weights are written. With such a file no signal asks a run to stop.
    """

    allowance: Path | None = None
    charged: int = 0
    stop: Path | None = None


class Allowance:
    """The number in a file, read again where it is not enough; without a file, any number."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._most = path, 0

    def waited_for(self, step: int, asked: Callable[[], bool]) -> bool:
        """Wait until ``step``, counted from 0, is allowed; False once ``asked`` to stop."""
        while self._path is not None and step >= self._most:
            self._most = _number(self._path)
            if step >= self._most:
                if asked():
                    return False
                time.sleep(PAUSE)
        return True


def _number(path: Path) -> int:
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):
        return 0
