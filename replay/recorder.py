"""The record of one run: its events, the state at each release, what it printed and wrote.

Events are what the loop does with records and releases, in order: a pass over a loader begins, a
lot is read, a release gets its noise, a release is accounted. The first run stores its releases and
the states of the generators as arrays and bytes in its folder; later runs read them from there.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from affidavit.replay.arrays import array_of, leaves, with_leaves
from affidavit.replay.lines import LineTrace
from affidavit.replay.randomness import (
    generators_state,
    processor_seconds,
    seed_of_torch,
    set_generators,
)
from affidavit.replay.settings import Job
from affidavit.replay.stopping import redirect_output, stop

Event = dict[str, Any]
COMPUTED = "computed"
"""The file of a run's values that depend on their arguments alone."""
FEWEST_STEPS = 3
"""Of slow steps: the second pass over a loader begins after two."""
FEWEST_NOISELESS = 3
"""Releases in which a value equals its sum that show it to have no noise, not a tiny one."""
FEWEST_COMPARED = 6
SAME_DIRECTION = 0.999
"""Cosine of two releases' noise that shows them equal; of 6 independent values: 6e-8."""

LAST_STEP = "after the last step"
"""How a loop ends that ``EnoughSteps`` ends."""


class EnoughSteps(BaseException):
    """Ends the loop after the last release; no ``except Exception`` catches it."""


