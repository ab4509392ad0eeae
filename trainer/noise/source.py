"""The noise of a run: w_t = (N z)_t for every tensor, scaled to its block.

z_t is independent standard normal, drawn in float32 from the keyed stream of its step and
tensor; the recurrence of the plan's strategy turns it into w_t with a few tensors kept
between steps (none for independent noise). What is released for a tensor is its clipped sum
plus ``scale`` · w_t, with ``scale`` = σ_g C_g of its block: noise for the *sum* of the lot,
to be added once a lot whatever its size, and to an empty one as well.

Guarantees
    * Steps are taken in order, each once, and none beyond those of the strategy.
    * No two tensors, and no two steps under one key, share any word of a stream. A run that
      is resumed after a crash continues with a new key (``rekey``) and the stored state.
    * The state has what is kept, not the key; it is secret like the noise itself.

>>> source = NoiseSource(bytes(32), {"w": TensorNoise(shape=(2,), scale=0.5)})
>>> sums = {"w": torch.zeros(2)}
>>> source.add_to(sums)
>>> expected = 0.5 * standard_normal(bytes(32), step=0, tensor=0, shape=(2,))
>>> bool((sums["w"] == expected).all()), source.step
(True, 1)

References: arXiv:2306.08153 (streams of correlated noise);
``affidavit.mechanisms.strategies.strategy``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from affidavit.mechanisms.strategies import Strategy, identity
from affidavit.trainer.noise.grid import add_on_grid
from affidavit.trainer.noise.normal import pieces, standard_normal
from affidavit.trainer.noise.recurrence import recurrence_of


class WrongState(ValueError):
    """A state of other noise, or a step beyond the certified ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNoise:
    """One tensor's shape, and σ_g C_g of its block: the deviation of its independent noise.

    It is in units of the clipped sum, an entry of it. Where only the ``box`` of a tensor is here,
    some rows and some columns from one up to another, its noise is that part of the whole
    tensor's: ranks that share a key use disjoint parts of its streams, and together what one
    process draws.

    Raises ``ValueError`` unless the scale is positive.
    """

    shape: tuple[int, ...]
    scale: float
    box: tuple[tuple[int, int], tuple[int, int]] | None = None

    @property
    def columns(self) -> tuple[int, int] | None:
        """The columns of a matrix that are on this rank; None if all are."""
        if self.box is None or self.box[1] == (0, math.prod(self.shape[1:])):
            return None
        return self.box[1]

    @property
    def drawn(self) -> tuple[int, ...]:
        """The shape of the rows that are here, with all columns."""
        if self.box is None:
            return self.shape
        first, last = self.box[0]
        return (last - first, *self.shape[1:])

    @property
    def here(self) -> tuple[int, ...]:
        """The shape of what is here."""
        if self.columns is None:
            return self.drawn
        return (self.drawn[0], self.columns[1] - self.columns[0])

    @property
    def first(self) -> int:
        """How many entries of the tensor come before the rows that are here."""
        return 0 if self.box is None else self.box[0][0] * math.prod(self.shape[1:])

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"the scale of noise must be a positive number, not {self.scale}")


