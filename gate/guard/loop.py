"""``Guard``: any training loop, held to a certificate by what it says before each release.

    run = Guard(certificate="bundle.json", plan="plan.yaml", sampler="poisson", dataset_size=1438,
                lot_size=64, blocks={"all": parameters}, generator="chacha20")
    ...
    run.step(clip_norm=1.0, noise_multiplier=1.1, sums=sums, released=noisy)

stand where a run begins and, in the loop, between drawing the noise and using it. What is said
is compared with the certificate; ``sums`` (clipped, before noise) and ``released`` (after it),
by tensor, let the guard see that every tensor has its noise. Where they are left out the
noise is only declared, and ``notes`` says so. A right run is stopped with a probability of
at most 1e-12 (``affidavit.gate.guard.watching``). No framework is imported.

The record is finished by ``close``, at the end of a ``with`` block, or when the process ends.
"""

from __future__ import annotations

import atexit
import hashlib
import math
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from affidavit.certificate import StepRequirement, VerificationOptions
from affidavit.gate.guard.arrays import digest_of_arrays, noise_in, shape_of
from affidavit.gate.guard.blocks import entries_of, require_tensors
from affidavit.gate.guard.bound import Bound, Certificate, Keys, bind
from affidavit.gate.guard.holding import require_public, std_of
from affidavit.gate.guard.record import RunRecord
from affidavit.gate.guard.stopping import GuardStop, Stops
from affidavit.gate.guard.watching import NoiseWatch
from affidavit.plan import Plan, exactly

Amount = float | Mapping[str, float]
"""One number for every release of the plan, or one by the release's name."""


class Guard:
    """One guarded run; every method raises ``GuardStop`` where it must not go on.

    ``blocks`` has, by release of the plan, its trainable tensors by name: all that are updated,
    each once. ``generator`` names what lots and noise are drawn from, one name or
    ``{"sampling": ..., "noise": ...}``; conformance accepts ``chacha20``.
    """

    def __init__(
        self,
        *,
        certificate: Certificate,
        plan: str | Path | Plan,
        sampler: str,
        dataset_size: int,
        blocks: Mapping[str, Mapping[str, Any]],
        generator: str | Mapping[str, str],
        lot_size: int | None = None,
        probability: float | None = None,
        keys: Keys = None,
        record: str | Path = "run",
        demands: VerificationOptions | None = None,
        now: datetime | None = None,
    ) -> None:
        self._stops, self._watch, self._open = Stops(), NoiseWatch(), False
        self._keys: set[str] = set()
        self.notes: tuple[str, ...] = ()
        with self._stops.guarded():
            self.bound = bind(certificate, plan=plan, keys=keys, demands=demands, now=now)
            _require_sampler(self.bound, sampler, dataset_size, lot_size, probability)
            self._tensors = require_tensors(self.bound, blocks)
            drawn_from = _generators(generator)
            if set(drawn_from.values()) != {"chacha20"}:
                self._note(
                    "lots and noise are not said to come from chacha20: conformance will say "
                    "statistical_generator."
                )
            self._arrays = {name: array for of in blocks.values() for name, array in of.items()}
            self._record = RunRecord(Path(record))
            self._record.begin(
                self.bound,
                loop="own",
                generator=drawn_from,
                tensors=entries_of(
                    self.bound,
                    {name: shape_of(array) for name, array in self._arrays.items()},
                    self._tensors,
                ),
                parameters=digest_of_arrays(self._arrays),
            )
        self._process = os.getpid()
        atexit.register(self._finish)

    @property
    def steps_left(self) -> int:
        """How many releases the certificate still allows."""
        return self.bound.execution.steps - self._record.charged

    def step(
        self,
        *,
        clip_norm: Amount,
        noise_multiplier: Amount | None = None,
        noise_std: Amount | None = None,
        divisor: float | None = None,
        sums: Mapping[str, Any] | None = None,
        released: Mapping[str, Any] | None = None,
        key: bytes | None = None,
    ) -> None:
        """One release, said before it is used; returns if it may be.

        ``noise_multiplier`` is σ of the clip norm given, or ``noise_std`` σC on the sum.
        ``divisor`` is what the sum is divided by, if not the plan's B. ``key`` is the key, or
        the state of the generator, that this release's noise came from; it is committed to
        and never written.
        """
        with self._stops.guarded():
            self._close_release(None)
            required = self._next()
            names = required.clip_norm.keys()
            clips = _by_release("clip_norm", clip_norm, names)
            stds = _stds(clips, noise_multiplier, noise_std, names)
            require_public(required, clip_norm=clips, noise_std=stds, divisor=divisor)
            commitment = self._committed(key)
            self._see(stds, sums, released)
            self._record.charge(
                self.bound, required, clip_norm=clips, noise_std=stds, commitment=commitment
            )
            self._open = True

    def close(self) -> None:
        """The last update was made; the record of a whole run gets its last line."""
        with self._stops.guarded():
            atexit.unregister(self._finish)
            whole = self._record.charged == self.bound.execution.steps
            digest = digest_of_arrays(self._arrays) if whole else None
            self._close_release(digest)
            if whole:
                self._record.end(digest)
            self._record.close()

    def _finish(self) -> None:
        if self._stops.reason is None and os.getpid() == self._process:
            self.close()

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            atexit.unregister(self._finish)
            self._record.close()

    def _next(self) -> StepRequirement:
        if self.steps_left <= 0:
            raise GuardStop(
                "too_many_steps",
                f"the {self.bound.execution.steps} certified steps were taken.",
                "Certify a plan with more steps, and begin a run of its own.",
            )
        return self.bound.execution.at(self._record.charged)

    def _close_release(self, digest: str | None) -> None:
        if self._open:
            self._record.release(digest)
            self._open = False

    def _committed(self, key: bytes | None) -> str:
        if key is None:
            return f"undisclosed:{self._record.charged}"
        found = "sha256:" + hashlib.sha256(b"affidavit commitment " + key).hexdigest()
        if found in self._keys:
            raise GuardStop(
                "noise_repeated",
                "this release's noise is drawn from a key that was used already.",
                "Draw a new key for every release.",
            )
        self._keys.add(found)
        return found

    def _see(
        self,
        stds: Mapping[str, float],
        sums: Mapping[str, Any] | None,
        released: Mapping[str, Any] | None,
    ) -> None:
        if sums is None or released is None:
            if sums is not released:
                raise GuardStop(
                    "bad_argument", "sums and released go together.", "Give both, or neither."
                )
            self._note("the noise of some releases was declared, and not seen.")
            return
        missing = sorted(self._tensors.keys() - (sums.keys() & released.keys()))
        if missing:
            raise GuardStop(
                "tensor_not_noised",
                f"{', '.join(missing)}: no noisy sum is given, and the tensor is trained.",
                "Release every trainable tensor with noise, or freeze it.",
            )
        self._watch.see(
            {
                name: (noise_in(released[name], sums[name]), stds[release])
                for name, release in self._tensors.items()
            }
        )

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes = (*self.notes, note)


