"""Privacy events: the releases of a plan, as data that every accountant can read.

A mechanism lowers a plan to one ``Event``, and an accountant turns the event into a privacy curve.
The union is closed: a new kind of event is added here, and ``assert_never`` in each accountant
makes the type checker list the places to update.

Rules for every event:

* Events are frozen and valid at construction. Sensitivities are folded in: the
  ``noise_multiplier`` of a ``Gaussian`` is the standard deviation of the noise over the l2 distance
  between the means of the two hypotheses. For a subsampled leaf it is over the clip norm, and the
  pair says how far apart the means are. No accountant multiplies by two.
* A leaf stands for **one** release. Only ``Repeated`` has a count, which only the traversal
  (``affidavit.accountants.composition``) reads.
* The steps of a composition may be chosen adaptively.

>>> event = Composed(events=(Repeated(event=Gaussian(noise_multiplier=2.0), count=3),))
>>> event.events[0].count
3

``event_document`` and ``parse_event`` convert an event to JSON data and back, so that accounting
can be repeated.

>>> event = Repeated(event=Gaussian(noise_multiplier=2.0), count=3)
>>> event_document(event)
{'kind': 'Repeated', 'event': {'kind': 'Gaussian', 'noise_multiplier': 2.0}, 'count': 3}
>>> parse_event(event_document(event)) == event
True

References: dp_accounting's ``dp_event`` module for events as data; Zhu, Dong and Wang, "Optimal
Accounting of Differential Privacy via Characteristic Function", arXiv:2106.08567, for dominating
pairs; Dong, Roth and Su, arXiv:1905.02383, for μ.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

Neighbours = Literal["add_remove", "replace_one", "zero_out"]
"""The adjacency of a leaf whose bound differs between all three."""

SubsampledPair = Literal["add_remove", "replace_one"]
"""The dominating pair of a subsampled leaf.

``add_remove``: the two orders of ((1-q) N(0) + q N(1), N(0)); it also serves
``zero_out``. ``replace_one``: the two orders of
((1-q) N(0) + q N(+1), (1-q) N(0) + q N(-1)). Means are in units of the clip norm.
"""


class _Validated:
    """Validates the fields that have the same meaning in every event."""

    __slots__ = ()

    def __post_init__(self) -> None:
        records = getattr(self, "records", 2)
        if not 2 <= records <= MAX_RECORDS:
            raise ValueError(f"records must be between 2 and {MAX_RECORDS}, got {records}")
        probability = getattr(self, "sampling_probability", 0.5)
        if not 0 < probability < 1:
            raise ValueError(
                f"sampling_probability must lie strictly between 0 and 1, got {probability!r}"
            )
        noise = getattr(self, "noise_multiplier", 1.0)
        if not (math.isfinite(noise) and noise > 0):
            raise ValueError(f"noise_multiplier must be positive and finite, got {noise!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gaussian(_Validated):
    """One Gaussian release; N(0, σ²) against N(1, σ²).

    ``noise_multiplier`` is σ, the noise standard deviation over the l2 sensitivity under
    the plan's adjacency. Its Gaussian-DP parameter is μ = 1/σ.
    """

    noise_multiplier: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Laplace(_Validated):
    """One Laplace release; Lap(0, s) against Lap(1, s), which is (1/s, 0)-DP.

    ``noise_multiplier`` is s, the scale of the noise over the l1 sensitivity under the
    plan's adjacency.
    """

    noise_multiplier: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PoissonSubsampledGaussian(_Validated):
    """One Gaussian release on a Poisson sample; probability q in (0, 1).

    ``noise_multiplier`` is the noise standard deviation over the clip norm, for both
    pairs. ``q = 1`` is a plain ``Gaussian`` and is lowered as one. Source:
    docs/theorems/poisson-add-remove.md and docs/theorems/poisson-replace-one.md.
    """

    sampling_probability: float
    noise_multiplier: float
    pair: SubsampledPair = "add_remove"


MAX_RECORDS = 200
"""Records of one user up to which draws are counted one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoissonSampledGroupGaussian(_Validated):
    """One Gaussian release on a Poisson sample of records, ``records`` of them of one user.

    K, the number of the user's records in the sample, is binomial with ``records`` draws at q. In
    units of the clip norm, with ``noise_multiplier`` the noise standard deviation over it, the
    dominating ``pair`` is

    * ``add_remove``: the two orders of (Σ_k P(K = k) N(k), N(0)). It also serves zero_out;
    * ``replace_one``: (Σ_k P(K = k) N(k), Σ_k P(K = k) N(-k)).

    Source: docs/theorems/group-sampling.md.
    """

    records: int
    sampling_probability: float
    noise_multiplier: float
    pair: SubsampledPair = "add_remove"