class NoiseSource:
    """Noise for ``tensors`` under ``strategy``, by default independent at every step.

    ``key`` has 32 bytes and serves the noise alone. ``dtype`` is that of what is kept and
    added; z is drawn in float32 in any case. With ``exact`` the noisy sum is rounded to a grid as
    ``affidavit.trainer.noise.grid`` does.

    Raises ``ValueError`` for ``exact`` beside correlated noise.
    """

    def __init__(
        self,
        key: bytes,
        tensors: Mapping[str, TensorNoise],
        *,
        strategy: Strategy | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        exact: bool = False,
    ) -> None:
        self._key, self._tensors = key, dict(tensors)
        self._strategy = identity(1) if strategy is None else strategy
        self._most = None if strategy is None else strategy.steps
        self._recurrence = recurrence_of(self._strategy)
        self._device, self._dtype, self._exact = device, dtype, exact
        if exact and self._recurrence is not None:
            raise ValueError("exact noise needs independent noise; remove exact")
        self._kept: dict[str, list[Tensor]] = {name: [] for name in tensors}
        self._step = 0

    @property
    def step(self) -> int:
        """The step whose noise comes next, from 0."""
        return self._step

    def rekey(self, key: bytes) -> None:
        """Draw further noise from another key; needed after a crash."""
        self._key = key

    def add_to(self, sums: Mapping[str, Tensor], scales: Mapping[str, float] | None = None) -> None:
        """Add this step's noise to the clipped sum of every tensor, in place, and advance.

        ``scales`` are those of this step, where clip norms are adapted and the noise with them.

        Raises ``WrongState`` after the last step of the strategy and ``ValueError`` where the
        sums are not those of all tensors; then nothing was added.

        Each sum has the shape of its parameter.
        """
        self._require_left()
        wrong = sums.keys() ^ self._tensors.keys() or {
            name for name, item in self._tensors.items() if tuple(sums[name].shape) != item.here
        }
        if wrong:
            raise ValueError(f"{', '.join(sorted(wrong))}: not among the tensors that get noise")
        at, self._step = self._step, self._step + 1
        scales = self.scales() if scales is None else scales
        with torch.no_grad():
            if self._exact:
                for place, (name, tensor) in enumerate(self._tensors.items()):
                    self._add_exactly(at, place, tensor, sums[name], scales[name])
                return
            if self._recurrence is None and all(
                sums[name].is_contiguous() and tensor.columns is None
                for name, tensor in self._tensors.items()
            ):
                self._add_pieces(at, sums, scales)
                return
            for place, (name, tensor) in enumerate(self._tensors.items()):
                sums[name].add_(self._w(at, place, name, tensor), alpha=scales[name])

    def pass_over(self) -> None:
        """Skip a step whose release a crash lost: its noise enters the state and no sum.

        What follows then continues the one sequence that was certified. Independent noise keeps
        nothing, and none is drawn.

        Raises ``WrongState`` after the last step of the strategy.
        """
        self._require_left()
        at, self._step = self._step, self._step + 1
        if self._recurrence is None:
            return
        with torch.no_grad():
            for place, (name, tensor) in enumerate(self._tensors.items()):
                self._w(at, place, name, tensor)

    def _require_left(self) -> None:
        if self._most is not None and self._step >= self._most:
            raise WrongState(f"the noise was certified for {self._most} steps, and all were taken")

    def scales(self) -> dict[str, float]:
        """σ_g C_g of every tensor, as it is added."""
        return {name: tensor.scale for name, tensor in self._tensors.items()}

    def _w(self, at: int, place: int, name: str, tensor: TensorNoise) -> Tensor:
        drawn = standard_normal(
            self._key,
            step=at,
            tensor=place,
            shape=tensor.drawn,
            device=self._device,
            first=tensor.first,
        )
        z = _of_columns(drawn, tensor).to(self._dtype)
        return z if self._recurrence is None else self._recurrence(at, z, self._kept[name])

    def _add_exactly(
        self, at: int, place: int, tensor: TensorNoise, total: Tensor, scale: float
    ) -> None:
        wide = total if tensor.columns is None else total.new_zeros(tensor.drawn)
        if tensor.columns is not None:
            _of_columns(wide, tensor).copy_(total)
        add_on_grid(wide, self._key, step=at, tensor=place, scale=scale, first=tensor.first)
        if tensor.columns is not None:
            total.copy_(_of_columns(wide, tensor))

    def _add_pieces(self, at: int, sums: Mapping[str, Tensor], scales: Mapping[str, float]) -> None:
        """The same where the noise is z itself: no tensor is ever written in full."""
        into = [(sums[name].view(-1), scales[name]) for name in self._tensors]
        spans = {
            place: range(tensor.first, tensor.first + len(into[place][0]))
            for place, tensor in enumerate(self._tensors.values())
        }
        for place, first, z in pieces(self._key, step=at, spans=spans, device=self._device):
            flat, scale = into[place]
            flat[first : first + len(z)].add_(z.to(self._dtype), alpha=scale)

    def state_dict(self) -> dict[str, Any]:
        """The step and the state, for a checkpoint; the tensors are copies."""
        stored = {name: [item.clone() for item in of] for name, of in self._kept.items()}
        return {"step": self._step, "of": self._fingerprint(), "kept": stored}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; raises ``WrongState`` for that of another strategy or model."""
        if state["of"] != self._fingerprint():
            raise WrongState("the checkpoint's noise has another strategy or other tensors")
        self._step = int(state["step"])
        self._kept = {
            name: [item.to(self._device, self._dtype, copy=True) for item in state["kept"][name]]
            for name in self._tensors
        }

    def _fingerprint(self) -> dict[str, Any]:
        streaming = self._strategy.streaming
        return {
            "kind": self._strategy.kind,
            "steps": self._most,
            "recurrence": [streaming.form, streaming.buffers, list(streaming.coefficients)],
            "tensors": [[n, list(t.shape), t.scale] for n, t in self._tensors.items()],
        }


def _of_columns(values: Tensor, tensor: TensorNoise) -> Tensor:
    return values if tensor.columns is None else values[:, slice(*tensor.columns)]
