"""Accounted releases of a plan besides its training steps.

* ``gaussian``: a metric or statistic released with Gaussian noise, on the whole data set or on a
  Poisson sample of its own.
* ``laplace``: the same with Laplace noise, on the whole data set.
* ``adaptive_clipping_quantile``: at every step, the number of records of the *same lot* below the
  clip norm, released with Gaussian noise to adapt the clip norm.
* ``repeat_and_select``: the whole run is repeated a random number of times, for example with
  random hyperparameters, and only the best is released.

References: Andrew, Thakkar, McMahan and Ramaswamy, arXiv:1905.03871 (quantiles);
Papernot and Steinke, arXiv:2110.03620 (repeat and select).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from affidavit.plan.types import Integer, Name, Positive, Real, StrictModel

Distribution = Literal["poisson", "geometric", "logarithmic", "truncated_negative_binomial"]


class Metric(StrictModel):
    """A Gaussian mechanism that is released ``count`` times.

    ``noise_multiplier`` is the standard deviation of its noise over its sensitivity under the
    plan's adjacency. With ``sampling_probability``, each release reads a fresh Poisson sample,
    independent of the lots of training.
    """

    kind: Literal["gaussian"]
    name: Name
    noise_multiplier: Positive
    count: Annotated[Integer, Field(ge=1)] = 1
    sampling_probability: Annotated[Real, Field(gt=0, le=1)] | None = None
    each_repetition: Annotated[bool, Field(strict=True)] | None = None


class LaplaceMetric(StrictModel):
    """A Laplace mechanism that is released ``count`` times.

    ``noise_multiplier`` is the scale of its noise over its l1 sensitivity under the plan's
    adjacency.
    """

    kind: Literal["laplace"]
    name: Name
    noise_multiplier: Positive
    count: Annotated[Integer, Field(ge=1)] = 1
    each_repetition: Annotated[bool, Field(strict=True)] | None = None


class ClippingQuantile(StrictModel):
    """The number of records below the clip norm in the lot of each step, with noise.

    Each record of the lot adds +1/2 if its norm is at most the clip norm and -1/2 if not.
    ``noise_std`` is σ_b, the standard deviation of the noise on this sum. ``quantile`` and
    ``learning_rate`` control the next clip norm and are post-processing. Every step releases
    ``count`` such sums, one per adapted clip norm.
    """

    kind: Literal["adaptive_clipping_quantile"]
    name: Name
    noise_std: Positive
    count: Annotated[Integer, Field(ge=1, le=1_000_000)] = 1
    quantile: Annotated[Real, Field(ge=0, le=1)] | None = None
    learning_rate: Positive | None = None


class Selection(StrictModel):
    """A run that is repeated K times, of which only the best is released.

    K has the given ``distribution`` and ``mean``, the mean number of runs. ``shape`` is η of the
    truncated negative binomial: 1 is geometric, 0 logarithmic, and Poisson is its limit.
    """

    kind: Literal["repeat_and_select"]
    name: Name
    distribution: Distribution
    mean: Annotated[Real, Field(ge=1, le=1e6)]
    shape: Annotated[Real, Field(ge=0, le=1e6)] | None = None


ExtraEvent = Annotated[
    Metric | LaplaceMetric | ClippingQuantile | Selection, Field(discriminator="kind")
]
