"""A wall-clock limit around another library's work."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from affidavit.accountants.protocol import OutOfReach


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise ``OutOfReach`` when the block runs longer than ``seconds`` of wall-clock time.

    Signals reach the main thread only, and Windows has no alarm; elsewhere the block runs without
    a limit, and the caller's own (the service kills the whole process) applies.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    if not (main_thread and hasattr(signal, "SIGALRM")):
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise OutOfReach(f"{what} did not finish in {seconds:g} s.", "Use another accountant.")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
