"""Accounted events of a plan beside its steps of training.

* ``gaussian``: a metric or statistic released with Gaussian noise, on the whole data set
  or on a Poisson sample of its own.
* ``laplace``: the same with Laplace noise, on the whole data set.
* ``adaptive_clipping_quantile``: at every step, how many records of the *same lot* were
  below the clip norm, released with Gaussian noise to steer the next clip norm.
* ``repeat_and_select``: the whole run is repeated a random number of times, for example
  with random hyperparameters, and only the best is released.

References: Andrew, Thakkar, McMahan and Ramaswamy, arXiv:1905.03871 (quantiles);
Papernot and Steinke, arXiv:2110.03620 (repeat and select).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from affidavit.plan.types import Integer, Name, Positive, Real, StrictModel

Distribution = Literal["poisson", "geometric", "logarithmic", "truncated_negative_binomial"]


class Metric(StrictModel):
    """A Gaussian mechanism, ``count`` times.

    ``noise_multiplier`` is the standard deviation of its noise over its sensitivity under
    the plan's adjacency. With ``sampling_probability`` each of the releases is of a fresh
    Poisson sample, independent of the lots of training.
    """

    kind: Literal["gaussian"]
    name: Name
    noise_multiplier: Positive
    count: Annotated[Integer, Field(ge=1)] = 1
    sampling_probability: Annotated[Real, Field(gt=0, le=1)] | None = None
    each_repetition: Annotated[bool, Field(strict=True)] | None = None


class LaplaceMetric(StrictModel):
    """A Laplace mechanism, ``count`` times; ``noise_multiplier`` is scale over l1 sensitivity.

    The sensitivity is that under the plan's adjacency.
    """

    kind: Literal["laplace"]
    name: Name
    noise_multiplier: Positive
    count: Annotated[Integer, Field(ge=1)] = 1
    each_repetition: Annotated[bool, Field(strict=True)] | None = None


class ClippingQuantile(StrictModel):
    """The number of records below the clip norm, on each step's own lot, with noise.

    Each record of the lot adds +1/2 if its norm is at most the clip norm and -1/2 if not.
    ``noise_std`` is σ_b, the standard deviation of the noise on that sum; ``quantile`` and
    ``learning_rate`` steer the next clip norm and cost nothing. ``count`` such sums are
    released at every step, one for each clip norm that is adapted.
    """

    kind: Literal["adaptive_clipping_quantile"]
    name: Name
    noise_std: Positive
    count: Annotated[Integer, Field(ge=1, le=1_000_000)] = 1
    quantile: Annotated[Real, Field(ge=0, le=1)] | None = None
    learning_rate: Positive | None = None


class Selection(StrictModel):
    """The run, repeated K times and the best released; K has ``distribution`` and ``mean``.

    ``shape`` is η of the truncated negative binomial: 1 is geometric, 0 logarithmic, and
    Poisson its limit. The mean counts runs and is at least 1.
    """

    kind: Literal["repeat_and_select"]
    name: Name
    distribution: Distribution
    mean: Annotated[Real, Field(ge=1, le=1e6)]
    shape: Annotated[Real, Field(ge=0, le=1e6)] | None = None


ExtraEvent = Annotated[
    Metric | LaplaceMetric | ClippingQuantile | Selection, Field(discriminator="kind")
]
