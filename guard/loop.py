"""``Guard``: enforce a certificate in any training loop that declares each release.

    run = Guard(certificate="bundle.json", plan="plan.yaml", sampler="poisson", dataset_size=1438,
                lot_size=64, blocks={"all": parameters}, generator="chacha20")
    ...
    run.step(clip_norm=1.0, noise_multiplier=1.1, sums=sums, released=noisy)

Create ``Guard`` before the loop, and call ``step`` between drawing the noise and using it. The
declared values are compared with the certificate. With ``sums`` (clipped, before noise) and
``released`` (after noise) the guard tests the noise of every tensor; without them the noise is only
declared, which ``notes`` reports. A correct run is stopped with a probability of at most 1e-9
(``affidavit.guard.noise_statistics``). No framework is imported.

``close``, the end of a ``with`` block, or the end of the process finishes the record.
"""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from affidavit.assessment import std_of
from affidavit.certificate import VerificationOptions
from affidavit.guard.certified_run import (
    Certificate,
    CertifiedRun,
    assign_tensors,
    load_certified_run,
    require_certified_parameters,
    tensor_entries,
)
from affidavit.guard.errors import GuardStop, StopState
from affidavit.guard.noise_statistics import (
    NoiseTest,
    digest_of_arrays,
    measure_noise,
    shape_of,
)
from affidavit.guard.record import RunRecord
from affidavit.guard.sampler import compute_commitment
from affidavit.plan import Plan, exact_fraction
from affidavit.trust import TrustedKeys

Amount = float | Mapping[str, float]
"""One number for every release of the plan, or one for each name of a release."""


