"""The settings of a run, its trial in a search, and its supervision.

Settings define how a run is computed, never what it releases. They change no guarantee:
everything that a certificate covers comes from the plan. Microbatches, devices and
number types change speed and memory; the checkpoint interval changes how many steps a
crash costs. The learning rate's schedule is public and acts on released values.

>>> rates = Settings(schedule="linear", warmup=2)
>>> [round(rates.learning_rate_factor(step, 6), 3) for step in range(6)]
[0.5, 1.0, 1.0, 0.75, 0.5, 0.25]

Supervision limits how far a run may go now, and tells what others may have charged of it
(docs/how-to/run-a-worker.md). A supervised run charges no step beyond its *allowance*, a
number that its supervisor raises over time. A trainer that takes over skips all steps that were
allowed, so that two trainers of one run charge each step once, with one key.

Guarantees
    * No step t is charged before the allowance was read to be above t.
    * A missing file, or one without a number, allows nothing.

>>> import tempfile
>>> with tempfile.NamedTemporaryFile() as file:
...     _ = Path(file.name).write_text("3")
...     supervision = Supervision(allowance=Path(file.name))
...     [supervision.wait_until_allowed(step, is_stop_requested=lambda: True) for step in (2, 3)]
[True, False]
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch

Precision = Literal["float32", "bfloat16"]
Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a run is computed: ``microbatch`` records at a time, with checkpoints and digests.

    Intervals that are None are chosen to take a twentieth of the time. ``precision`` is the type of
    the model's own arithmetic by autocast; clip norms, sums and noise are always in float32.
    ``warmup`` steps raise the learning rate linearly. ``learning_rate`` replaces the plan's in a
    trial of a search.
    """

    device: str = "auto"
    microbatch: int = 64
    precision: Precision = "float32"
    compile: bool = False
    checkpoint_every: int | None = None
    digest_every: int | None = None
    schedule: Schedule = "constant"
    warmup: int = 0
    learning_rate: float | None = None
    show_private: bool = False

    def __post_init__(self) -> None:
        for name in ("microbatch", "checkpoint_every", "digest_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.warmup < 0:
            raise ValueError(f"warmup must be a number of steps, not {self.warmup}")

    @property
    def device_type(self) -> str:
        """The device type; by default ``cuda`` if there is one."""
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def autocast(self) -> torch.dtype | None:
        """The type of the model's arithmetic by autocast; None for float32."""
        return torch.bfloat16 if self.precision == "bfloat16" else None

    def learning_rate_factor(self, step: int, steps: int) -> float:
        """Return the factor of the plan's learning rate at ``step``, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, steps - self.warmup)
        match self.schedule:
            case "constant":
                return 1.0
            case "linear":
                return 1.0 - done
            case "cosine":
                return (1 + math.cos(math.pi * done)) / 2

    def as_entry(self, *, ranks: int) -> dict[str, Any]:
        """Return the settings for a run record."""
        return {
            "device": self.device_type,
            "microbatch": self.microbatch,
            "precision": self.precision,
            "compile": self.compile,
            "schedule": self.schedule,
            "warmup": self.warmup,
            "ranks": ranks,
            "torch": torch.__version__,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A trial of the search whose opening has the digest ``search`` and the time ``at``.

    ``score`` names the public data. ``learning_rate`` replaces the plan's.
    """

    search: str
    at: str
    score: str
    learning_rate: float | None = None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file of ``affidavit search``; raises ``OSError`` or ``ValueError``."""
        document = json.loads(path.read_bytes())
        try:
            return cls(**{name: document[name] for name in cls.__dataclass_fields__})
        except (KeyError, TypeError):
            raise ValueError("not a trial of a search.") from None


POLL_SECONDS = 0.02
"""Seconds between two reads of the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervision:
    """Instructions of a run's supervisor; the defaults are for a run without one.

    ``allowance`` is a file with the number of steps that may be charged by now, and ``charged`` is
    the number of steps that others may have charged. Once the file ``stop`` exists, the run ends
    with its record and weights. With such a file, signals do not stop the run.
    """

    allowance: Path | None = None
    charged: int = 0
    stop: Path | None = None

    def wait_until_allowed(self, step: int, is_stop_requested: Callable[[], bool]) -> bool:
        """Wait until ``step``, counted from 0, is allowed; False if ``is_stop_requested``."""
        while self.allowance is not None and step >= _read_allowance(self.allowance):
            if is_stop_requested():
                return False
            time.sleep(POLL_SECONDS)
        return True


def _read_allowance(path: Path) -> int:
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):
        return 0
