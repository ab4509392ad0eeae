"""Train in your own loop: it gets the certified lots, and the optimiser gets noisy means.

``private`` takes a model, an optimiser and a loader, and returns a run to iterate over. Its batches
are the microbatches of the certified lots, whatever the loader's own order, and the loader's
workers read them ahead. ``run.loss`` clips the
gradients of a batch; ``optimizer.step()`` does nothing until a lot is complete, and then updates
with its noisy mean, as in a loop with gradient accumulation. A lot without records is noise alone:
the run takes that step itself. The scale of the loss has no effect, because each record's gradient
is computed from its own loss and then clipped: a mean, a sum or a division for accumulation trains
the same.

A framework counts its own steps, and may fetch batches ahead. ``run.accumulate()`` suits it: it
takes the whole lot of a step in microbatches, and the batch that the framework fetched is not used.

Guarantees
    * The optimiser sees only noisy means of whole lots, one for each charged step.
    * A loop that skips a batch or steps twice is stopped before anything is released.
    * A loop that changes the model's tensors, or the optimiser's, other than by steps is stopped.
    * A loop that logs or schedules by the loss of ``run.loss`` reveals nothing: it is 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import GEN_CLOSED, Parameter, getgeneratorstate, signature
from math import ceil
from pathlib import Path
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from affidavit.certificate import MAX_BYTES, VerificationOptions
from affidavit.mechanisms import read_plan
from affidavit.plan import Plan, read_limited, schedule
from affidavit.trainer.adapters import Batch, Group, parts_of, select_records
from affidavit.trainer.clipping.probe import PROBE_SEEDS
from affidavit.trainer.data.loaded_records import LoadedRecords, digest_of_batch, tensors_of
from affidavit.trainer.data.ownership import Ownership, PartOwners, count_ownership
from affidavit.trainer.distributed.peers import Peers
from affidavit.trainer.errors import Diverged, MixedRecords, RunFailure, UnsupportedModel
from affidavit.trainer.loop import Outcome, Run, StepOutputs
from affidavit.trainer.run_config import bind
from affidavit.trainer.settings import Settings
from affidavit.trainer.steps.gradients import Lot, LotQueue, replaced_losses
from affidavit.trust import TrustedKeys, trusted_or_own

Losses = Callable[[nn.Module, Batch], Tensor]
"""Returns one loss for each record of a batch, shape (n,)."""

_EVERY_BATCH = (
    "Call run.loss(batch).backward() and then optimizer.step() once for every batch of the run, "
    "before the next is fetched. A step gathers its microbatches itself: set a framework's "
    "accumulation of gradients to 1."
)


class LoopError(RunFailure):
    """The loop called the run in another way than a step needs; nothing was released."""


class _Model:
    """A module and its losses, as a ``ModelAdapter``."""

    def __init__(
        self,
        module: nn.Module,
        losses: Losses,
        blocks: dict[str, tuple[Group, ...]],
        example: Batch,
    ) -> None:
        self.module, self._losses, self._blocks, self._example = module, losses, blocks, example

    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of each record, shape (n,)."""
        return self._losses(self.module, batch)

    def blocks(self) -> Mapping[str, Sequence[Group]]:
        """Return the groups of each release, by the release's name."""
        return self._blocks

    def made_up(self, records: int) -> Batch:
        """Return the example, of which the trainer takes the first ``records``."""
        del records
        return self._example