class Guard:
    """One guarded run; every method raises ``GuardStop`` if the run must stop.

    ``blocks`` maps each release of the plan to its trainable tensors by name; every updated tensor
    appears once. ``generator`` names the random generators, one name or
    ``{"sampling": ..., "noise": ...}``; conformance accepts ``chacha20``. ``trusted`` are the
    issuer's keys and their policy (``affidavit.keys.trusted``), by default your own keys.
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
        trusted: TrustedKeys | None = None,
        record: str | Path = "run",
        options: VerificationOptions | None = None,
    ) -> None:
        self._stop_state, self._noise_test, self._release_pending = StopState(), NoiseTest(), False
        self._keys: set[str] = set()
        self.notes: tuple[str, ...] = ()
        with self._stop_state.guarded():
            self.certified = load_certified_run(
                certificate, plan=plan, trusted=trusted, options=options
            )
            _require_sampler(self.certified, sampler, dataset_size, lot_size, probability)
            self._tensors = assign_tensors(self.certified, blocks)
            generators = _generators(generator)
            if set(generators.values()) != {"chacha20"}:
                self._note(
                    "lots and noise do not come from chacha20: conformance will report "
                    "statistical_generator."
                )
            self._arrays = {
                name: array for tensors in blocks.values() for name, array in tensors.items()
            }
            self._record = RunRecord(Path(record))
            self._record.begin(
                self.certified,
                loop="own",
                generator=generators,
                tensors=tensor_entries(
                    self.certified,
                    {name: shape_of(array) for name, array in self._arrays.items()},
                    self._tensors,
                ),
                parameters=digest_of_arrays(self._arrays),
            )
        self._process = os.getpid()
        atexit.register(self._finish)

    @property
    def steps_left(self) -> int:
        """Number of releases that the certificate still allows."""
        return self.certified.execution.steps - self._record.charged

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
        """Declare one release before it is used; returns only if it is allowed.

        The noise is ``noise_multiplier`` (σ, relative to the clip norm) or ``noise_std`` (σC, on
        the sum). ``divisor`` divides the sum; the default is the plan's B. ``key`` is the key or
        the generator state of the noise, of which only a commitment is recorded.
        """
        with self._stop_state.guarded():
            self._close_release(None)
            required = self.certified.at(self._record.charged)
            names = required.clip_norm.keys()
            clips = _amount_by_release("clip_norm", clip_norm, names)
            stds = _standard_deviations(clips, noise_multiplier, noise_std, names)
            require_certified_parameters(required, clip_norm=clips, noise_std=stds, divisor=divisor)
            commitment = self._commit_to_key(key)
            self._test_noise(stds, sums, released)
            self._record.charge(
                self.certified, required, clip_norm=clips, noise_std=stds, commitment=commitment
            )
            self._release_pending = True

    def close(self) -> None:
        """Finish the run, and write the final line if it is complete."""
        with self._stop_state.guarded():
            atexit.unregister(self._finish)
            complete = self.steps_left == 0
            digest = digest_of_arrays(self._arrays) if complete else None
            self._close_release(digest)
            if complete:
                self._record.end(digest)
            self._record.close()

    def _finish(self) -> None:
        if self._stop_state.reason is None and os.getpid() == self._process:
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

    def _close_release(self, digest: str | None) -> None:
        if self._release_pending:
            self._record.release(digest)
            self._release_pending = False

    def _commit_to_key(self, key: bytes | None) -> str:
        if key is None:
            return f"undisclosed:{self._record.charged}"
        commitment = compute_commitment(key)
        if commitment in self._keys:
            raise GuardStop(
                "noise_repeated",
                "the noise of this release comes from a key that was already used.",
                "Draw a new key for every release.",
            )
        self._keys.add(commitment)
        return commitment

    def _test_noise(
        self,
        stds: Mapping[str, float],
        sums: Mapping[str, Any] | None,
        released: Mapping[str, Any] | None,
    ) -> None:
        if sums is None or released is None:
            if sums is not released:
                raise GuardStop(
                    "bad_argument", "sums or released is missing.", "Give both, or neither."
                )
            self._note("the noise of some releases was declared but not tested.")
            return
        missing = sorted(self._tensors.keys() - (sums.keys() & released.keys()))
        if missing:
            raise GuardStop(
                "tensor_not_noised",
                f"{', '.join(missing)}: trained, but has no noisy sum.",
                "Release every trainable tensor with noise, or freeze it.",
            )
        self._noise_test.check(
            {
                name: (measure_noise(released[name], sums[name]), stds[release])
                for name, release in self._tensors.items()
            }
        )

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes = (*self.notes, note)


def _amount_by_release(field: str, amount: Amount, names: Any) -> dict[str, float]:
    """Return the amount of every release; raises ``GuardStop`` unless each is positive."""
    amounts = dict(amount) if isinstance(amount, Mapping) else dict.fromkeys(names, amount)
    if amounts.keys() != set(names):
        raise GuardStop(
            "other_blocks",
            f"{field} is given for {', '.join(sorted(amounts)) or 'nothing'}; the plan releases "
            f"{', '.join(sorted(names))}.",
            "Give one number, or one for each release of the plan.",
        )
    for name, value in amounts.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise GuardStop(
                "bad_argument", f"{field} of {name} is {value!r}.", "Give a positive number."
            )
    return {name: float(value) for name, value in amounts.items()}


def _standard_deviations(
    clips: Mapping[str, float], multiplier: Amount | None, std: Amount | None, names: Any
) -> dict[str, float]:
    if (multiplier is None) == (std is None):
        raise GuardStop(
            "bad_argument", "either noise_multiplier or noise_std is required.", "Give exactly one."
        )
    if std is not None:
        return _amount_by_release("noise_std", std, names)
    assert multiplier is not None
    sigmas = _amount_by_release("noise_multiplier", multiplier, names)
    return {name: std_of(sigma, clips[name]) for name, sigma in sigmas.items()}


def _require_sampler(
    certified: CertifiedRun,
    sampler: str,
    size: int,
    lot_size: int | None,
    probability: float | None,
) -> None:
    scheme = certified.phase.sampling.scheme
    if sampler != scheme:
        raise GuardStop(
            "other_sampler",
            f"lots are drawn by {sampler}, but {scheme} was certified.",
            "Draw lots as certified, or certify a plan with your sampler.",
        )
    certified.require_size(size)
    if lot_size is None and probability is None and scheme != "full_batch":
        raise GuardStop("bad_argument", "the lot size is missing.", "Give lot_size or probability.")
    for name, value, expected in (
        ("lot_size", lot_size, certified.divisor),
        ("probability", probability, certified.probability),
    ):
        if value is not None and abs(exact_fraction(float(value)) - expected) > expected / 10**12:
            raise GuardStop(
                "other_probability",
                f"{name} is {value}, but {float(expected):g} was certified.",
                "Draw lots as certified, or certify the plan for these values.",
            )


def _generators(generator: str | Mapping[str, str]) -> dict[str, str]:
    names = (
        {"sampling": generator, "noise": generator}
        if isinstance(generator, str)
        else dict(generator)
    )
    if names.keys() != {"sampling", "noise"}:
        raise GuardStop(
            "bad_argument",
            "generator must name the generators of sampling and noise.",
            'Give one name, or {"sampling": ..., "noise": ...}.',
        )
    return names
