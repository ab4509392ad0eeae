"""Your own loop: it gets the certified lots, and noise is added where it updates.

``private`` takes a model, an optimiser and a loader, and returns a run to loop over. Its batches
are the microbatches of the certified lots, whatever the loader's own order; ``run.loss`` is the
mean of per-record losses to call ``backward`` on; ``optimizer.step()`` does nothing until a lot
is complete, and then updates with its noisy mean: a loop with gradient accumulation is the same.
A lot without records is noise alone: the run takes that step itself. The scale of the loss has
no meaning, because every record's gradient is taken of its own loss before it is clipped: a mean, a
sum or a division for accumulation trains the same.

Guarantees
    * What the optimiser sees are noisy means of whole lots, one for each step that was charged.
    * A loop that leaves a batch out, or steps twice, is stopped before anything is released.
    * A loop that changes trained tensors by anything else than the run's steps is stopped.
    * A loop that logs or schedules by the loss of ``run.loss`` reveals nothing: it is 0.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from inspect import GEN_CLOSED, Parameter, getgeneratorstate, signature
from pathlib import Path
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from affidavit.certificate import MAX_BYTES, PublicKey, TrustRoot
from affidavit.mechanisms import read_plan
from affidavit.plan import Plan, read_limited
from affidavit.trainer.adapters import Batch, Group, digest_of_tensors, parts_of, picked_records
from affidavit.trainer.clipping.probe import PROBE_SEEDS, fixed_draws, random_state
from affidavit.trainer.distributed.peers import Peers
from affidavit.trainer.errors import Diverged, MixedRecords, RunFailure, UnsupportedModel
from affidavit.trainer.loop import Due, Outcome, Run
from affidavit.trainer.run_config import bind
from affidavit.trainer.settings import Settings, Supervision

Losses = Callable[[nn.Module, Batch], Tensor]
"""From the model and a batch to one loss for each of its records, shape (n,)."""


_EVERY_BATCH = (
    "Call run.loss(batch).backward() and then optimizer.step() once for every batch of the run, "
    "before the next is fetched. A step gathers its microbatches itself: set a framework's "
    "accumulation of gradients to 1."
)


class LoopError(RunFailure):
    """The loop did not do what a step needs; nothing was released."""


class _Records:
    """A map-style data set as the trainer's data."""

    def __init__(self, loader: DataLoader[Any], digest: str | None) -> None:
        self._dataset: Any = loader.dataset
        self._collate: Any = loader.collate_fn
        self._digest = digest

    @property
    def digest(self) -> str:
        """Over every record's tensors, unless the digest was said."""
        if self._digest is None:
            with fixed_draws(0):
                parts = [_digest(self._batch([place])) for place in range(len(self))]
            content = "".join(parts).encode()
            self._digest = digest_of_tensors(
                torch.frombuffer(bytearray(content), dtype=torch.uint8)
            )
        return self._digest

    def __len__(self) -> int:
        return len(self._dataset)

    def collate(self, indices: Tensor) -> Batch:
        """The records at ``indices``, shape (n,), by the loader's ``collate_fn``."""
        return self._batch(indices.tolist())

    def unlike(self) -> Tensor:
        """The numbers of three of the first records, the largest last; shape (3,)."""
        with fixed_draws(0):
            sizes = [
                sum(item.numel() for item in _tensors(self._batch([place])))
                for place in range(min(64, len(self)))
            ]
        order = torch.tensor(sizes).argsort(stable=True)
        return order[[0, len(order) // 2, -1]] if len(order) > 2 else order

    def drawn_alike(self, indices: Tensor, seed: int = 0) -> Batch:
        """As ``collate``, where a record draws the same wherever it stands; shape (n,)."""
        items = self._items(indices)
        with fixed_draws(seed):
            batch: Batch = self._collate(items)
        return batch

    def collate_draws(self, indices: Tensor) -> bool:
        """Whether ``collate_fn`` draws random numbers for these records; shape (n,)."""
        items = self._items(indices)
        with fixed_draws(0):
            before = random_state()
            self._collate(items)
            return bool(random_state() != before)

    def _items(self, indices: Tensor) -> list[Any]:
        items = []
        for place in indices.tolist():
            with fixed_draws(place):
                items.append(self._dataset[place])
        return items

    def _batch(self, places: Sequence[int]) -> Batch:
        return self._collate([self._dataset[place] for place in places])


class _Module:
    """A model and its losses as the trainer's model."""

    def __init__(
        self,
        module: nn.Module,
        losses: Losses,
        blocks: dict[str, tuple[Group, ...]],
        example: Batch,
    ) -> None:
        self.module, self._losses, self._blocks, self._example = module, losses, blocks, example

    def losses(self, batch: Batch) -> Tensor:
        """The loss of each record, shape (n,)."""
        return self._losses(self.module, batch)

    def blocks(self) -> Mapping[str, Sequence[Group]]:
        """The groups of every release, by the release's name."""
        return self._blocks

    def made_up(self, records: int) -> Batch:
        """The example, of which the trainer takes the first ``records``."""
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
    trusted: Iterable[PublicKey] | None = None,
    users: Sequence[Hashable] | Tensor | None = None,
    example: Batch | None = None,
    digest: str | None = None,
    resume: bool | None = None,
    settings: Settings | None = None,
    peers: Peers | None = None,
) -> PrivateRun:
    """A run of ``plan`` as ``certificate`` certifies it, for your own loop.

    ``optimizer`` may be any that updates the model's trainable tensors; None is the plan's own,
    ``run.optimizer``. Microbatches have the loader's ``batch_size``, its data set and its
    ``collate_fn``; its sampler is not used. ``blocks`` has name patterns for every release of a
    plan with several; a release of ``count`` above 1 has a block for each tensor. ``trusted``
    are the keys that may certify, your own unless said. ``users``, of shape (N,), says whose
    each record is, for a plan of users with several records. ``example`` is a batch of at least
    three records to probe the model with, the first of the data unless said, and ``digest`` says
    which data this is. A run that is in ``out`` goes on unless ``resume`` is false.

    Raises ``NotCertified``, ``RunFailure``, ``UnsupportedModel`` and ``MixedRecords``.
    """
    _require_loader(loader)
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
    records = _Records(loader, digest)
    config = bind(
        bundle,
        TrustRoot([], [], None).public_keys() if trusted is None else trusted,
        plan,
        records=len(records),
        most_of_a_user=None if users is None else _most_of_a_user(users, len(records)),
    )
    if settings is None:
        settings = Settings(device=_device_of(model).type, microbatch=loader.batch_size or 64)
    collated: Callable[[Tensor], Batch] | None = None
    if example is None:
        example, collated = _example(records)
    adapter = _Module(model, losses, _groups(config.plan, model, blocks), example)
    run = Run(
        config=config,
        model=adapter,
        data=records,
        settings=settings,
        peers=peers or Peers.join(settings.device_type),
        quiet=True,
        entropy=os.urandom,
        supervision=Supervision(),
        optimizer=optimizer,
        collated=collated,
    )
    return PrivateRun(run, adapter, Path(out), resume)


def _most_of_a_user(users: Sequence[Hashable] | Tensor, records: int) -> int:
    """The most records of one of ``users``, which has one entry for each record."""
    named = users.tolist() if isinstance(users, Tensor) else users
    if len(named) != records:
        raise UnsupportedModel(
            f"users: {len(named)} entries for {records} records. Name the user of each record."
        )
    return max(Counter(named).values())


def _example(records: _Records) -> tuple[Batch, Callable[[Tensor], Batch] | None]:
    """Three records, and what makes batches of fewer, to compare them with; where that may differ.

    A ``collate_fn`` that draws gives other batches other draws. What it makes of two records must
    then be the same whichever is the third. Raises ``MixedRecords`` and ``UnsupportedModel``.
    """
    places = records.unlike()
    example = records.drawn_alike(places)
    records.drawn_alike(places.flip(0))  # so that others were read before
    if _digest(example) != _digest(records.drawn_alike(places)):
        raise UnsupportedModel(
            "loader: a record is not the same twice although random, numpy.random and torch draw "
            "the same: its data set keeps state of what was read, or draws from a generator of its "
            "own. Draw from torch's, or draw in losses; or give private an example and a digest."
        )
    if len(places) < 3 or not records.collate_draws(places):
        return example, lambda rows: records.drawn_alike(places[rows])
    pair = torch.arange(2)
    if _widths(records.drawn_alike(places[pair])) != _widths(example):
        raise UnsupportedModel(
            "loader: its collate_fn draws random numbers and pads to the longest record, so "
            "the padding cannot be told from the draws. Pad to a fixed length, or draw in the data "
            "set or in losses; or give private an example."
        )
    for seed in range(PROBE_SEEDS):
        one, other = (
            _digest(picked_records(records.drawn_alike(places[[0, 1, third]], seed), pair))
            for third in (0, 1)
        )
        if one != other:
            raise MixedRecords(
                "loader: what collate_fn makes of two records changes with the third: it mixes "
                "records (mixup, CutMix, statistics of a batch). Change each record on its own."
            )
    return example, None


def _digest(batch: Batch) -> str:
    return digest_of_tensors(*_tensors(batch))


def _widths(batch: Batch) -> list[torch.Size]:
    """The shapes of a batch but for the number of records."""
    return [item.shape[1:] for item in _tensors(batch)]


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


class PrivateRun:
    """A run that a loop goes through; ``optimizer`` updates, ``guarantee`` is of the whole run.

    Its length is the steps that are left; a step may have several microbatches, or none.
    """

    def __init__(self, run: Run, model: _Module, out: Path, resume: bool | None) -> None:
        self._run, self._model = run, model
        try:
            self._begun = run.entered(out, resume=resume)
        except BaseException:
            run.close()
            raise
        self._training, self._private = self._begun.training, self._begun.training.private
        self._secrets, self.step = self._begun.secrets, self._begun.first
        self.outcome: Outcome | None = None
        self.guarantee = run.config.summary
        self._device = _device_of(model.module)
        self.optimizer = self._training.optimizer
        # A scheduler wraps the function of this method, and binds it to the optimiser again.
        step = MethodType(lambda _, closure=None: self._step(closure), self.optimizer)
        # A scheduler that is older would warn that it does not see the steps.
        step.__func__._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self.optimizer.step = step  # type: ignore[method-assign]  # until close
        # So that GradScaler calls it, instead of failing over gradients that are not there yet.
        self.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._records = 0
        self._handed: tuple[Batch, set[Any]] = None, set()
        self._lossless: tuple[int, bool] | None = None  # how many records, and whether made up
        self._due: Due | None = None
        self._over: tuple[int, Due] | None = None
        self._open, self._ready, self._stopped = False, False, False
        self._closed, self._stream = False, self._batches()

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        """Itself: copies of a model that has it, averages of its weights for one, share the run."""
        return self

    def __len__(self) -> int:
        return self._run.config.execution.steps - self._begun.first

    def keep(self, **items: Any) -> None:
        """Save the state of schedulers and the like in checkpoints, and restore it on resuming."""
        for name, item in items.items():
            self._training.keep(name, item)

    def accept_weights(self) -> None:
        """Train on from the weights as they are, which the loop changed since ``optimizer.step()``.

        They must be made of released and public values alone: clipped, averaged, from a server.
        """
        self._training.record_tensors()

    def loss(self, batch: Batch) -> Tensor:
        """Take and clip the gradients of ``batch``'s records; ``backward`` is for the loop's sake.

        The result is 0, of shape (): the mean loss of private records is shown only with
        ``Settings.show_private``. No other loss can take part, and ``backward`` has nothing left to
        do. Raises ``LoopError`` outside of a batch, for one that the loop changed, and where the
        model has moved to another device, and ``MixedRecords`` and ``UnsupportedModel`` as the
        model does.
        """
        if self._lossless is None:
            raise LoopError(
                "loop", "call run.loss once for every batch of the run, inside its loop."
            )
        records, idle = self._lossless
        if not _content(batch) <= self._handed[1]:
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
        self._training.require_unchanged_model()
        self._model.module.zero_grad()
        self._lossless = None
        try:
            losses = self._private.accumulate(
                lambda: self._model.losses(batch), records=records, idle=idle
            )
        except Exception:
            self._lossless = records, idle  # a loop may catch it, and step
            raise
        shown = losses.mean() if self._run.shows_private else losses.new_zeros(())
        return shown.requires_grad_()

    def __iter__(self) -> Iterator[Batch]:
        """Every microbatch of every step that is left, whoever asks: there is one stream of them.

        Raises ``LoopError`` and ``Diverged``.
        """
        if not self._closed and getgeneratorstate(self._stream) == GEN_CLOSED:
            raise LoopError(
                "loop",
                f"a failure ended the loop at step {self.step}. Call run.close(), and private "
                "again, which resumes the run.",
            )
        return self._stream

    def _batches(self) -> Generator[Batch]:
        steps = self._run.config.execution.steps
        self.accept_weights()
        while self.step < steps and not self._stopped:
            self._due = self._run.charged(
                self._training, self.step, self._secrets, lambda: self._stopped
            )
            self._private.clear_sums()
            lot, self._records = self._training.lot(self.step, self._secrets.ratchet)
            last = lot.microbatches - 1
            for place, records in enumerate(lot):
                batch = self._training.batch(lot, place, records)
                self._lossless = max(1, len(records)), not len(records)
                self._handed = batch, _content(batch)
                self._open, self._ready = True, place == last
                yield batch
                self._close_microbatch()
                if self._ready:
                    raise LoopError("loop", f"no optimizer.step() after a batch. {_EVERY_BATCH}")
            if last < 0:
                self._release()
            self._say()
        self.end()

    def _close_microbatch(self) -> None:
        self._open = False
        if self._lossless is not None:
            raise LoopError(
                "loop", f"a batch had no loss before the next one or the step. {_EVERY_BATCH}"
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
        if not self._open:
            raise LoopError("loop", f"optimizer.step() without a batch. {_EVERY_BATCH}")
        self._close_microbatch()
        self._training.require_unchanged_model()
        self._private.require_no_gradients()
        if self._ready:
            self._release()
            self._ready = False  # not after a failure, or the step would be charged again
        return loss

    def _release(self) -> None:
        due = self._due
        assert due is not None  # nobody asked to stop before the step
        self._training.require_unchanged_tensors()
        try:
            sums = self._training.reduce(self._private.sums())
            self._training.release(self.step, self._secrets.ratchet, sums)
        except Diverged:
            self._run.ended_by("diverged", self._training)
            raise
        self._training.record_tensors()
        self._over = self.step, due
        self.step += 1

    def _say(self) -> None:
        """Write what the last step came to, once schedulers have followed it."""
        if self._over is not None:
            self._training.require_unchanged_tensors()
            (step, due), self._over = self._over, None
            self._secrets = self._run.taken(self._training, step, self._records, self._secrets, due)

    def stop(self) -> None:
        """End the run after the current step; decide by released values only."""
        self._stopped = True

    def pause(self) -> None:
        """Write a checkpoint after the current step and close; ``private`` resumes from it.

        After the last step the run ends. Raises ``LoopError`` in the middle of a lot.
        """
        if self.step == self._run.config.execution.steps:
            self.end()
            return
        if self._over is None and self._due is not None:
            raise LoopError("loop", "pause only right after optimizer.step().")
        self._say()
        self._run.charged(self._training, self.step, self._secrets, lambda: True)
        self._stream.close()
        self.close()

    def end(self) -> Outcome:
        """Write the weights and the record's last line; the model gets its own layers back."""
        if self.outcome is None:
            steps = self._run.config.execution.steps
            ended = "completed" if self.step == steps else "stopped"
            self._say()
            self.outcome = self._run.ended_by(ended, self._training)
            self.close()
        return self.outcome

    def close(self) -> None:
        """Leave the run where it is, to be resumed from its last checkpoint."""
        for name in ("step", "_step_supports_amp_scaling"):
            self.optimizer.__dict__.pop(name, None)
        if not self._closed:
            self._closed = True
            try:
                self._say()
            finally:
                self._run.close()


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


def _tensors(batch: Batch) -> list[Tensor]:
    if isinstance(batch, Tensor):
        if batch.is_nested:
            raise UnsupportedModel(
                "loader: its batches have nested tensors, which cannot be split into records. Pad "
                "them in collate_fn."
            )
        return [batch]
    if (parts := parts_of(batch)) is not None:
        return [item for part in parts for item in _tensors(part)]
    return [torch.tensor(list(repr(batch).encode()), dtype=torch.uint8)]


def _content(batch: Batch) -> set[Any]:
    """Which tensors these are, and how often they were written to; whatever else is in it."""
    if isinstance(batch, Tensor):
        return {(id(batch), batch._version)}
    if (parts := parts_of(batch)) is not None:
        return {item for part in parts for item in _content(part)}
    return {repr(batch)}


def _groups(
    plan: Plan, model: nn.Module, blocks: Mapping[str, Sequence[str]] | None
) -> dict[str, tuple[Group, ...]]:
    """Blocks by the patterns of every release; a release alone has every trainable tensor."""
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
    left = list(names)
    for release, patterns in blocks.items():
        mine = [name for name in left if any(fnmatchcase(name, pattern) for pattern in patterns)]
        left = [name for name in left if name not in mine]
        if releases.get(release, 1) == 1:
            result[release] = (Group(names=tuple(mine)),)
        else:
            result[release] = tuple(Group(names=(name,)) for name in mine)
    if left:
        raise UnsupportedModel(
            f"{', '.join(left)}: trainable, but matched by no pattern in blocks. Add or freeze it."
        )
    return result