def private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    loader: DataLoader[Any],
    *,
    losses: Losses,
    certificate: Path | str | bytes,
    plan: Plan | Path | str,
    out: Path | str,
    blocks: Mapping[str, Sequence[str]] | None = None,
    trusted: TrustedKeys | None = None,
    options: VerificationOptions | None = None,
    users: Sequence[Any] | Tensor | None = None,
    example: Batch | None = None,
    digest: str | None = None,
    resume: bool | None = None,
    settings: Settings | None = None,
    peers: Peers | None = None,
) -> PrivateRun:
    """Return a run of ``plan``, as ``certificate`` certifies it, for your own loop.

    ``optimizer`` may be any optimiser of the model's trainable tensors; None is the plan's own,
    ``run.optimizer``. Microbatches have the loader's ``batch_size``, and records come from its data
    set and ``collate_fn``; its sampler is not used. ``blocks`` has name patterns for each release
    of a plan with several releases; a release of ``count`` above 1 has a block for each tensor.
    ``trusted`` are the keys that may certify and their policy (``affidavit.keys.trusted``), by
    default your own keys, and ``options`` your further requirements on the certificate.
    ``users``, of shape (N,), has the user of each record, for a plan of users with several records,
    or a list or set of its users (``users_per_record``). ``example`` is a batch of at least three
    records to probe the model with, by default some of the first records. ``digest`` identifies the
    data; by default each record is read for it once. A run in ``out`` is resumed unless ``resume``
    is false.

    Raises ``NotCertified``, ``RunFailure``, ``UnsupportedModel`` and ``MixedRecords``, and
    ``KeyFailure`` for keys that cannot be read.
    """
    trusted = trusted_or_own(trusted)
    _require_loader(loader)
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise UnsupportedModel(
            f"model: {type(model).__name__} adds up gradients of batches, and a run adds up "
            "clipped sums over its ranks itself. Pass model.module."
        )
    if optimizer is not None:
        _require_optimizer(optimizer)
    if not isinstance(plan, Plan):
        plan = read_plan(Path(plan))
    bundle = certificate if isinstance(certificate, bytes) else read_limited(certificate, MAX_BYTES)
    if plan.optimizer.name in ("dp_disk", "dp_dice"):
        raise UnsupportedModel(
            f"{plan.optimizer.name} computes gradients in its own way, which your own loop does "
            "not. Run it with affidavit train."
        )
    if plan.canaries is not None:
        raise UnsupportedModel(
            "the plan has canaries, which your own loop does not train on. Run it with "
            "affidavit train, or certify it without canaries."
        )
    records = LoadedRecords(loader, digest, Path(out))
    ownership = None if users is None else _ownership(users, len(records))
    config = bind(
        bundle,
        trusted,
        plan,
        records=len(records),
        most_of_a_user=ownership and ownership.contributions_per_user,
        most_users=ownership.users_per_record if ownership else 1,
        own_parts=users is not None and any(isinstance(entry, PartOwners) for entry in users),
        options=options,
    )
    if settings is None:
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        settings = Settings(device=_device_of(model).type, microbatch=size or 64)
    collated: Callable[[Tensor], Batch] | None = None
    if example is None:
        example, collated = _make_example(records)
    adapter = _Model(model, losses, _group_tensors(config.plan, model, blocks), example)
    run = Run(
        config=config,
        model=adapter,
        data=records,
        settings=settings,
        peers=peers or Peers.join(settings.device_type),
        quiet=True,
        entropy=os.urandom,
        optimizer=optimizer,
        collated=collated,
    )
    return PrivateRun(run, adapter, records, Path(out), resume)


def _ownership(users: Sequence[Any] | Tensor, records: int) -> Ownership:
    """Return what a plan bounds; ``users`` has one entry per record."""
    if len(users) != records:
        raise UnsupportedModel(
            f"users: {len(users)} entries for {records} records. Name the user of each record."
        )
    try:
        return count_ownership(users.tolist() if isinstance(users, Tensor) else users)
    except ValueError as error:
        raise UnsupportedModel(f"users: {error}") from None


def _make_example(records: LoadedRecords) -> tuple[Batch, Callable[[Tensor], Batch] | None]:
    """Return three records, and a function that collates fewer of them, or None.

    Batches of fewer records have other draws if ``collate_fn`` draws. Its result for two records
    must then be the same for any third one. Raises ``MixedRecords`` and ``UnsupportedModel``.
    """
    places = records.pick_different()
    example = records.collate_fixed(places)
    records.collate_fixed(places.flip(0))  # after other records
    if digest_of_batch(example) != digest_of_batch(records.collate_fixed(places)):
        raise UnsupportedModel(
            "loader: a record is not the same twice although random, numpy.random and torch draw "
            "the same: its data set keeps state of what was read, or draws from a generator of its "
            "own. Draw from torch's, or draw in losses; or give private an example and a digest."
        )
    if len(places) < 3 or not records.collate_draws(places):
        return example, lambda rows: records.collate_fixed(places[rows])
    pair = torch.arange(2)
    if _record_shapes(records.collate_fixed(places[pair])) != _record_shapes(example):
        raise UnsupportedModel(
            "loader: its collate_fn draws random numbers and pads to the longest record, so "
            "the padding cannot be told from the draws. Pad to a fixed length, or draw in the data "
            "set or in losses; or give private an example."
        )
    for seed in range(PROBE_SEEDS):
        batches = (records.collate_fixed(places[[0, 1, third]], seed) for third in (0, 1))
        one, other = (digest_of_batch(select_records(batch, pair)) for batch in batches)
        if one != other:
            raise MixedRecords(
                "loader: what collate_fn makes of two records changes with the third: it mixes "
                "records (mixup, CutMix, statistics of a batch). Change each record on its own."
            )
    return example, None