MAX_WEIGHTS = 512
"""Maximum number of weights of a mixture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianMixture(_Validated):
    """One Gaussian release that one record moves by k units with probability ``weights``[k].

    The two orders of (Σ_k weights[k] N(k), N(0)) or, for the pair ``replace_one``,
    (Σ_k weights[k] N(k), Σ_k weights[k] N(-k)), with ``noise_multiplier`` the noise standard
    deviation over the unit. The weights are positive and add up to one. With probability
    ``conceded``, which adds to δ, a record moves it further. Source:
    docs/theorems/group-sampling.md.
    """

    weights: tuple[float, ...]
    noise_multiplier: float
    conceded: float = 0.0
    pair: SubsampledPair = "add_remove"

    def __post_init__(self) -> None:
        _Validated.__post_init__(self)
        _require_weights(self.weights, self.conceded)


def _require_weights(weights: tuple[float, ...], conceded: float) -> None:
    if not 2 <= len(weights) <= MAX_WEIGHTS:
        raise ValueError(f"a mixture has 2 to {MAX_WEIGHTS} weights, got {len(weights)}")
    if not (min(weights) > 0 and abs(math.fsum(weights) - 1) <= 1e-15):
        raise ValueError("weights must be positive and add up to one")
    if not 0 <= conceded < 1:
        raise ValueError(f"conceded must lie in [0, 1), got {conceded!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WithoutReplacementGaussian(_Validated):
    """One Gaussian release on a uniform sample of fixed size, under replace_one.

    The two orders of ((1-γ) N(0) + γ N(2), N(0)) in units of the clip norm, with
    γ = ``sample_size`` / ``dataset_size``, both in records, and ``noise_multiplier`` the noise
    standard deviation over the clip norm (not over the replacement distance of 2). Source:
    docs/theorems/without-replacement.md.
    """

    dataset_size: int
    sample_size: int
    noise_multiplier: float

    def __post_init__(self) -> None:
        _Validated.__post_init__(self)
        if not 0 < self.sample_size < self.dataset_size:
            raise ValueError(
                "sample_size must lie strictly between 0 and dataset_size, got "
                f"{self.sample_size} of {self.dataset_size}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class WithoutReplacementGroupGaussian(_Validated):
    """``WithoutReplacementGaussian`` for users with at most ``records`` records.

    Neighbours differ in all records of one user. K of them are drawn, K hypergeometric, and move
    the sum by at most 2K clip norms. With ``zeroed`` the records contribute nothing in one of the
    two data sets, so that these are K apart. Source: docs/theorems/without-replacement.md.
    """

    records: int
    dataset_size: int
    sample_size: int
    noise_multiplier: float
    zeroed: bool = False

    def __post_init__(self) -> None:
        _Validated.__post_init__(self)
        if not 0 < self.sample_size < self.dataset_size or self.records > self.dataset_size:
            raise ValueError(
                "sample_size must lie strictly between 0 and dataset_size, and records not above "
                f"it, got {self.sample_size} and {self.records} of {self.dataset_size}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TruncatedPoissonGaussian(_Validated):
    """One Gaussian release on a Poisson sample that is truncated to a largest lot, uniformly.

    Each of at most ``dataset_size`` records enters the sample with ``sampling_probability``. A
    sample above ``max_lot_size`` is replaced by a uniformly random subset of that size.
    ``noise_multiplier`` is the noise standard deviation over the clip norm. Source:
    docs/theorems/truncated-poisson.md.
    """

    dataset_size: int
    sampling_probability: float
    max_lot_size: int
    noise_multiplier: float
    neighbours: Neighbours = "add_remove"

    def __post_init__(self) -> None:
        _Validated.__post_init__(self)
        if not 0 < self.max_lot_size <= self.dataset_size:
            raise ValueError(
                "max_lot_size must lie between 1 and dataset_size, got "
                f"{self.max_lot_size} of {self.dataset_size}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TruncatedPoissonGroupGaussian(_Validated):
    """``TruncatedPoissonGaussian`` for users with at most ``records`` records.

    Neighbours differ in all records of one user. Source: docs/theorems/truncated-poisson.md.
    """

    records: int
    dataset_size: int
    sampling_probability: float
    max_lot_size: int
    noise_multiplier: float
    neighbours: Neighbours = "add_remove"

    def __post_init__(self) -> None:
        _Validated.__post_init__(self)
        if self.neighbours != "add_remove" and self.records > self.dataset_size:
            raise ValueError(
                f"records must not be above dataset_size, got {self.records} of {self.dataset_size}"
            )
        if not 0 < self.max_lot_size < self.dataset_size + self.records:
            raise ValueError(
                "max_lot_size must lie between 1 and what a neighbour may have less one, got "
                f"{self.max_lot_size} of {self.dataset_size + self.records}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomAllocationGaussian(_Validated):
    """A record in one of ``bins`` bins, uniformly random, and one Gaussian release per bin.

    The two orders of (1/b Σ_i N(e_i, σ² I_b), N(0, σ² I_b)) in units of the clip norm;
    ``noise_multiplier`` is σ. One leaf stands for the releases of all bins. It serves add_remove
    and zero_out. Source: docs/theorems/random-allocation.md.

    If bins are kept and the run ends within a later pass, the leaf dominates it and is not
    attained: ``attained_at`` is then the σ of the whole passes, used for lower bounds (infinite if
    nothing is attained). If ``longer`` bins are in one pass more than the others, these are at
    ``attained_at``, and the leaf is attained; ignoring it counts one more pass of all bins.
    ``released`` is the number of bins of a pass that ends early; ignoring it bounds the whole pass.
    """

    bins: int
    noise_multiplier: float
    attained_at: float | None = None
    released: int | None = None
    longer: int | None = None

    def __post_init__(self) -> None:
        _Validated.__post_init__(self)
        if self.bins < 1:
            raise ValueError(f"bins must be at least 1, got {self.bins}")
        if self.longer is not None and not (
            1 <= self.longer < self.bins and self.attained_at is not None
        ):
            raise ValueError(
                f"longer must be between 1 and {self.bins - 1}, beside attained_at, got "
                f"{self.longer}"
            )
        if self.attained_at is not None and not self.attained_at >= self.noise_multiplier:
            raise ValueError(
                f"attained_at must be at least the noise multiplier, got {self.attained_at!r}"
            )
        if self.released is not None and not 1 <= self.released < self.bins:
            raise ValueError(f"released must be between 1 and {self.bins - 1}, got {self.released}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplacedAllocationGaussian(_Validated):
    """``RandomAllocationGaussian`` for a record that is replaced by another.

    With probability ``drawn`` the record is in one of the ``bins`` that are released, each with the
    same, and else in none, and so is its replacement. If it takes the ``place`` of another record,
    so does what replaces it, or a record that contributes nothing; no more is known of the place.
    Without a place both have a bin of their own. All bins but ``longer`` may be at ``others_at``,
    which is more noise; ignoring it bounds the release. No lower bound uses it. Source:
    docs/theorems/random-allocation.md, Theorem 7; shuffled-lots.md, Theorems 6 and 7.
    """

    bins: int
    noise_multiplier: float
    drawn: float = 1.0
    place: Literal["replace_one", "zero_out"] | None = None
    longer: int | None = None
    others_at: float | None = None

    def __post_init__(self) -> None:
        _Validated.__post_init__(self)
        if self.bins < 1:
            raise ValueError(f"bins must be at least 1, got {self.bins}")
        if not 0 < self.drawn <= 1:
            raise ValueError(f"drawn must lie in (0, 1], got {self.drawn!r}")
        if (self.longer is None) != (self.others_at is None):
            raise ValueError("longer and others_at go together")
        if self.longer is not None and not 1 <= self.longer < self.bins:
            raise ValueError(f"longer must be between 1 and {self.bins - 1}, got {self.longer}")
        if self.others_at is not None and not self.others_at >= self.noise_multiplier:
            raise ValueError(
                f"others_at must be at least the noise multiplier, got {self.others_at!r}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffledEpoch:
    """An attack, not an event: it tests whether any sum of an epoch's shuffled lots is large.

    A record is in one of the ``lots`` with probability ``drawn``. The sum of its lot differs from
    those of the others by two clip norms with the record, and by ``without`` clip norms without
    it. Source: docs/theorems/shuffled-lots.md.
    """

    lots: int
    drawn: float
    noise_multiplier: float
    without: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatedRecord:
    """An attack, not an event: it tests whether a sum of scores of the steps is large.

    A record adds one clip norm to ``participations`` of ``steps``, every such set with the same
    probability, or nothing. So do the records of a user, one step each, if no two are in one step,
    which has the probability ``distinct``. Bins are steps with the sum of all their epochs over
    its root: ``longer`` of them are in one epoch more, with ``noise_of_longer``. Source:
    docs/theorems/random-allocation.md, Theorem 9.
    """

    steps: int
    participations: int
    noise_multiplier: float
    distinct: float = 1.0
    longer: int = 0
    noise_of_longer: float = math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class DisplacedSum:
    """An attack, not an event: it tests whether the outputs along one direction are large.

    A record moves them by 2k units with probability ``weights``[k], and what takes its place by k,
    with ``noise_multiplier`` the noise standard deviation over the unit. The last weight bounds the
    probability of all larger moves. Source: docs/theorems/correlated-noise.md, Theorem 18.
    """

    weights: tuple[float, ...]
    noise_multiplier: float


TestedSums = ShuffledEpoch | AllocatedRecord | DisplacedSum

MAX_BINS = 1024
"""Maximum lots per epoch of a Gram matrix, which then has a million products."""


@dataclass(frozen=True, slots=True)
class Gram:
    """The products ⟨m_i, m_j⟩ of the means that a record may add, one mean per bin.

    ``rows`` is square, symmetric and finite, in squared clip norms. Its entries are at least zero
    and no smaller than the true products. A bin whose lot a short run never reaches has mean zero.
    ``digest`` is the sha256 of the doubles and identifies the matrix.
    """

    rows: tuple[tuple[float, ...], ...]
    digest: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        bins = len(self.rows)
        if not 1 <= bins <= MAX_BINS:
            raise ValueError(f"a Gram matrix has 1 to {MAX_BINS} bins, got {bins}")
        if any(len(row) != bins for row in self.rows):
            raise ValueError("a Gram matrix is square")
        if any(not math.isfinite(sum(row)) or min(row) < 0 for row in self.rows):
            raise ValueError("the products of a Gram matrix are finite and at least zero")
        if tuple(zip(*self.rows, strict=True)) != self.rows:
            raise ValueError("a Gram matrix is symmetric")
        if all(row[index] <= 0 for index, row in enumerate(self.rows)):
            raise ValueError("the diagonal of a Gram matrix is not all zero")
        doubles = b"".join(struct.pack(f"<{bins}d", *row) for row in self.rows)
        object.__setattr__(self, "digest", hashlib.sha256(doubles).hexdigest())

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Gram(bins={len(self.rows)}, sha256={self.digest})"


@dataclass(frozen=True, kw_only=True, slots=True)
class BallsInBinsGaussian(_Validated):
    """A whole run in which each record is in one uniformly random bin, under add_remove.

    The two orders of (1/b Σ_i N(m_i, σ² I), N(0, σ² I)), i = 1..b: bin i is the record's lot
    of every epoch, m_i the sum of the columns of the strategy at that lot's steps, and
    ``gram`` their products. ``noise_multiplier`` is σ, the noise standard deviation over the
    clip norm. It also serves ``zero_out``. Source: docs/theorems/balls-in-bins-correlated.md.
    """

    gram: Gram
    noise_multiplier: float


Leaf = (
    Gaussian
    | Laplace
    | PoissonSubsampledGaussian
    | PoissonSampledGroupGaussian
    | GaussianMixture
    | WithoutReplacementGaussian
    | WithoutReplacementGroupGaussian
    | TruncatedPoissonGaussian
    | TruncatedPoissonGroupGaussian
    | RandomAllocationGaussian
    | ReplacedAllocationGaussian
    | BallsInBinsGaussian
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeated:
    """``event`` run ``count`` times in sequence; ``count = 0`` releases nothing."""

    event: Event
    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count must not be negative, got {self.count}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    """The events in sequence; the empty composition releases nothing."""

    events: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatAndSelect:
    """``event`` run K times independently, with only the best output released.

    K does not depend on the data. ``shape`` η in [0, inf) is the truncated negative binomial
    with mean ``mean`` (η = 1 geometric, η = 0 logarithmic); η = inf is Poisson with that
    mean. The score that selects the best run is part of the output of ``event``.
    Source: Papernot and Steinke, arXiv:2110.03620, Definitions 1 and 5.
    """

    event: Event
    mean: float
    shape: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and self.mean >= 1):
            raise ValueError(f"mean must be at least 1 and finite, got {self.mean!r}")
        if math.isnan(self.shape) or self.shape < 0:
            raise ValueError(f"shape must not be negative, got {self.shape!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EitherBound:
    """A run that each of the ``events`` bounds from above, two or more.

    Accountants read the first; ``alternatives`` are for those that can find the cheapest. If the
    events are attained, a record attains each of them, and the first is estimated to cost most.
    """

    events: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledColumns(_Validated):
    """A whole run that samples the records of a unit step by step, for add_remove or zero_out.

    Each of ``records_per_unit`` takes part in a step with ``sampling_probability``, up to the
    rounding of a double, and then in none of the next ``separation`` - 1. In step i it moves the
    run by the column c_i of the strategy. Two columns d steps apart have a product ⟨|c_i|, |c_j|⟩
    of at most ``products``[d] squared clip norms, and of ``beyond`` if they are further apart.
    ``noise_multiplier`` is the noise standard deviation over the clip norm.
    Source: docs/theorems/correlated-noise.md, Theorems 16, 28 and 30.
    """

    products: tuple[float, ...]
    sampling_probability: float
    separation: int
    steps: int
    noise_multiplier: float
    beyond: float = 0.0
    records_per_unit: int = 1

    def __post_init__(self) -> None:
        _Validated.__post_init__(self)
        if not self.products or not all(0 <= product < math.inf for product in self.products):
            raise ValueError("products must be finite and not negative, and at least one")
        if self.separation < 1 or self.steps < 1 or self.records_per_unit < 1:
            raise ValueError("separation, steps and records_per_unit must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlappingColumns(_Validated):
    """A whole run in which a record may be drawn in every step, by the products of its columns.

    In each of ``steps`` the number of draws is binomial, ``draws`` at ``sampling_probability``.
    In step i a draw moves the run by the column c_i. No ⟨|c_i|, |c_i|⟩ is above ``own``, no
    ⟨|c_i|, |c_j|⟩ of two steps above ``largest_other``, and those of one step with all others add
    up to at most ``others``, all in squared clip norms. ``noise_multiplier`` is the noise standard
    deviation over the clip norm. Under replace_one what replaces the record moves the run as far
    the other way. A step is crowded with the probability ``crowded``, and then a draw, of the
    record and of what replaces it, moves the run once more, as it takes the place of another. With
    probability ``conceded``, which adds to δ, a record moves it further. With the noise of a tree
    ``nodes`` has how many steps a node of each level has, from 1, at most. Without nodes and with
    one draw a step, whether it is drawn may also be ``shown``: by a normal release of its own, of
    variance one, whose squared mean that is if it is. Source: docs/theorems/correlated-noise.md,
    Theorems 23, 29 and 32.
    """

    own: float
    others: float
    largest_other: float
    draws: int
    sampling_probability: float
    steps: int
    noise_multiplier: float
    neighbours: Neighbours = "add_remove"
    crowded: float = 0.0
    conceded: float = 0.0
    nodes: tuple[int, ...] = ()
    shown: float = 0.0

    def __post_init__(self) -> None:
        _Validated.__post_init__(self)
        if not 0 <= self.crowded <= 1:
            raise ValueError(f"crowded must lie in [0, 1], got {self.crowded!r}")
        if not 0 <= self.shown < math.inf or (self.shown and (self.nodes or self.draws != 1)):
            raise ValueError("shown must be finite and not negative, without nodes and for a draw")
        if not (0 < self.own < math.inf and 0 <= self.others < math.inf):
            raise ValueError("own must be positive, others not negative, and both finite")
        if not (0 < self.largest_other <= self.others or self.largest_other == self.others == 0):
            raise ValueError("largest_other must be positive and at most others, or both zero")
        if self.draws < 1 or self.steps < 1 or not 0 <= self.conceded < 1:
            raise ValueError("draws and steps must be at least 1, and conceded lie in [0, 1)")

    @property
    def moves(self) -> tuple[tuple[float, float, float], ...]:
        """Probabilities of steps, and how far a draw of the record and of its replacement moves."""
        near, far = {"add_remove": (0, 0), "zero_out": (0, 1), "replace_one": (1, 2)}[
            self.neighbours
        ]
        both = (1 - self.crowded, 1.0, float(near)), (self.crowded, 2.0, float(far))
        return tuple(moves for moves in both if moves[0] > 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlappingBins(_Validated):
    """A whole run in which each record is in one uniformly random bin, by products at each lag.

    Bins i and j add means with a product ⟨|m_i|, |m_j|⟩ of at most ``products``[j - i mod b]
    squared clip norms, b the number of ``products``. If a last epoch ends early, ``longer`` bins
    are in it, and the squares of the others are at most ``less``. ``noise_multiplier`` is the noise
    standard deviation over the clip norm. The ``pair`` is that of a record that is there or not, or
    replaced. Source: docs/theorems/balls-in-bins-correlated.md, Theorem 4.
    """

    products: tuple[float, ...]
    noise_multiplier: float
    longer: int | None = None
    less: float = 0.0
    pair: SubsampledPair = "add_remove"

    def __post_init__(self) -> None:
        _Validated.__post_init__(self)
        if len(self.products) < 2 or not all(0 <= one < math.inf for one in self.products):
            raise ValueError("products must be finite and not negative, and two or more")
        if not self.products[0] > 0:
            raise ValueError("the product of a bin with itself must be positive")
        if self.longer is not None and not 1 <= self.longer < len(self.products):
            raise ValueError(f"longer must be between 1 and {len(self.products) - 1}")
        if not 0 <= self.less <= self.products[0]:
            raise ValueError(f"less must lie in [0, {self.products[0]!r}], got {self.less!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedSizeRun(_Validated):
    """A whole run over lots of fixed size, which a record moves by k units with ``weights``[k].

    So far apart are the record, what replaces it, and the records whose places it takes, two at a
    time. ``noise_multiplier`` is the noise standard deviation over the unit. The weights are
    positive and add up to one. With probability ``conceded``, which adds to δ, it moves further.
    Source: docs/theorems/correlated-noise.md, Theorem 18.
    """

    weights: tuple[float, ...]
    noise_multiplier: float
    conceded: float = 0.0

    def __post_init__(self) -> None:
        _Validated.__post_init__(self)
        _require_weights(self.weights, self.conceded)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainOfNeighbours:
    """A run on data sets that are ``links`` apart, where each link costs at most ``event``.

    Of a replaced unit the first half of the links remove a record, and the other half add one.
    """

    event: Event
    links: int
    replaced: bool = False

    def __post_init__(self) -> None:
        if self.links < 1:
            raise ValueError(f"links must be at least 1, got {self.links}")
        if self.replaced and self.links % 2:
            raise ValueError(f"of a replaced unit links must be even, got {self.links}")


Event = (
    Leaf
    | Repeated
    | Composed
    | RepeatAndSelect
    | EitherBound
    | SampledColumns
    | OverlappingColumns
    | OverlappingBins
    | FixedSizeRun
    | ChainOfNeighbours
)


def alternatives(event: Event) -> tuple[Event, ...]:
    """Return the events that each bound ``event``, one per choice from its ``EitherBound``.

    A chain in one of them encloses the whole event, and the rest of the event then costs its whole
    for each link. Bounds inside a chain stay, because each link may have another.
    """
    chosen = (_choose_bound(event, choice) for choice in range(_count_bounds(event)))
    return tuple(dict.fromkeys(map(_enclose_in_chain, chosen)))


def is_unsampled(event: Event) -> bool:
    """Whether ``event`` is Gaussian, so that twice the distance costs less than two links."""
    match event:
        case Repeated(event=inner):
            return is_unsampled(inner)
        case Composed(events=events):
            return all(map(is_unsampled, events))
        case _:
            return isinstance(event, Gaussian)


def _enclose_in_chain(event: Event) -> Event:
    if isinstance(event, ChainOfNeighbours):
        return event
    inner, links = _split_chain(event)
    return event if inner == event else ChainOfNeighbours(event=inner, links=links)


def _split_chain(event: Event) -> tuple[Event, int]:
    """Return the event of one link, and the length of the longest chain (1 without a chain)."""
    match event:
        case ChainOfNeighbours(event=inner, links=links):
            return inner, links
        case Repeated(event=inner) | RepeatAndSelect(event=inner):
            one, links = _split_chain(inner)
            return replace(event, event=one), links
        case Composed(events=events) if events:
            ones, numbers = zip(*map(_split_chain, events), strict=True)
            return Composed(events=ones), max(numbers)
        case _:
            return event, 1


def _count_bounds(event: Event) -> int:
    match event:
        case EitherBound(events=events):
            return len(events)
        case Repeated(event=inner) | RepeatAndSelect(event=inner):
            return _count_bounds(inner)
        case Composed(events=events):
            return max(map(_count_bounds, events), default=1)
        case _:
            return 1


def _choose_bound(event: Event, choice: int) -> Event:
    match event:
        case EitherBound(events=events):
            # Parts with fewer bounds start over with their first.
            return events[choice % len(events)]
        case Repeated(event=inner) | RepeatAndSelect(event=inner):
            return replace(event, event=_choose_bound(inner, choice))
        case Composed(events=events):
            return Composed(events=tuple(_choose_bound(part, choice) for part in events))
        case _:
            return event


_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Event)}


def event_document(event: Event) -> dict[str, Any]:
    """Return ``event`` as JSON data; infinity is a string."""
    values = {field.name: _to_json(getattr(event, field.name)) for field in fields(event)}
    return {"kind": type(event).__name__, **values}


def parse_event(document: Mapping[str, Any]) -> Event:
    """Parse an ``event_document``; raises ``ValueError``, ``KeyError`` or ``TypeError``."""
    provided = {name: _from_json(value) for name, value in document.items()}
    kind = provided.pop("kind")
    if kind not in _KINDS:
        raise ValueError(f"{kind!r} is not a kind of event")
    if "gram" in provided:
        provided["gram"] = Gram(provided["gram"])
    result: Event = _KINDS[kind](**provided)
    return result


def _to_json(value: Any) -> Any:
    if isinstance(value, Gram):
        return _to_json(value.rows)
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    if type(value).__name__ in _KINDS:
        return event_document(value)
    return "Infinity" if isinstance(value, float) and math.isinf(value) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    if isinstance(value, dict):
        return parse_event(value)
    return math.inf if value == "Infinity" else value