class Recorder:
    """Records one run; ``state`` returns digests of all values that persist."""

    def __init__(self, job: Job, lines: LineTrace) -> None:
        self.job, self.lines = job, lines
        self.events: list[Event] = []
        self.state: Callable[[], dict[str, str]] = dict
        self.value: Callable[[str], str] = str
        self.keep: Callable[[], None] = lambda: None
        self.releases = 0
        self.out = Path(job.out).resolve()
        self._first = None if job.first is None else Path(job.first)
        self._computed: dict[str, Any] = {}
        if self._first is not None:
            self._computed = pickle.loads((self._first / COMPUTED).read_bytes())
        self._points = 0
        self._began = math.inf
        self._seeds: list[int | None] = []
        self._drawn = ""
        self._noises: list[tuple[int, Any]] = []
        self._silent: dict[str, tuple[Any, Any]] = {}

    def add(self, kind: str, **values: Any) -> Event:
        """Record an event, with the line of the user's program that led to it."""
        event = {"kind": kind, "line": self.lines.current(), "at": self.lines.position(), **values}
        self.events.append(event)
        return event

    def stop(self) -> None:
        """Let this run stop here, and go on as each of those that continue it."""
        drawn = generators_state()
        self.job = stop(self.job)
        set_generators(drawn)  # a fork seeds Python's anew
        self.out = Path(self.job.out).resolve()
        redirect_output(self.job)
        self.watch_from(-1)

    def align_generators(self) -> None:
        """Store the generators' state, or set it to that of the first run at this point."""
        name = f"generators.{self._points}"
        self._points += 1
        self._seeds = self.seeds()
        if self._first is None:
            (self.out / name).write_bytes(generators_state())
        elif (stored := self._first / name).exists():
            set_generators(stored.read_bytes())

    def seeds(self) -> list[int | None]:
        """Return the seeds that PyTorch's global generator has had, before they were aligned."""
        seed = seed_of_torch()
        return self._seeds if seed in self._seeds[-1:] else [*self._seeds, seed]

    def begin_release(self) -> None:
        """Count a release, or end the loop after the last one."""
        if self.releases == self.job.steps or self._is_slow():
            raise EnoughSteps
        self.watch_from(self.releases)
        self.releases += 1
        self._drawn = hashlib.blake2b(generators_state(), digest_size=8).hexdigest()

    def _is_slow(self) -> bool:
        """Whether the steps after the first, which may compile, have taken too long."""
        if self.job.step_seconds is None:
            return False
        if self.releases == 1:
            self._began = processor_seconds()
        spent = processor_seconds() - self._began
        return self.releases >= FEWEST_STEPS and spent > self.job.step_seconds

    def watch_from(self, release: int) -> None:
        """Follow the job's value line by line, if it is to be watched from ``release`` on."""
        watch = self.job.watch
        if watch is not None and watch.release == release:
            self.lines.watch(lambda: self.value(watch.key))

    def marked_release(
        self, before: Any, after: Any, clip_norm: float, noise_multiplier: float | None
    ) -> Any:
        """Record a release that a line of the loop marks, and return what to continue with."""
        names, sums = zip(*((name, array_of(item)) for name, item in leaves(before)), strict=True)
        self.begin_release()
        first = self.release(
            origin="affidavit.release",
            names=names,
            sums=sums,
            noisy=[array_of(item) for _, item in leaves(after)],
            clip_norm=clip_norm,
            noise_std=None if noise_multiplier is None else noise_multiplier * clip_norm,
        )
        self.align_generators()
        return after if first is None else with_leaves(after, iter(first))

    def release(
        self,
        *,
        origin: str,
        names: Sequence[str],
        sums: Sequence[Any],
        noisy: Sequence[Any],
        clip_norm: float | Sequence[float],
        noise_std: float | None,
        parts: list[list[float]] | None = None,
    ) -> list[Any] | None:
        """Record a release with its noise; arrays have the shapes of the tensors.

        ``clip_norm`` is that of all tensors together, or one for each. ``parts`` has, for each
        record of the batch, the norms of what it adds to the tensors, in clip norms. Returns the
        noisy arrays of the first run to put in place of these, or None in the first run or after
        runs part.
        """
        number = self.releases - 1
        self.keep()
        event = self.add(
            "release",
            origin=origin,
            names=list(names),
            clip_norm=clip_norm if isinstance(clip_norm, float) else list(clip_norm),
            noise_std=noise_std,
            parts=parts,
            drawn=self._drawn,
            state=self.state(),
        )
        if self._first is None:
            np.savez(self.out / f"sums.{number}.npz", *sums)
            np.savez(self.out / f"noisy.{number}.npz", *noisy)
            noise = [
                after.astype(float) - before for before, after in zip(sums, noisy, strict=True)
            ]
            event["noise"] = [[float((item**2).sum()), item.size] for item in noise]
            event["noiseless"] = self._without_noise(names, sums, noise)
            event["noise_equals"] = self._equal_release(noise, number)
            return None
        path = self._first / f"sums.{number}.npz"
        if not path.exists():
            return None
        first = list(np.load(path).values())
        if [item.shape for item in first] != [item.shape for item in sums]:
            return None
        event["distances"] = _distances(first, sums)
        at = self.job.neighbour
        if at is not None and at.kind == "removed":
            np.savez(self.out / path.name, *sums)
        elif self.job.removed is not None and (path := Path(self.job.removed, path.name)).exists():
            event["distances_to_removed"] = _distances(np.load(path).values(), sums)
        return list(np.load(self._first / f"noisy.{number}.npz").values())

    def repeated(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        """Return ``value`` in the first run, and in others what it was in the first."""
        path = (self._first or self.out) / f"{name}.{self._points}.json"
        if self._first is None:
            path.write_text(json.dumps(value))
        return {**value, **json.loads(path.read_text())} if path.exists() else value

    def once(self, key: str, compute: Callable[[], Any]) -> Any:
        """Return a function's value for the arguments in ``key``, from the first run if it has it.

        Its warnings are given again. Its lines are not traced.
        """
        if key not in self._computed:
            with self.lines.paused(), warnings.catch_warnings(record=True) as caught:
                value = compute()
            self._computed[key] = (
                value,
                [(item.message, item.category, item.filename, item.lineno) for item in caught],
            )
        value, caught_before = self._computed[key]
        for warning in caught_before:
            warnings.warn_explicit(*warning)
        return value

    def _without_noise(
        self, names: Sequence[str], sums: Sequence[Any], noise: Sequence[Any]
    ) -> list[tuple[str, int]]:
        """Return how many values of which tensors had no noise in any release, if some had none.

        Values that are always zero, such as those of a mask, need none.
        """
        shown: list[tuple[str, int]] = []
        for name, before, added in zip(names, sums, noise, strict=True):
            silent, is_used = added == 0, before != 0
            earlier = self._silent.get(name)
            if earlier is not None and earlier[0].shape == silent.shape:
                silent, is_used = silent & earlier[0], is_used | earlier[1]
            self._silent[name] = silent, is_used
            if self.releases >= FEWEST_NOISELESS and (count := int((silent & is_used).sum())):
                shown.append((name, count))
        return shown

    def _equal_release(self, noise: Sequence[Any], number: int) -> int | None:
        """Return an earlier release with the same noise, or a multiple of it, or None."""
        flat = np.concatenate([item.ravel() for item in noise]) if noise else np.zeros(0)
        length = float(np.linalg.norm(flat))
        if flat.size < FEWEST_COMPARED or not length:
            return None
        for earlier, other in self._noises:
            if other.shape == flat.shape and abs(float(flat @ other)) / length > SAME_DIRECTION:
                return earlier
        self._noises.append((number, flat / length))
        return None

    def write(self, **values: Any) -> None:
        """Write the record as JSON."""
        record = {
            "events": self.events,
            "releases": self.releases,
            "seconds": processor_seconds(),
            "lines": self.lines.to_json(),
            **values,
        }
        if self._first is None:
            (self.out / COMPUTED).write_bytes(pickle.dumps(self._computed))
        (self.out / "record.json").write_text(json.dumps(record))


def _distances(sums: Iterable[Any], others: Iterable[Any]) -> list[float]:
    return [
        float(np.linalg.norm((one.astype(float) - other).ravel()))
        for one, other in zip(sums, others, strict=True)
    ]