def _record_shapes(batch: Batch) -> list[torch.Size]:
    """Return the shapes of a batch without the number of records."""
    return [item.shape[1:] for item in tensors_of(batch)]


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@dataclass
class _Microbatch:
    """The batch that the loop is working on, and what the loop did with it.

    A lot without records is one microbatch without a batch.
    """

    batch: Batch | None
    content: set[Any]
    records: int
    is_last: bool
    has_loss: bool = False
    is_stepped: bool = False
    is_released: bool = False


class PrivateRun:
    """A run to iterate over; ``optimizer`` updates, ``guarantee`` covers the whole run.

    Its length is the number of remaining steps; a step may have several microbatches, or none.
    """

    def __init__(
        self, run: Run, model: _Model, records: LoadedRecords, out: Path, resume: bool | None
    ) -> None:
        self._run, self._model, self._records, self.folder = run, model, records, out
        try:
            run.enter(out, resume=resume)
        except BaseException:
            run.close()
            raise
        self._training, self._private = run.training, run.training.private
        self._length = run.config.execution.steps - run.step
        self.outcome: Outcome | None = None
        self.guarantee = run.config.summary
        self._device = _device_of(model.module)
        self.optimizer = self._training.optimizer
        # A scheduler wraps the function of this method, and binds it to the optimiser again.
        step = MethodType(lambda _, closure=None: self._step(closure), self.optimizer)
        # A scheduler created earlier would warn that it does not see the steps.
        step.__func__._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self.optimizer.step = step  # type: ignore[method-assign]  # until close
        # GradScaler then calls it, instead of failing over missing gradients.
        self.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._lot_size = 0
        self._microbatch: _Microbatch | None = None
        self._outputs: StepOutputs | None = None
        self._is_released = self._is_stopped = self._is_closed = False
        self._lots = LotQueue(self._training.draw, run.step, run.secrets.ratchet)
        self._microbatches = self._all_microbatches()

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        """Return itself: copies of a model that holds the run, like averaged models, share it."""
        return self

    def __len__(self) -> int:
        return self._length

    @property
    def step(self) -> int:
        """The number of steps that were charged until now, without the one in progress."""
        return self._run.step + self._is_released

    @property
    def certified_steps(self) -> int:
        """The number of steps of the whole run, T."""
        return self._run.config.execution.steps

    @property
    def lots_per_epoch(self) -> int:
        """The number of lots in which as many records are drawn as there are, in expectation."""
        plan = self._run.config.plan
        return ceil(1 / schedule.sampling_probability(plan, plan.phases[0]))

    @property
    def shows_private(self) -> bool:
        """Whether losses are those of private records (``Settings.show_private``)."""
        return self._run.settings.show_private

    def keep(self, **items: Any) -> None:
        """Save the state of schedulers and the like in checkpoints, and restore it on resuming."""
        for name, item in items.items():
            self._training.keep(name, item)

    def accept_weights(self) -> None:
        """Continue with the current weights, which the loop changed after ``optimizer.step()``.

        The same holds for frozen weights, saved buffers and the optimiser's state. They must depend
        only on released and public values: clipped, averaged, from a server.
        """
        self._training.accept_tensors()

    def loss(self, batch: Batch) -> Tensor:
        """Compute and clip the gradients of ``batch``'s records.

        The result is 0, of shape (): the mean loss of private records is returned only with
        ``Settings.show_private``. Its ``backward`` has no effect, and no other loss can be added.
        Raises ``LoopError`` outside of a batch, for a batch that the loop changed, and if the model
        was moved to another device. Raises ``MixedRecords`` and ``UnsupportedModel`` for the model.
        """
        current = self._microbatch
        if current is None or current.has_loss:
            raise LoopError(
                "loop", "call run.loss once for every batch of the run, inside its loop."
            )
        if not _content(batch) <= current.content:
            raise LoopError(
                "loop",
                "run.loss got another batch than the run gave, or one that was changed, which may "
                "mix records (mixup). Change records in the data set or in losses, where it shows.",
            )
        if (device := _device_of(self._model.module)) != self._device:
            raise LoopError(
                "loop",
                f"the model was on {self._device} when the run began, and is on {device}: move it "
                "before you call private.",
            )
        with self._run.noting_strays():
            self._training.require_unchanged_model()
        self._model.module.zero_grad()
        current.has_loss = True  # also after an interrupt, when records may have been added
        try:
            with self._run.noting_strays():
                losses = self._private.accumulate(
                    lambda: self._model.losses(batch),
                    records=max(1, current.records),
                    idle=not current.records,
                    losses_of=replaced_losses(self._model.losses, batch, current.records),
                )
        except Exception:
            current.has_loss = False  # nothing was added, and the loop may catch the failure
            raise
        shown = losses.mean() if self.shows_private else losses.new_zeros(())
        return shown.requires_grad_()

    def accumulate(self) -> Tensor:
        """Clip the gradients of the whole next lot; ``optimizer.step()`` then releases the step.

        It charges the step, draws its lot and calls ``loss`` for each microbatch. Each call is one
        of ``certified_steps``, also for a lot without records. The result, of shape (), is like
        that of ``loss``, over the lot. Raises ``LoopError`` after the last step, and like ``loss``.
        """
        self._require_no_failure()
        total, records = torch.zeros((), device=self._device), 0
        for current in self._microbatches:
            if current.batch is not None:
                total = total + self.loss(current.batch).detach() * current.records
                records += current.records
            if current.is_last:
                return (total / max(1, records)).requires_grad_()
            self._step()
        raise LoopError(
            "loop",
            f"the run was ended at step {self.step} of {self.certified_steps}: take no more steps.",
        )

    def __iter__(self) -> Iterator[Batch]:
        """Return all microbatches of all remaining steps, in one stream.

        Raises ``LoopError`` and ``Diverged``.
        """
        self._require_no_failure()
        return self._batches()

    def _require_no_failure(self) -> None:
        if not self._is_closed and getgeneratorstate(self._microbatches) == GEN_CLOSED:
            raise LoopError(
                "loop",
                f"a failure ended the loop at step {self.step}. Call run.close(), and private "
                "again, which resumes the run.",
            )

    def _batches(self) -> Generator[Batch]:
        for current in self._microbatches:
            if current.batch is None:
                self._step()
            else:
                yield current.batch

    def _all_microbatches(self) -> Generator[_Microbatch]:
        self.accept_weights()
        self._records.read_ahead(self._to_read(), self._run.lock)
        while self.step < self.certified_steps and not self._is_stopped:
            self._outputs = self._run.charge_step(lambda: self._is_stopped)
            self._private.clear_sums()
            lot, self._lot_size = self._lots.take(self.step)
            self._training.begin_lot(self.step, lot)
            for current in self._microbatches_of(lot):
                self._microbatch = current
                yield current
                current.is_stepped = True  # a step after the next batch is too late
                _require_loss(current)
                if current.is_last and not current.is_released:
                    raise LoopError("loop", f"no optimizer.step() after a batch. {_EVERY_BATCH}")
            self._record_step()
        self.end()

    def _to_read(self) -> Iterator[tuple[int, list[int]]]:
        """Yield a seed and the records of each microbatch, from lots that are drawn for it."""
        step = self.step
        while step < self.certified_steps:
            lot, _ = self._lots.at(step)
            for place, records in enumerate(lot):
                if len(records):
                    yield lot.seed_of_records(place), records.tolist()
            step = max(step + 1, self.step)  # lots without records may have passed

    def _microbatches_of(self, lot: Lot) -> Iterator[_Microbatch]:
        if not lot.microbatches:
            yield _Microbatch(batch=None, content=set(), records=0, is_last=True, has_loss=True)
        for place, records in enumerate(lot):
            batch = self._training.batch(lot, place, records)
            yield _Microbatch(
                batch=batch,
                content=_content(batch),
                records=len(records),
                is_last=place == lot.microbatches - 1,
            )

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        if hasattr(self.optimizer, "grad_scale"):
            raise LoopError(
                "loop",
                "a GradScaler took the step. Loss scaling has no effect, because each record's "
                "gradient is clipped: call run.loss(batch).backward() and optimizer.step() "
                "directly, and autocast to bfloat16.",
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        current = self._microbatch
        if current is None or current.is_stepped:
            raise LoopError("loop", f"optimizer.step() without a batch. {_EVERY_BATCH}")
        current.is_stepped = True
        _require_loss(current)
        with self._run.noting_strays():
            self._training.require_unchanged_model()
            self._private.require_no_gradients()
        if current.is_last:
            self._release()
            current.is_released = True  # not after a failure, or the step would be charged again
        return loss

    def _release(self) -> None:
        try:
            with self._run.noting_strays():
                self._training.require_unchanged_tensors()
                sums = self._training.reduce(self._private.sums())
                self._training.release(self.step, self._run.secrets.ratchet, sums)
        except Diverged:
            self._run.end("diverged")
            raise
        self._training.record_tensors()
        self._is_released = True

    def _record_step(self) -> None:
        """Record the last step, after schedulers have followed it."""
        if self._is_released:
            self._is_released = False  # also after a failure, which close would raise again
            with self._run.noting_strays():
                self._training.require_unchanged_tensors()
            assert self._outputs is not None  # the step was charged
            self._run.finish_step(self._lot_size, self._outputs)
            self._outputs = None

    def stop(self) -> None:
        """End the run after the current step; decide by released values only."""
        self._is_stopped = True

    def checkpoint(self) -> None:
        """Write a checkpoint after the current step, from which no step is lost.

        Raises ``LoopError`` in the middle of a lot.
        """
        if not self._is_released and self._outputs is not None:
            raise LoopError("loop", "pause and save only right after optimizer.step().")
        self._record_step()
        self._run.charge_step(lambda: True)

    def pause(self) -> None:
        """Write a checkpoint after the current step and close; ``private`` resumes from it.

        After the last step, the run ends. Raises ``LoopError`` in the middle of a lot.
        """
        if self.step == self.certified_steps:
            self.end()
            return
        self.checkpoint()
        self._microbatches.close()
        self.close()

    def end(self) -> Outcome:
        """Write the weights and the record's last line, and restore the model's own layers."""
        if self.outcome is None:
            is_complete = self.step == self.certified_steps
            self._record_step()
            self.outcome = self._run.end("completed" if is_complete else "stopped")
            self.close()
        return self.outcome

    def close(self) -> None:
        """Leave the run, which can be resumed from its last checkpoint."""
        for name in ("step", "_step_supports_amp_scaling"):
            self.optimizer.__dict__.pop(name, None)
        if not self._is_closed:
            self._is_closed = True
            self._records.close()
            try:
                self._record_step()
            finally:
                self._run.close()


def _require_loss(microbatch: _Microbatch) -> None:
    if not microbatch.has_loss:
        raise LoopError(
            "loop", f"a batch had no loss before the next one or the step. {_EVERY_BATCH}"
        )


def _require_loader(loader: Any) -> None:
    dataset = getattr(loader, "dataset", None)
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UnsupportedModel(
            "loader: its records have no indices, which drawing lots needs. Give a DataLoader of a "
            "map-style data set (__getitem__ and __len__)."
        )
    if loader.batch_size is None and loader.batch_sampler is None:
        raise UnsupportedModel(
            "loader: it makes no batches. Give it a batch_size, the size of a microbatch."
        )


def _require_optimizer(optimizer: torch.optim.Optimizer) -> None:
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise UnsupportedModel(
            f"optimizer: {type(optimizer).__name__} evaluates several gradients per step, but a "
            "step releases one. Use an optimiser that evaluates one, like SGD or AdamW."
        )


def _content(batch: Batch) -> set[Any]:
    """Return the identity and version of each tensor, and all other values."""
    if isinstance(batch, Tensor):
        return {(id(batch), batch._version)}
    if (parts := parts_of(batch)) is not None:
        return {item for part in parts for item in _content(part)}
    return {repr(batch)}


def _group_tensors(
    plan: Plan, model: nn.Module, blocks: Mapping[str, Sequence[str]] | None
) -> dict[str, tuple[Group, ...]]:
    """Group tensors by the patterns of each release; a single release has all trainable tensors."""
    names = [name for name, item in model.named_parameters() if item.requires_grad]
    releases = {release.name: release.count for release in plan.phases[0].releases}
    if blocks is None:
        if len(releases) > 1:
            raise UnsupportedModel(
                f"the plan releases {', '.join(releases)}: assign tensors to releases by "
                'patterns of names: blocks={"hidden": ["*.mlp.*.weight"], ...}.'
            )
        blocks = dict.fromkeys(releases, ("*",))
    result: dict[str, tuple[Group, ...]] = {}
    remaining = list(names)
    for release, patterns in blocks.items():
        matches = [n for n in remaining if any(fnmatchcase(n, pattern) for pattern in patterns)]
        remaining = [name for name in remaining if name not in matches]
        if releases.get(release, 1) == 1:
            result[release] = (Group(names=tuple(matches)),)
        else:
            result[release] = tuple(Group(names=(name,)) for name in matches)
    if remaining:
        raise UnsupportedModel(
            f"{', '.join(remaining)}: trainable, but matched by no pattern in blocks. Add or "
            "freeze it."
        )
    return result
