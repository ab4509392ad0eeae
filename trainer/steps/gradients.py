"""Clipped sums: from a lot to a sum of clipped gradients, for any microbatches and devices.

The records of a lot are processed in microbatches; each record adds its clipped contribution to
the sums, over all devices. Noise is then added once, and the sum is divided by the fixed
divisor B, never by the number of records. A lot without records is noise alone.
Of the records' gradients, only the sums are stored.

There are three ways to a clipped sum:

* ``PerExampleGradient``: each record's gradient, clipped.
* ``KalmanGradient`` (DP-DiSK): each record's gradients at several points of parameters are
  combined, then clipped. The record's loss is the weighted sum of its losses at the points, so a
  tensor counts as used once per point and is clipped by the norm of the combination.
* ``ErrorFeedbackGradient`` (DP-Dice): clipped sums, and sums clipped only by the pre-clip norm,
  from which the error state follows. Both use the same gradients, including dropout.

DP-Dice releases carry the clipped error of earlier clipping. With C₂ = ``error_clip_norm``, on the
mean, and all tensors flattened together,

    v_t = (1/B) Σ_i clip(g_i, C₁) + clip(e_t, C₂),   released: v_t + noise,   e_1 = 0,
    e_(t+1) = e_t + (1/B) Σ_i clip(g_i, G) - v_t       (raw g_i if the plan has no G)

The error state e_t consists of raw gradients and is accounted in every later release. It therefore
belongs to ``ErrorFeedback``, not to the optimiser: it is never logged, never saved with the model,
and saved in checkpoints only, which are as secret as the data. In each step, also for an empty lot,
``feed_back`` turns the lot's clipped sums into B v_t; then noise of σC₁ is added to B v_t, once.
Records whose gradients are not finite are in neither sum.

>>> feedback = ErrorFeedback({"w": torch.Size([1])}, clip_norm=9.0, divisor=2.0, device="cpu")
>>> for _ in range(2):
...     sums = {"w": torch.tensor([1.0])}
...     feedback.feed_back(sums, {"w": torch.tensor([4.0])})
>>> round(float(sums["w"]), 3)
4.0

Guarantees
    * The feedback added to the mean has norm at most C₂ after rounding to the sums' type.
    * The state is in float64, so that its own rounding is far below the noise.
    * Raw sums that overflowed add nothing to the state, which stays finite.

References: docs/theorems/dp-dice.md, Theorems 1 and 2; Zhang et al., arXiv:2311.14632; Zaki,
MSc thesis, Helsinki 2025, Algorithm 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from affidavit.plan import Plan, schedule
from affidavit.trainer.adapters import (
    Batch,
    DataAdapter,
    ModelAdapter,
    has_rows,
    move_to_device,
    parts_of,
    select_records,
)
from affidavit.trainer.clipping.private_model import PrivateModel
from affidavit.trainer.clipping.probe import seed_torch
from affidavit.trainer.distributed.peers import Peers
from affidavit.trainer.distributed.shards import Shards
from affidavit.trainer.errors import UnsupportedModel
from affidavit.trainer.noise.chacha import Ratchet, derived_key
from affidavit.trainer.norm_bounds import MAX_CLIP_NORM, clip_weights
from affidavit.trainer.optimizers.disk import DiSK, Point

Sums = dict[str, Tensor]

PRE_CLIP_MARGIN = 1 - 2.0**-13
"""Factor of the pre-clip norm that covers the different rounding of two passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lot:
    """This rank's records of a step, in microbatches.

    Ranks that gather layers together run the same number of microbatches: ``max_records`` is the
    largest number of records of a rank, and the last microbatches of other ranks may be empty.
    """

    records: Tensor
    microbatch: int
    dropout_key: bytes
    max_records: int = 0

    @property
    def microbatches(self) -> int:
        """The number of microbatches, including empty ones."""
        return -(-max(self.max_records, len(self.records)) // self.microbatch)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the records of one microbatch after the other."""
        for place in range(self.microbatches):
            yield self.records[place * self.microbatch : (place + 1) * self.microbatch]

    def seed_dropout(self, place: int) -> None:
        """Seed the dropout of microbatch ``place``. It is not secret, and no part of the noise."""
        # ``torch.manual_seed`` also registers a seed, with a traceback, for devices without use.
        seed_torch(self._seed(f"microbatch {place}"))

    def seed_of_records(self, place: int) -> int:
        """Return the seed of what reading the records of microbatch ``place`` draws."""
        return self._seed(f"records of microbatch {place}")

    def _seed(self, use: str) -> int:
        return int.from_bytes(derived_key(self.dropout_key, use)[:8], "little") >> 1


class LotQueue:
    """Lots from ``step`` on, each drawn once, in their order, when it is first asked for.

    ``draw`` returns the lot of a step under its key, and the size of the whole lot. A lot that was
    drawn ahead is the one that would be drawn later; if the run ends before, it is never used.
    """

    def __init__(
        self, draw: Callable[[int, Ratchet], tuple[Lot, int]], step: int, ratchet: Ratchet
    ) -> None:
        self._draw, self._step, self._ratchet = draw, step, ratchet
        self._drawn: dict[int, tuple[Lot, int]] = {}

    def at(self, step: int) -> tuple[Lot, int]:
        """Return the lot of ``step``, which stays in the queue."""
        while self._step <= step:
            self._drawn[self._step] = self._draw(self._step, self._ratchet)
            self._step, self._ratchet = self._step + 1, self._ratchet.next()
        return self._drawn[step]

    def take(self, step: int) -> tuple[Lot, int]:
        """Return the lot of ``step`` and remove earlier ones."""
        result = self.at(step)
        self._drawn = {at: lot for at, lot in self._drawn.items() if at >= step}
        return result


@dataclass(frozen=True, kw_only=True)
class PerExampleGradient:
    """Clipped sums of one gradient per record."""

    model: ModelAdapter
    private: PrivateModel
    data: DataAdapter
    peers: Peers
    autocast: torch.dtype | None = None
    shards: Shards | None = None

    def clipped_sum(self, lot: Lot, on_losses: Callable[[Tensor], None]) -> Sums:
        """Return the clipped sums over all ranks; ``on_losses`` receives the private losses.

        Each sum has the shape of its parameter.
        """
        return self.reduce(self._accumulate(lot, on_losses, self._losses))

    def reduce(self, sums: Sums) -> Sums:
        """Add ``sums`` over all ranks, in place; most sharded ones are added up already.

        Each has the shape of its parameter, or of its local part.
        """
        if self.shards is not None:
            return self.shards.complete_sums(sums)
        self.peers.all_reduce(sums)
        return sums

    def _losses(self, batch: Batch) -> Tensor:
        with self._autocast():
            return self.model.losses(batch)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.peers.device.type, dtype=self.autocast)

    def _accumulate(
        self, lot: Lot, on_losses: Callable[[Tensor], None], losses: Callable[[Batch], Tensor]
    ) -> Sums:
        self.private.clear_sums()
        for place, records in enumerate(lot):
            batch, idle = self.batch(records), not len(records)
            lot.seed_dropout(place)
            result = self.private.accumulate(
                partial(losses, batch),
                records=max(1, len(records)),
                idle=idle,
                losses_of=replaced_losses(losses, batch, len(records)),
            )
            if not idle:
                on_losses(result)
        return self.private.sums()

    def batch(self, records: Tensor) -> Batch:
        """Return the records (m,) as a batch on the device, or a made-up record for none."""
        batch = (
            self.data.collate(records)
            if len(records)
            else select_records(self.model.made_up(1), torch.tensor([0]))
        )
        return move_to_device(batch, self.peers.device)


