"""A causal low-pass filter of first order, which two optimisers are built with.

    f_t = s f_(t-1) + (1-s) x_t,   f_0 = 0,   f̂_t = f_t / (1 - s^t)

The division makes the weights of x_1..x_t sum to one from the first step on. s = 0 leaves x.

>>> state: State = {}
>>> [round(float(smoothed(torch.tensor(x), state, smoothing=0.5, step=t)), 4)
...  for t, x in enumerate((1.0, 4.0), start=1)]
[1.0, 3.0]

Reference: Zhang, Bu, Hong and Razaviyayn, DOPPLER, NeurIPS 2024, with a₁ = -s, b₀ = 1-s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from affidavit.plan import Optimizer as Settings
from affidavit.trainer.optimizers.base import State, corrected

SMOOTHING = 0.9
"""s of a plan that gives none."""


def smoothed(values: Tensor, state: State, *, smoothing: float, step: int) -> Tensor:
    """f̂_t; the state is ``filtered``. The shape is that of ``values``."""
    if not smoothing:
        return values
    before = state.get("filtered")
    before = torch.zeros_like(values) if before is None else before
    state["filtered"] = torch.add(before * smoothing, values, alpha=1 - smoothing)
    return corrected(state["filtered"], smoothing, step)


def smoothing_of(settings: Settings) -> float:
    """s of a plan."""
    return SMOOTHING if settings.smoothing is None else settings.smoothing
