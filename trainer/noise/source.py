"""The noise of a run: w_t = (N z)_t for each tensor, scaled to its block.

z_t is independent standard normal, drawn in float32 from the keyed stream of its step and
tensor. The recurrence of the plan's strategy computes w_t from it and from a few tensors stored
between steps (none for independent noise). The release of a tensor is its clipped sum
plus ``scale`` · w_t, where ``scale`` is σ_g C_g of its block. This is noise for the *sum* of the
lot: it is added once per lot of any size, also to an empty lot.

Guarantees
    * Steps are taken in order, each once, and none beyond those of the strategy.
    * No two tensors, and no two steps under one key, share a word of a stream. Each step has its
      key, so a resumed run continues with new keys and the stored state.
    * The state does not contain a key. It is as secret as the noise itself.

>>> source = NoiseSource({"w": TensorNoise(shape=(2,), scale=0.5)})
>>> sums = {"w": torch.zeros(2)}
>>> source.add_to(sums, bytes(32))
>>> (z,) = standard_normals(bytes(32), step=0, spans=[(0, 0, 2)])
>>> bool((sums["w"] == 0.5 * z).all()), source.step
(True, 1)

References: arXiv:2306.08153 (streams of correlated noise);
``affidavit.mechanisms.strategies.strategy``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from affidavit.mechanisms.strategies import Strategy, identity
from affidavit.trainer.noise.grid import add_grid_noise
from affidavit.trainer.noise.normal import (
    CHUNK_GROUPS,
    GROUP_SIZE,
    has_kernel,
    standard_normals,
)
from affidavit.trainer.noise.recurrence import recurrence_of

MAX_DRAWN, MAX_DRAWN_CPU = 1 << 23, CHUNK_GROUPS * GROUP_SIZE
"""Variates that are drawn at once before they are added, on a device and on the processor."""


class WrongState(ValueError):
    """The state belongs to other noise, or the step is beyond the certified ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNoise:
    """A tensor's shape, and σ_g C_g of its block: the standard deviation of its independent noise.

    ``scale`` is in units of an entry of the clipped sum. A rank that has only the ``box`` of a
    tensor, a range of rows and one of columns, draws that part of the tensor's noise: ranks that
    share a key use disjoint parts of its streams, and together draw the noise of a single process.

    Raises ``ValueError`` unless the scale is positive.
    """

    shape: tuple[int, ...]
    scale: float
    box: tuple[tuple[int, int], tuple[int, int]] | None = None

    @property
    def columns(self) -> tuple[int, int] | None:
        """The local columns of a matrix, or None for all columns."""
        if self.box is None or self.box[1] == (0, math.prod(self.shape[1:])):
            return None
        return self.box[1]

    @property
    def drawn_shape(self) -> tuple[int, ...]:
        """The shape of the local rows, with all columns."""
        if self.box is None:
            return self.shape
        first, last = self.box[0]
        return (last - first, *self.shape[1:])

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the local part."""
        if self.columns is None:
            return self.drawn_shape
        return (self.drawn_shape[0], self.columns[1] - self.columns[0])

    @property
    def first_entry(self) -> int:
        """The number of the tensor's entries before the local rows."""
        return 0 if self.box is None else self.box[0][0] * math.prod(self.shape[1:])

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"the scale of noise must be a positive number, not {self.scale}")