def replaced_losses(
    losses: Callable[[Batch], Tensor], batch: Batch, records: int
) -> Callable[[Tensor], Tensor] | None:
    """Return the losses of a batch of records of ``batch`` by their numbers, shape (records,).

    None if a tensor of the batch has not one row for each record. They raise ``UnsupportedModel``
    if the batch was written to meanwhile.
    """
    if not has_rows(batch, records):
        return None
    before = _versions(batch)

    def losses_of(rows: Tensor) -> Tensor:
        if _versions(batch) != before:
            raise UnsupportedModel(
                "the losses or the model write into the batch (x.mul_, x /= ...), so that a second "
                "pass over its records sees other values. Use the operation that returns a new "
                "tensor, or change a copy."
            )
        return losses(select_records(batch, rows))

    return losses_of


def _versions(batch: Batch) -> list[int]:
    if isinstance(batch, Tensor):
        return [0 if batch.is_inference() else batch._version]
    return [version for part in parts_of(batch) or () for version in _versions(part)]


@dataclass(frozen=True, kw_only=True)
class KalmanGradient(PerExampleGradient):
    """Clipped sums of each record's combined gradients at the optimiser's points."""

    optimizer: DiSK

    def clipped_sum(self, lot: Lot, on_losses: Callable[[Tensor], None]) -> Sums:
        """Return the clipped sums of combined gradients over all ranks.

        Each sum has the shape of its parameter.
        """
        points = self.optimizer.points()
        values = [self._parameters_at(point) for point in points]

        def losses(batch: Batch) -> Tensor:
            with self._autocast():
                item = [
                    point.weight * functional_call(_Losses(self.model), at, (batch,))
                    for point, at in zip(points, values, strict=True)
                ]
            return torch.stack(item).sum(0)

        result = self._accumulate(lot, on_losses, losses)
        self.peers.all_reduce(result)
        return result

    def _parameters_at(self, point: Point) -> dict[str, Tensor]:
        with point.activate():
            return {
                f"module.{name}": parameter.detach().clone().requires_grad_()
                for name, parameter in self.model.module.named_parameters()
                if parameter.requires_grad
            }


