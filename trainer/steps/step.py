"""One step: from a lot to the noisy mean of every tensor, whatever the microbatches and devices.

The records of a lot are taken a microbatch at a time; each adds its clipped contribution to
the sums. When all have, on all devices, noise is added once, and the sum is divided by the
fixed divisor B: never by how many records there were. A lot without records is noise alone.
What is known of a record's gradients ends here: nothing is kept but the sums.

Three ways to come to a clipped sum:

* ``PerExampleGradient``: each record's gradient, clipped.
* ``KalmanGradient`` (DP-DiSK): each record's gradients at several points of parameters are
  combined, then clipped. The record's loss is the weighted sum of its losses at the points, so a
  tensor counts as used once a point and is clipped by the norm of the combination.
* ``ErrorFeedbackGradient`` (DP-Dice): clipped sums, and sums clipped only by the pre-clip norm,
  from which the error state is made; both are of the very same gradients, dropout included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from affidavit.trainer.adapters import Batch, DataAdapter, ModelAdapter, on_device, picked_records
from affidavit.trainer.clipping.private import PrivateModel
from affidavit.trainer.distributed.peers import Peers
from affidavit.trainer.distributed.shards import Shards
from affidavit.trainer.noise.chacha import derived_key
from affidavit.trainer.numerics import MAX_CLIP_NORM
from affidavit.trainer.optimizers.dice import ErrorFeedback
from affidavit.trainer.optimizers.disk import DiSK, Point

Sums = dict[str, Tensor]

WITHIN_PRE_CLIP = 1 - 2.0**-13
"""Taken off the pre-clip norm, so that two passes that round differently differ by less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lot:
    """This rank's records of a step, a microbatch at a time, and what it needs of keys.

    Ranks that gather layers together take as many microbatches as each other: ``max_records``
    records are the most that one of them has, and its last microbatches may be empty here.
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
        """Records of one microbatch after the other; the dropout of each has a seed of its own."""
        for place in range(self.microbatches):
            yield self.records[place * self.microbatch : (place + 1) * self.microbatch]

    def seed(self, place: int) -> None:
        """Seed the drop-out of microbatch ``place``: it is no secret, and no part of the noise."""
        drawn = derived_key(self.dropout_key, f"microbatch {place}")
        seed = int.from_bytes(drawn[:8], "little") >> 1
        # ``torch.manual_seed`` also notes, with a traceback, to seed devices that nobody uses.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)


@dataclass(frozen=True, kw_only=True)
class PerExampleGradient:
    """Clipped sums of one gradient a record."""

    model: ModelAdapter
    private: PrivateModel
    data: DataAdapter
    peers: Peers
    autocast: torch.dtype | None = None
    shards: Shards | None = None

    def clipped_sum(self, lot: Lot, seen: Callable[[Tensor], None]) -> Sums:
        """The clipped sums over all ranks; ``seen`` is handed the losses, which are private.

        Each sum has the shape of its parameter.
        """
        return self.summed(self._accumulated(lot, seen, self._losses))

    def summed(self, sums: Sums) -> Sums:
        """``sums`` of this rank over all ranks, in place; most sharded ones are so already.

        Each has the shape of its parameter, or of its part that is here.
        """
        if self.shards is not None:
            return self.shards.completed(sums)
        self.peers.add_up(sums)
        return sums

    def _losses(self, batch: Batch) -> Tensor:
        with self._types():
            return self.model.losses(batch)

    def _types(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.peers.device.type, dtype=self.autocast)

    def _accumulated(
        self, lot: Lot, seen: Callable[[Tensor], None], losses: Callable[[Batch], Tensor]
    ) -> Sums:
        self.private.clear_sums()
        for place, records in enumerate(lot):
            batch, idle = self.batch(records), not len(records)
            lot.seed(place)
            result = self.private.accumulate(
                partial(losses, batch), records=max(1, len(records)), idle=idle
            )
            if not idle:
                seen(result)
        return self.private.sums()

    def batch(self, records: Tensor) -> Batch:
        """The records with these numbers, shape (m,), on the device; one made up for none."""
        batch = (
            self.data.collate(records)
            if len(records)
            else picked_records(self.model.made_up(1), torch.tensor([0]))
        )
        return on_device(batch, self.peers.device)


@dataclass(frozen=True, kw_only=True)
class KalmanGradient(PerExampleGradient):
    """Clipped sums of each record's combination of gradients at the optimiser's points."""

    optimizer: DiSK

    def clipped_sum(self, lot: Lot, seen: Callable[[Tensor], None]) -> Sums:
        """The clipped sums over all ranks, of combined gradients.

        Each sum has the shape of its parameter.
        """
        points = self.optimizer.points()
        values = [self._values(point) for point in points]

        def losses(batch: Batch) -> Tensor:
            with self._types():
                item = [
                    point.weight * functional_call(_Losses(self.model), at, (batch,))
                    for point, at in zip(points, values, strict=True)
                ]
            return torch.stack(item).sum(0)

        result = self._accumulated(lot, seen, losses)
        self.peers.add_up(result)
        return result

    def _values(self, point: Point) -> dict[str, Tensor]:
        with point.stand():
            return {
                f"module.{name}": parameter.detach().clone().requires_grad_()
                for name, parameter in self.model.module.named_parameters()
                if parameter.requires_grad
            }


@dataclass(frozen=True, kw_only=True)
class ErrorFeedbackGradient(PerExampleGradient):
    """Clipped sums to which the clipped error of earlier clipping was added."""

    feedback: ErrorFeedback
    pre_clip_norm: float | None

    def clipped_sum(self, lot: Lot, seen: Callable[[Tensor], None]) -> Sums:
        """B v_t over all ranks, and the error state goes on by a step.

        Each has the shape of its parameter.
        """
        clipped = self._accumulated(lot, seen, self._losses)
        raw = self._raw(lot)
        self.peers.add_up(clipped)
        self.peers.add_up(raw)
        self.feedback.feed_back(clipped, raw)
        return clipped

    def _raw(self, lot: Lot) -> Sums:
        specs = self.private.specs
        most = self.pre_clip_norm
        loose = MAX_CLIP_NORM if most is None else most * WITHIN_PRE_CLIP
        self.private.set_clip_norms(
            [replace(spec, clip_norm=max(loose, spec.clip_norm)) for spec in specs]
        )
        try:
            return self._accumulated(lot, lambda _: None, self._losses)
        finally:
            self.private.set_clip_norms(specs)


class _Losses(nn.Module):
    """The adapter's losses as a module, so that they can be taken at other parameters."""

    def __init__(self, model: ModelAdapter) -> None:
        super().__init__()
        self.module = model.module
        self._of = [model]

    def forward(self, batch: Batch) -> Tensor:
        """Losses, shape (n,)."""
        return self._of[0].losses(batch)
