"""Events in dp_accounting's words, for its Rényi engine.

Only events built here are ever given to it: its ``from_named_tuple`` imports whatever
module the data names, so that nothing from a request may reach it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import assert_never

import dp_accounting
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from affidavit.accountants.composition import parts
from affidavit.accountants.fourier.schedules import fewer
from affidavit.accountants.protocol import Unsupported
from affidavit.plan import (
    BallsInBinsGaussian,
    Event,
    Gaussian,
    Laplace,
    Leaf,
    PoissonSampledGroupGaussian,
    PoissonSubsampledGaussian,
    RandomAllocationGaussian,
    RepeatAndSelect,
    TruncatedPoissonGaussian,
    WithoutReplacementGaussian,
)


def as_dp_event(leaf: Leaf | RepeatAndSelect) -> dp_accounting.DpEvent:
    """One release, or one selection among repeated runs, as a ``DpEvent``.

    Without replacement, dp_accounting's RDP takes the noise over the *replacement*
    distance, which is twice the clip norm.

    Raises ``Unsupported`` for a leaf that dp_accounting has no event for.
    """
    match leaf:
        case Gaussian(noise_multiplier=sigma):
            return dp_accounting.GaussianDpEvent(sigma)
        case Laplace(noise_multiplier=scale):
            return dp_accounting.LaplaceDpEvent(scale)
        case PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma):
            return dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
        case WithoutReplacementGaussian(dataset_size=size, sample_size=lot, noise_multiplier=sigma):
            half = dp_accounting.GaussianDpEvent(sigma / 2)
            return dp_accounting.SampledWithoutReplacementDpEvent(size, lot, half)
        case (
            PoissonSampledGroupGaussian() | TruncatedPoissonGaussian() | RandomAllocationGaussian()
        ):
            raise Unsupported(
                f"dp_accounting's Rényi accountant has no event for {type(leaf).__name__}.",
                "Use another accountant.",
            )
        case BallsInBinsGaussian():
            raise Unsupported(
                "dp_accounting has no event for balls in bins with correlated noise.",
                "Use the monte_carlo accountant.",
            )
        case RepeatAndSelect(event=run, mean=mean, shape=shape):
            repeated = dp_accounting.ComposedDpEvent(
                [dp_accounting.SelfComposedDpEvent(as_dp_event(p), n) for p, n in parts(run)]
            )
            return RepeatAndSelectDpEvent(repeated, mean, shape)
        case _:
            assert_never(leaf)


def compose_into(accountant: dp_accounting.PrivacyAccountant, event: Event) -> None:
    """Compose every part of ``event``, with its count, into ``accountant``.

    Of very many kinds of release those alike are taken for the worst of them.
    """
    for part, count in fewer(parts(event)):
        accountant.compose(as_dp_event(part), count)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the library's warnings to itself: an order that it drops only loosens a bound."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        logger.setLevel(level)
