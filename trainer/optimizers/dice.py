"""DP-Dice: SGD on releases that carry the clipped error of earlier clipping.

With C₂ = ``error_clip_norm``, on the mean, and all tensors flattened together,

    v_t = (1/B) Σ_i clip(g_i, C₁) + clip(e_t, C₂),   released: v_t + noise,   e_1 = 0,
    e_(t+1) = e_t + (1/B) Σ_i clip(g_i, G) - v_t       (raw g_i where the plan has no G)

The optimiser reads the release like any other: heavy ball and weight decay. The error state is
*not* its state. e_t is made of raw gradients and is accounted in every later release, so it
is kept apart in ``ErrorFeedback``, which belongs to the loop: never logged, never saved with
the model, in checkpoints only where these are as secret as the data. At each step the loop
gives ``feed_back`` the lot's clipped sums, which become B v_t, and its raw (or pre-clipped)
sums, of an empty lot as well; then noise of σC₁ is added to B v_t, once. Records whose
gradients are not finite are in neither sum.

>>> feedback = ErrorFeedback({"w": torch.Size([1])}, clip_norm=9.0, divisor=2.0, device="cpu")
>>> for _ in range(2):
...     sums = {"w": torch.tensor([1.0])}
...     feedback.feed_back(sums, {"w": torch.tensor([4.0])})
>>> round(float(sums["w"]), 3)
4.0

Guarantees
    * What is added to the mean has norm at most C₂ after rounding to the sums' type.
    * The state is in float64, so that its own rounding is far below the noise.
    * Raw sums that overflowed leave nothing over for the state, which stays finite.

References: docs/theorems/dp-dice.md, Theorems 1 and 2; Zhang et al., arXiv:2311.14632; Zaki,
MSc thesis, Helsinki 2025, Algorithm 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from affidavit.plan import Plan, schedule
from affidavit.trainer.numerics import clip_weights

ROUNDING = 1 - 2.0**-20
"""Taken off C₂ for the norm's own rounding and for that to float32 of what is added."""


class ErrorFeedback:
    """e_t of all tensors; one for a run, ``divisor`` is B and ``clip_norm`` is C₂."""

    def __init__(
        self, shapes: Mapping[str, torch.Size], *, clip_norm: float, divisor: float, device: str
    ) -> None:
        self._clip_norm, self._divisor = clip_norm * ROUNDING, divisor
        self._error = {
            name: torch.zeros(shape, dtype=torch.float64, device=device)
            for name, shape in shapes.items()
        }

    @classmethod
    def of(cls, plan: Plan, shapes: Mapping[str, torch.Size], *, device: str) -> ErrorFeedback:
        """The error state of a certified ``plan``, which says both numbers."""
        clip_norm = plan.optimizer.error_clip_norm
        divisor = schedule.divisor(plan, plan.phases[0])
        assert clip_norm is not None
        assert divisor is not None
        return cls(shapes, clip_norm=clip_norm, divisor=float(divisor), device=device)

    @torch.no_grad()
    def feed_back(self, clipped: Mapping[str, Tensor], raw: Mapping[str, Tensor]) -> None:
        """Turn the clipped sums of a lot into B v_t, in place, and advance to e_(t+1).

        Each has the shape of its parameter.
        """
        self._require_names(clipped)
        self._require_names(raw)
        left = {name: (raw[name].double() - clipped[name].double()) for name in self._error}
        usable = torch.stack([torch.isfinite(item).all() for item in left.values()]).all()
        weight = self._weight()
        for name, error in self._error.items():
            back = error * weight
            error.sub_(back).add_(torch.where(usable, left[name] / self._divisor, 0.0))
            clipped[name].add_((back * self._divisor).to(clipped[name].dtype))

    def _weight(self) -> Tensor:
        """min(1, C₂ / ‖e_t‖), a little less."""
        parts = [torch.linalg.vector_norm(item) for item in self._error.values()]
        norm = torch.linalg.vector_norm(torch.stack(parts))
        return clip_weights(norm[None], self._clip_norm)[0]

    def private_state_dict(self) -> dict[str, Any]:
        """e_t, which is as secret as the data."""
        return {name: error.clone() for name, error in self._error.items()}

    def load_private_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from ``state``. Each has the shape of its parameter."""
        self._require_names(state)
        self._error = {
            name: state[name].to(error.device, torch.float64, copy=True)
            for name, error in self._error.items()
        }

    def _require_names(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors.keys() != self._error.keys():
            raise ValueError(f"the error state has {sorted(self._error)}, not {sorted(tensors)}")
