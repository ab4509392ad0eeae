"""Fix all randomness and the clock of a run, and align random streams between runs.

Entropy of the operating system comes from one seeded stream, the generators of ``random``, NumPy
and PyTorch start from it, and the clock advances by a millisecond with each reading. A run on a
changed data set may draw other amounts, so ``Generators.state`` is stored by the first run at each
lot and release, and set by the others.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import sys
import time
from collections.abc import Callable
from typing import Any

SEED = b"affidavit replay"


class EntropyStream:
    """Bytes in place of the operating system's entropy."""

    def __init__(self) -> None:
        self._blocks = 0

    def __call__(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        self._blocks += 1
        return hashlib.shake_256(SEED + self._blocks.to_bytes(8, "big")).digest(count)


def fix_randomness() -> None:
    """Replace entropy and clock of this process, and seed its generators."""
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
    _fix_clock()


def _fix_clock() -> None:
    readings = 0

    def advance() -> float:
        nonlocal readings
        readings += 1
        return readings / 1000

    def clock(start: float) -> Callable[[], float]:
        return lambda: start + advance()

    names = ("time", "monotonic", "perf_counter", "process_time")
    originals = {name: getattr(time, name) for name in names}
    time.time = clock(1.7e9)
    time.monotonic = time.perf_counter = time.process_time = clock(1e5)
    time.time_ns = lambda: int(time.time() * 1e9)
    time.monotonic_ns = time.perf_counter_ns = lambda: int(time.monotonic() * 1e9)
    for module in list(sys.modules.values()):  # what was imported by ``from time import time``
        values = getattr(module, "__dict__", {})
        for name, original in originals.items():
            if values.get(name) is original:
                values[name] = getattr(time, name)


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


def set_generators(state: bytes) -> None:
    """Set the global generators to ``state``, of a run of the same program."""
    of_random, of_numpy, of_torch = pickle.loads(state)
    random.setstate(of_random)
    if of_numpy is not None and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(of_numpy)
    if of_torch is not None and (torch := sys.modules.get("torch")) is not None:
        torch.set_rng_state(torch.from_numpy(of_torch.copy()))
