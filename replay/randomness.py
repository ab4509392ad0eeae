"""Fix all randomness and the clock of a run, and align random streams between runs.

Entropy of the operating system comes from one seeded stream, the generators of ``random``, NumPy
and PyTorch start from it. The clock advances by a millisecond with each reading; those of another
thread advance that thread's clock alone, since their number depends on the machine's load. A run on
a changed data set may draw other amounts, so the generators' state is stored by the first run at
each lot and release, and set by the others.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import hashlib
import os
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

SEED = b"affidavit replay"
CLOCKS = (
    *("time", "monotonic", "perf_counter", "process_time"),
    *("localtime", "gmtime", "ctime", "asctime", "strftime"),
)
processor_seconds = time.process_time
"""The true time that this process has computed."""
WAITING = ("queue", "subprocess", "threading")
"""Modules that wait for other threads and processes, which take as long as they do."""


class EntropyStream:
    """Bytes in place of the operating system's entropy."""

    def __init__(self) -> None:
        self._blocks = 0

    def __call__(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        self._blocks += 1
        return hashlib.shake_256(SEED + self._blocks.to_bytes(8, "big")).digest(count)


def fix_randomness(start: float) -> None:
    """Replace entropy and clock of this process, and seed its generators.

    ``start`` is the time at first, in seconds since 1970.
    """
    stream = EntropyStream()
    os.urandom = random._urandom = stream  # type: ignore[attr-defined]
    seed = random.Random.seed

    def seeded(self: random.Random, a: Any = None, version: int = 2) -> None:
        seed(self, int.from_bytes(stream(32), "big") if a is None else a, version)

    random.Random.seed = seeded  # type: ignore[method-assign]
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
        torch.seed = torch.random.seed = lambda: torch.manual_seed(random.getrandbits(60)) and 0
        torch.set_num_threads(1)
    if (tensorflow := sys.modules.get("tensorflow")) is not None:
        tensorflow.random.set_seed(0)
    _fix_clock(start)


def _fix_clock(start: float) -> None:
    of_main = threading.current_thread()
    readings = {of_main: 0}

    def advance() -> float:
        thread = threading.current_thread()
        readings[thread] = readings.get(thread, 0) + 1
        of_other = 0 if thread is of_main else readings[thread]
        return (readings[of_main] + of_other) / 1000

    def clock(begin: float) -> Callable[[], float]:
        return lambda: begin + advance()

    originals = {name: getattr(time, name) for name in CLOCKS}
    time.time = clock(start)
    time.monotonic = time.perf_counter = time.process_time = clock(1e5)
    time.time_ns = lambda: int(time.time() * 1e9)
    time.monotonic_ns = time.perf_counter_ns = lambda: int(time.monotonic() * 1e9)
    for name in ("localtime", "gmtime", "ctime"):
        setattr(time, name, _at_present(originals[name]))
    time.asctime = lambda *at: originals["asctime"](*(at or (time.localtime(),)))
    time.strftime = lambda text, *at: originals["strftime"](text, *(at or (time.localtime(),)))
    for module in list(sys.modules.values()):  # what was imported by ``from time import time``
        values = getattr(module, "__dict__", {})
        for name, original in originals.items():
            if values.get(name) is original and values.get("__name__") not in WAITING:
                values[name] = getattr(time, name)
    _fix_dates()


def _at_present(original: Callable[[float], Any]) -> Callable[..., Any]:
    return lambda seconds=None: original(time.time() if seconds is None else seconds)


def _fix_dates() -> None:
    """Let ``datetime``, which reads the time in C, read that of the clock."""

    def today(kind: Any) -> Any:
        return kind.fromtimestamp(time.time())

    def now(kind: Any, tz: datetime.tzinfo | None = None) -> Any:
        return kind.fromtimestamp(time.time(), tz)

    def utcnow(kind: Any) -> Any:
        return now(kind, datetime.UTC).replace(tzinfo=None)

    for kind, methods in ((datetime.date, (today,)), (datetime.datetime, (today, now, utcnow))):
        (values,) = gc.get_referents(kind.__dict__)  # types of C refuse setattr
        values.update({method.__name__: classmethod(method) for method in methods})
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))


def generators_state() -> bytes:
    """Return the state of the global generators."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return pickle.dumps(
        (
            random.getstate(),
            None if numpy is None else numpy.random.get_state(),
            None if torch is None else torch.get_rng_state().numpy(),
        )
    )


def seed_of_torch() -> int | None:
    """Return the seed that PyTorch's global generator started from, if it is there."""
    torch: Any = sys.modules.get("torch")
    return None if torch is None else int(torch.initial_seed())


def set_generators(state: bytes) -> None:
    """Set the global generators to ``state``, of a run of the same program."""
    of_random, of_numpy, of_torch = pickle.loads(state)
    random.setstate(of_random)
    if of_numpy is not None and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(of_numpy)
    if of_torch is not None and (torch := sys.modules.get("torch")) is not None:
        torch.set_rng_state(torch.from_numpy(of_torch.copy()))