class NoiseSource:
    """Noise for ``tensors`` under ``strategy``, by default independent in every step.

    ``dtype`` is the type of stored and added tensors; z is always drawn in float32. With ``exact``,
    the noisy sum is rounded to a grid (``affidavit.trainer.noise.grid``). The key of a step has
    32 bytes and serves only the noise.

    Raises ``ValueError`` for ``exact`` with correlated noise.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorNoise],
        *,
        strategy: Strategy | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        exact: bool = False,
    ) -> None:
        self._tensors = dict(tensors)
        self._strategy = identity(1) if strategy is None else strategy
        self._max_steps = None if strategy is None else strategy.steps
        self._recurrence = recurrence_of(self._strategy)
        self._device, self._dtype, self._exact = device, dtype, exact
        if exact and self._recurrence is not None:
            raise ValueError("exact noise needs independent noise; remove exact")
        self._places = {name: place for place, name in enumerate(tensors)}
        self._groups = self._group()
        self._kept: dict[str, list[Tensor]] = {name: [] for name in tensors}
        self._step = 0

    @property
    def step(self) -> int:
        """The step whose noise comes next, from 0."""
        return self._step

    def add_to(
        self, sums: Mapping[str, Tensor], key: bytes, scales: Mapping[str, float] | None = None
    ) -> None:
        """Add this step's noise to the clipped sum of each tensor, in place, and advance.

        ``scales`` are the scales of this step if clip norms, and the noise with them, are adapted.
        Each sum has the shape of its parameter.

        Raises ``WrongState`` after the last step of the strategy, and ``ValueError`` if the
        sums are not those of all tensors; then nothing was added.
        """
        self._require_steps_left()
        wrong = sums.keys() ^ self._tensors.keys() or {
            name
            for name, item in self._tensors.items()
            if tuple(sums[name].shape) != item.local_shape
        }
        if wrong:
            raise ValueError(f"{', '.join(sorted(wrong))}: not among the tensors that get noise")
        at, self._step = self._step, self._step + 1
        scales = self.scales() if scales is None else scales
        with torch.no_grad():
            if self._exact:
                for place, (name, tensor) in enumerate(self._tensors.items()):
                    self._add_exactly(key, at, place, tensor, sums[name], scales[name])
                return
            if all(self._is_added_at_once(name, total) for name, total in sums.items()):
                self._add_at_once(key, at, sums, scales)
                return
            for names in self._groups:
                name = names[0]
                if self._is_added_in_chunks(names) and sums[name].is_contiguous():
                    self._add_independent(key, at, name, sums[name], scales[name])
                    continue
                drawn = list(self._draw(key, at, names))
                for scale in {scales[name] for name in names}:
                    of = [place for place, name in enumerate(names) if scales[name] == scale]
                    totals = [sums[names[place]] for place in of]
                    torch._foreach_add_(totals, [drawn[place] for place in of], alpha=scale)

    def skip_step(self, key: bytes) -> None:
        """Skip a step whose release was lost: its noise enters the state but no sum.

        Later steps then continue the certified sequence. Independent noise stores nothing, so none
        is drawn.

        Raises ``WrongState`` after the last step of the strategy.
        """
        self._require_steps_left()
        at, self._step = self._step, self._step + 1
        if self._recurrence is None:
            return
        with torch.no_grad():
            for names in self._groups:
                for _ in self._draw(key, at, names):
                    pass

    def _group(self) -> list[list[str]]:
        """Return the names in groups whose noise is drawn and added at once, in their order."""
        groups: list[list[str]] = []
        room = 0
        for name, tensor in self._tensors.items():
            size = math.prod(tensor.drawn_shape)
            if not groups or size > room:
                groups.append([])
                room = MAX_DRAWN_CPU if torch.device(self._device).type == "cpu" else MAX_DRAWN
            groups[-1].append(name)
            room -= size
        return groups

    def _is_added_in_chunks(self, names: Sequence[str]) -> bool:
        columns = self._tensors[names[0]].columns
        return len(names) == 1 and self._recurrence is None and columns is None

    def _is_added_at_once(self, name: str, total: Tensor) -> bool:
        is_plain = self._recurrence is None and self._tensors[name].columns is None
        return is_plain and total.is_contiguous() and has_kernel(total)

    def _add_at_once(
        self, key: bytes, at: int, sums: Mapping[str, Tensor], scales: Mapping[str, float]
    ) -> None:
        """Add the independent noise of all tensors by one kernel, which stores none of it."""
        from affidavit.trainer.noise.fused import write_normals

        spans = [
            (self._places[name], tensor.first_entry, math.prod(tensor.drawn_shape))
            for name, tensor in self._tensors.items()
        ]
        write_normals(
            [sums[name] for name in self._tensors],
            key,
            step=at,
            spans=spans,
            scales=[scales[name] for name in self._tensors],
        )

    def _require_steps_left(self) -> None:
        if self._max_steps is not None and self._step >= self._max_steps:
            raise WrongState(
                f"the noise was certified for {self._max_steps} steps, and all were taken"
            )

    def scales(self) -> dict[str, float]:
        """Return σ_g C_g of each tensor."""
        return {name: tensor.scale for name, tensor in self._tensors.items()}

    def _add_independent(self, key: bytes, at: int, name: str, total: Tensor, scale: float) -> None:
        """Add independent noise by chunks, so that no noise of a whole tensor is in memory."""
        place, tensor, entries = self._places[name], self._tensors[name], total.view(-1)
        chunk = MAX_DRAWN_CPU if entries.device.type == "cpu" else MAX_DRAWN
        for begin in range(0, len(entries), chunk):
            part = entries[begin : begin + chunk]
            span = (place, tensor.first_entry + begin, len(part))
            (drawn,) = standard_normals(key, step=at, spans=[span], device=self._device)
            part.add_(drawn.to(self._dtype), alpha=scale)

    def _draw(self, key: bytes, at: int, names: Sequence[str]) -> Iterator[Tensor]:
        """Yield the noise of the tensors, each in its local shape."""
        tensors = [self._tensors[name] for name in names]
        spans = [
            (self._places[name], tensor.first_entry, math.prod(tensor.drawn_shape))
            for name, tensor in zip(names, tensors, strict=True)
        ]
        drawn = standard_normals(key, step=at, spans=spans, device=self._device)
        for name, tensor, item in zip(names, tensors, drawn, strict=True):
            z = _slice_columns(item.view(tensor.drawn_shape), tensor).to(self._dtype)
            if self._recurrence is None:
                yield z
            else:  # what is stored would keep the draws of the others
                yield self._recurrence(at, z.clone(), self._kept[name])

    def _add_exactly(
        self, key: bytes, at: int, place: int, tensor: TensorNoise, total: Tensor, scale: float
    ) -> None:
        wide = total if tensor.columns is None else total.new_zeros(tensor.drawn_shape)
        if tensor.columns is not None:
            _slice_columns(wide, tensor).copy_(total)
        add_grid_noise(wide, key, step=at, tensor=place, scale=scale, first=tensor.first_entry)
        if tensor.columns is not None:
            total.copy_(_slice_columns(wide, tensor))

    def state_dict(self) -> dict[str, Any]:
        """Return the step and copies of the stored tensors, for a checkpoint."""
        stored = {name: [item.clone() for item in of] for name, of in self._kept.items()}
        return {"step": self._step, "of": self._fingerprint(), "kept": stored}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``; raises ``WrongState`` for the state of another strategy or model."""
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
            "steps": self._max_steps,
            "recurrence": [streaming.form, streaming.buffers, list(streaming.coefficients)],
            "tensors": [[n, list(t.shape), t.scale] for n, t in self._tensors.items()],
        }


def _slice_columns(values: Tensor, tensor: TensorNoise) -> Tensor:
    return values if tensor.columns is None else values[:, slice(*tensor.columns)]