def _by_release(what: str, said: Amount, names: Any) -> dict[str, float]:
    given = dict(said) if isinstance(said, Mapping) else dict.fromkeys(names, said)
    if given.keys() != set(names):
        raise GuardStop(
            "other_blocks",
            f"{what} is given for {', '.join(sorted(given)) or 'nothing'}; the plan releases "
            f"{', '.join(sorted(names))}.",
            "Give one number, or one for each release of the plan.",
        )
    for name, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise GuardStop(
                "bad_argument", f"{what} of {name} is {value!r}.", "Give a positive number."
            )
    return {name: float(value) for name, value in given.items()}


def _stds(
    clips: Mapping[str, float], multiplier: Amount | None, std: Amount | None, names: Any
) -> dict[str, float]:
    if (multiplier is None) == (std is None):
        raise GuardStop(
            "bad_argument", "noise_multiplier or noise_std says the noise.", "Give one of them."
        )
    if std is not None:
        return _by_release("noise_std", std, names)
    assert multiplier is not None
    sigmas = _by_release("noise_multiplier", multiplier, names)
    return {name: std_of(sigma, clips[name]) for name, sigma in sigmas.items()}


def _require_sampler(
    bound: Bound, sampler: str, size: int, lot_size: int | None, probability: float | None
) -> None:
    certified = bound.phase.sampling.scheme
    if sampler != certified:
        raise GuardStop(
            "other_sampler",
            f"lots are drawn by {sampler}, and {certified} was certified.",
            "Draw lots as certified, or certify the sampler that you have.",
        )
    if size != bound.plan.dataset.size:
        raise GuardStop(
            "dataset_size",
            f"the data has {size} records, and {bound.plan.dataset.size} were certified.",
            "Give the data that was meant, or certify the plan for this size.",
        )
    if lot_size is None and probability is None and certified != "full_batch":
        raise GuardStop(
            "bad_argument", "nothing says how large lots are.", "Give lot_size or probability."
        )
    for what, said, right in (
        ("lot_size", lot_size, bound.divisor),
        ("probability", probability, bound.probability),
    ):
        if said is None:
            continue
        if abs(exactly(float(said)) - right) > right / 10**12:
            raise GuardStop(
                "other_probability",
                f"{what} is {said}, and {float(right):g} was certified.",
                "Draw lots as certified, or certify the plan for these.",
            )


def _generators(said: str | Mapping[str, str]) -> dict[str, str]:
    found = {"sampling": said, "noise": said} if isinstance(said, str) else dict(said)
    if found.keys() != {"sampling", "noise"}:
        raise GuardStop(
            "bad_argument",
            "generator says what sampling and noise are drawn from.",
            'Give one name, or {"sampling": ..., "noise": ...}.',
        )
    return found
