"""Privacy random variables by prv-accountant: a two-sided second opinion.

The library bounds the error of its own discretisation and returns a lower and an upper value. It
covers the remove direction of Poisson sampling only. Here it also receives the add direction as
another random variable, and the larger of the two intervals is reported. Its interval is known to
miss the true value by a relative 2e-4, so both ends are moved outward by its documented accuracy,
1e-3.

Memory grows with the number of grid points, which is known in advance: a plan that needs too many
is refused before any work. The work stops at a time limit.

References: Gopi, Lee and Wutschitz, arXiv:2106.02848; prv-accountant 0.2.0.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prv_accountant import PRVAccountant
from prv_accountant.accountant import compute_safe_domain_size
from prv_accountant.privacy_random_variables import (
    GaussianMechanism,
    PoissonSubsampledGaussianMechanism,
)
from scipy.special import ndtr

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.composition import leaves
from affidavit.accountants.fourier.schedules import MAX_KINDS
from affidavit.accountants.gaussian import EMPTY_CURVE
from affidavit.accountants.protocol import (
    OutOfReach,
    PrivacyCurve,
    Unsupported,
    require_delta,
    require_epsilon,
)
from affidavit.accountants.registry import PRV_ACCOUNTANT
from affidavit.plan import events


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise ``OutOfReach`` when the block runs longer than ``seconds`` of wall-clock time.

    Only the main thread receives signals, and Windows has no alarm. Elsewhere the limit of the
    caller applies; the service kills the whole process.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    if not (main_thread and hasattr(signal, "SIGALRM")):
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise OutOfReach(f"{what} did not finish in {seconds:g} s.", "Use another accountant.")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


MAX_GRID = 2_000_000
"""Points."""
MAX_SECONDS = 30.0
"""Wall-clock time for one bracket."""
EPSILON_ERROR = 0.01
"""Accuracy (nats) that is requested from the library."""
ACCURACY = 1e-3
"""Relative accuracy, by which both ends are moved outward."""
MIN_DELTA = 1e-9
MIN_NOISE = 0.05
"""Noise multiplier below which the library's grid is unbounded."""


class _AddDirection(PoissonSubsampledGaussianMechanism):  # type: ignore[misc]
    """The loss of N(0) against (1-q) N(0) + q N(1), under N(0).

    Its Rényi divergence is at most that of the remove direction (arXiv:1908.10530, Theorem 5),
    which the parent class returns and the library only uses for the size of its grid.
    """

    def cdf(self, t: Any) -> NDArray[np.float64]:
        q, sigma = float(self.p), float(self.sigma)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            likelihood = np.exp(-np.asarray(t, dtype=np.float64)) - (1 - q)
            threshold = 0.5 + sigma**2 * np.log(np.maximum(likelihood, 0) / q)
        return np.where(likelihood > 0, ndtr(-threshold / sigma), 1.0)


@dataclass(frozen=True, kw_only=True)
class PrvCurve:
    """Intervals of the library for both directions, widened by its accuracy.

    ``leaves`` are the releases with counts.
    """

    leaves: tuple[tuple[events.Leaf, int], ...]

    @cached_property
    def _counts(self) -> list[int]:
        return [count for _, count in self.leaves]

    def epsilon(self, delta: float) -> Bracket:
        """Return the bracket of ε (nats) at ``delta``; raises ``OutOfReach``."""
        require_delta(delta)
        with _library_limits():
            result = [
                self._accountant(add, delta).compute_epsilon(delta, self._counts)
                for add in (False, True)
            ]
        return Bracket(
            lower=max(0.0, *(float(low) for low, _, _ in result)) * (1 - ACCURACY),
            upper=max(0.0, *(float(high) for _, _, high in result)) * (1 + ACCURACY),
        )

    def delta(self, epsilon: float) -> Bracket:
        """Return the bracket of δ at ``epsilon`` (nats); raises ``OutOfReach`` for a small δ."""
        require_epsilon(epsilon)
        with _library_limits():
            result = [
                self._accountant(add, 1e-6).compute_delta(epsilon, self._counts)
                for add in (False, True)
            ]
        upper = max(float(high) for _, _, high in result)
        _require_delta(upper)
        lower = max(0.0, *(float(low) for low, _, _ in result))
        return Bracket(lower=lower * (1 - ACCURACY), upper=min(1.0, upper * (1 + ACCURACY)))

    def _accountant(self, add: bool, delta: float) -> PRVAccountant:
        _require_delta(delta)
        variables = [_variable(leaf, add) for leaf, _ in self.leaves]
        error = delta * 1e-3
        reach = compute_safe_domain_size(variables, self._counts, EPSILON_ERROR, error)
        mesh = EPSILON_ERROR / math.sqrt(sum(self._counts) / 2 * math.log(12 / error))
        if not 2 * reach / mesh <= MAX_GRID:
            raise OutOfReach(
                f"the PRV accountant would need {2 * reach / mesh:.2g} grid points.",
                "Use another accountant.",
            )
        return PRVAccountant(
            prvs=variables,
            eps_error=EPSILON_ERROR,
            delta_error=error,
            max_self_compositions=self._counts,
        )


@contextmanager
def _library_limits() -> Iterator[None]:
    """Apply the time limit, silence floating-point warnings and turn failures into refusals."""
    with time_limit(MAX_SECONDS, "the PRV accountant"), np.errstate(all="ignore"):
        try:
            yield
        except (RuntimeError, ValueError, ArithmeticError, IndexError) as error:
            raise OutOfReach(
                f"the PRV accountant gave up: {error}.", "Use another accountant."
            ) from None


def _require_delta(delta: float) -> None:
    if delta < MIN_DELTA:
        raise OutOfReach(
            f"the PRV accountant is not trusted below δ = {MIN_DELTA:g}.",
            "Use another accountant for smaller δ.",
        )


def _variable(
    leaf: events.Leaf, add: bool
) -> GaussianMechanism | PoissonSubsampledGaussianMechanism:
    match leaf:
        case events.Gaussian(noise_multiplier=sigma):
            return GaussianMechanism(sigma)
        case events.PoissonSubsampledGaussian(
            sampling_probability=q, noise_multiplier=sigma, pair="add_remove"
        ):
            kind = _AddDirection if add else PoissonSubsampledGaussianMechanism
            return kind(sampling_probability=q, noise_multiplier=sigma)
        case _:
            raise Unsupported(
                "the PRV accountant takes Gaussian releases, unsampled or Poisson-sampled "
                "under add_remove.",
                "Use another accountant.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PrvAccountant:
    """prv-accountant at an ε error of 0.01 nats, in both directions."""

    name: str = "prv"
    version: str = PRV_ACCOUNTANT

    def curve(self, event: events.Event) -> PrivacyCurve:
        """Return the curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        parts = leaves(event)
        if not parts:
            return EMPTY_CURVE
        if len(parts) > MAX_KINDS:
            raise OutOfReach(
                f"{len(parts)} kinds of release exceed the PRV accountant's limit of {MAX_KINDS}.",
                "Use another accountant.",
            )
        for leaf, _ in parts:
            _variable(leaf, False)
            if leaf.noise_multiplier < MIN_NOISE:
                raise OutOfReach(
                    f"noise multiplier {leaf.noise_multiplier:.3g} is below {MIN_NOISE}, "
                    "where the PRV accountant's grid is unbounded.",
                    "Add more noise.",
                )
        return PrvCurve(leaves=parts)
