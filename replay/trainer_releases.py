"""The releases of Affidavit's own trainer: ``affidavit.trainer.private``.

A release has one array for each clipping block, in units of its noise's standard deviation, since
each block has a clip norm of its own. Of correlated noise only the sensitivity is tested. The run's
digest of its data and the commitments in its record are salted, which hides what they are of; all
runs of a replay have the same salt, so these are left out. Checkpoints that are due by the clock
are not written: a thread writes them, and how long it takes differs.
"""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import replace
from typing import Any

import numpy as np

from affidavit.plan import schedule
from affidavit.replay.arrays import array_of
from affidavit.replay.datasets import Records
from affidavit.replay.recorder import Recorder

FIXED_DIGEST = "sha256:" + "0" * 64


def install(recorder: Recorder, records: Records) -> None:
    """Record the releases and lots of the trainer from now on."""
    state = importlib.import_module("affidavit.trainer.steps.training_state").TrainingState
    noise = importlib.import_module("affidavit.trainer.noise.source").NoiseSource
    loaded = importlib.import_module("affidavit.trainer.data.loaded_records").LoadedRecords
    storage = importlib.import_module("affidavit.trainer.run_folder.checkpoint_storage")
    writer: Any = importlib.import_module("affidavit.trainer.run_folder.run_writer")
    writer.commitment_to = lambda *_: FIXED_DIGEST
    _watch_records(loaded, records)
    _watch_lots(state, records)
    _schedule_by_steps(storage.CheckpointSchedule)
    current: list[Any] = []
    release, add_to, counts = state.release, noise.add_to, state._noisy_counts

    @functools.wraps(release)
    def releasing(owner: Any, step: int, *args: Any, **kwargs: Any) -> None:
        records.add_trained_lot(step)
        recorder.begin_release()
        current[:] = [owner, owner._requirement(step)]
        release(owner, step, *args, **kwargs)
        recorder.align_generators()

    @functools.wraps(add_to)
    def adding(owner: Any, sums: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        before = {name: array_of(item) for name, item in sums.items()}
        add_to(owner, sums, *args, **kwargs)
        if current:
            training, required = current
            current.clear()
            _replace(sums, _record(recorder, training, required, before, sums))

    @functools.wraps(counts)
    def counting(owner: Any, adaptation: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        result: dict[str, float] = counts(owner, adaptation, *args, **kwargs)
        return recorder.repeated("noisy counts", result)

    state.release, noise.add_to, state._noisy_counts = releasing, adding, counting


def _watch_records(loaded: Any, records: Records) -> None:
    init = loaded.__init__

    @functools.wraps(init)
    def noting(owner: Any, loader: Any, digest: str | None, *args: Any) -> None:
        init(owner, loader, digest or FIXED_DIGEST, *args)
        records.mark_private(loader.dataset)

    loaded.__init__ = noting


def _watch_lots(state: Any, records: Records) -> None:
    """Note lots, thin them to a part of one microbatch, and mask the removed record in them."""
    draw = state.draw

    @functools.wraps(draw)
    def drawing(owner: Any, step: int, ratchet: Any) -> Any:
        lot, _ = draw(owner, step, ratchet)
        places = lot.records.tolist()
        dataset = getattr(owner._data, "_dataset", owner._data)
        plan = owner._config.plan
        phase = plan.phases[owner._requirement(step).phase]
        is_poisson = phase.sampling.scheme == "poisson"
        rate = float(schedule.sampling_probability(plan, phase)) if is_poisson else None
        rows = records.trained_lot(dataset, step, places, owner._settings.microbatch, rate)
        return replace(lot, records=lot.records[rows]), len(rows)

    state.draw = drawing


def _schedule_by_steps(schedule: Any) -> None:
    due = schedule.due

    @functools.wraps(due)
    def by_steps(owner: Any, done: int) -> bool:
        return owner._every is not None and bool(due(owner, done))

    schedule.due = by_steps


def _record(
    recorder: Recorder, training: Any, required: Any, before: dict[str, Any], sums: dict[str, Any]
) -> dict[str, Any] | None:
    """Record a release, and return the noisy sums of the first run, or None in the first run."""
    blocks = {entry["name"]: entry["block"] for entry in training.layout.as_entries()}
    scales = {name: item.scale for name, item in training.layout.noise(required).items()}
    norms = {spec.name: spec.clip_norm for spec in training.private.specs}
    groups: dict[str, list[str]] = {}
    for name in before:
        groups.setdefault(blocks[name], []).append(name)
    stds = {block: scales[names[0]] for block, names in groups.items()}

    def joined(arrays: dict[str, Any]) -> list[Any]:
        return [
            np.concatenate([arrays[name].astype(float).ravel() for name in names]) / stds[block]
            for block, names in groups.items()
        ]

    independent = training._config.strategies[required.phase] is None
    first = recorder.release(
        origin="affidavit.trainer",
        names=[f"{block} ({', '.join(names)})"[:200] for block, names in groups.items()],
        sums=joined(before),
        noisy=joined({name: array_of(item) for name, item in sums.items()}),
        clip_norm=[norms[block] / stds[block] for block in groups],
        noise_std=1.0 if independent else None,
    )
    if first is None:
        return None
    result: dict[str, Any] = {}
    for (block, names), values in zip(groups.items(), first, strict=True):
        ends = np.cumsum([math.prod(before[name].shape) for name in names])
        parts = np.split(values * stds[block], ends[:-1])
        result |= {
            name: part.reshape(before[name].shape) for name, part in zip(names, parts, strict=True)
        }
    return result


def _replace(sums: dict[str, Any], arrays: dict[str, Any] | None) -> None:
    for name, array in (arrays or {}).items():
        sums[name].copy_(sums[name].new_tensor(array))