CLIP_MARGIN = 1 - 2.0**-20
"""Factor of C₂ that covers the rounding of the norm and of the result to float32."""


class ErrorFeedback:
    """The error state e_t of all tensors of a run; ``divisor`` is B and ``clip_norm`` is C₂."""

    def __init__(
        self, shapes: Mapping[str, torch.Size], *, clip_norm: float, divisor: float, device: str
    ) -> None:
        self._clip_norm, self._divisor = clip_norm * CLIP_MARGIN, divisor
        self._error = {
            name: torch.zeros(shape, dtype=torch.float64, device=device)
            for name, shape in shapes.items()
        }

    @classmethod
    def from_plan(
        cls, plan: Plan, shapes: Mapping[str, torch.Size], *, device: str
    ) -> ErrorFeedback:
        """Create the error state of a certified ``plan``."""
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
        weight = self._feedback_weight()
        for name, error in self._error.items():
            back = error * weight
            error.sub_(back).add_(torch.where(usable, left[name] / self._divisor, 0.0))
            clipped[name].add_((back * self._divisor).to(clipped[name].dtype))

    def _feedback_weight(self) -> Tensor:
        """Return min(1, C₂ / ‖e_t‖), slightly less."""
        parts = [torch.linalg.vector_norm(item) for item in self._error.values()]
        norm = torch.linalg.vector_norm(torch.stack(parts))
        return clip_weights(norm[None], self._clip_norm)[0]

    def private_state_dict(self) -> dict[str, Any]:
        """Return e_t, which is as secret as the data."""
        return {name: error.clone() for name, error in self._error.items()}

    def load_private_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore ``state``. Each has the shape of its parameter."""
        self._require_names(state)
        self._error = {
            name: state[name].to(error.device, torch.float64, copy=True)
            for name, error in self._error.items()
        }

    def _require_names(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors.keys() != self._error.keys():
            raise ValueError(f"the error state has {sorted(self._error)}, not {sorted(tensors)}")


@dataclass(frozen=True, kw_only=True)
class ErrorFeedbackGradient(PerExampleGradient):
    """Clipped sums that include the clipped error of earlier clipping."""

    feedback: ErrorFeedback
    pre_clip_norm: float | None

    def clipped_sum(self, lot: Lot, on_losses: Callable[[Tensor], None]) -> Sums:
        """Return B v_t over all ranks, and advance the error state by a step.

        Each has the shape of its parameter.
        """
        clipped = self._accumulate(lot, on_losses, self._losses)
        raw = self._raw_sums(lot)
        self.peers.all_reduce(clipped)
        self.peers.all_reduce(raw)
        self.feedback.feed_back(clipped, raw)
        return clipped

    def _raw_sums(self, lot: Lot) -> Sums:
        specs = self.private.specs
        most = self.pre_clip_norm
        loose = MAX_CLIP_NORM if most is None else most * PRE_CLIP_MARGIN
        self.private.set_clip_norms(
            [replace(spec, clip_norm=max(loose, spec.clip_norm)) for spec in specs]
        )
        try:
            return self._accumulate(lot, lambda _: None, self._losses)
        finally:
            self.private.set_clip_norms(specs)


class _Losses(nn.Module):
    """The adapter's losses as a module, for evaluation at other parameters."""

    def __init__(self, model: ModelAdapter) -> None:
        super().__init__()
        self.module = model.module
        self._of = [model]

    def forward(self, batch: Batch) -> Tensor:
        """Return the losses, shape (n,)."""
        return self._of[0].losses(batch)
