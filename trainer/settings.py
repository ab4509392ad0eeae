"""Settings: how a run is computed, never what it releases.

Nothing here changes a guarantee, and nothing that does is here: whatever a certificate is about
comes from the plan. Microbatches, devices and number types change speed and memory; how
often a checkpoint is written changes how many steps a crash costs. The learning rate's
schedule is public and acts on released values.

>>> rates = Settings(schedule="linear", warmup=2)
>>> [round(rates.learning_rate_factor(step, 6), 3) for step in range(6)]
[0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

Precision = Literal["float32", "bfloat16"]
Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """``microbatch`` records at a time; checkpoints and digests every so many steps.

    Where these are None they are made as often as takes a twentieth of the time.
    ``precision`` is that of the model's own arithmetic by autocast; clip norms, sums and noise
    are in float32 in any case. ``warmup`` steps raise the learning rate linearly.
    ``learning_rate`` stands in for the plan's in a trial of a search.
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
                raise ValueError(f"{name} is at least 1, not {value}")
        if self.warmup < 0:
            raise ValueError(f"warmup is a number of steps, not {self.warmup}")

    @property
    def device_type(self) -> str:
        """``cuda`` where there is one and nothing else is said."""
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def autocast(self) -> torch.dtype | None:
        """What the model computes in where that is not float32."""
        return torch.bfloat16 if self.precision == "bfloat16" else None

    def learning_rate_factor(self, step: int, steps: int) -> float:
        """What the plan's learning rate is multiplied with at ``step``, counted from 0."""
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
        """What a run record says of how a run was computed."""
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
