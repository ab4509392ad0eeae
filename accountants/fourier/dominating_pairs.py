"""The loss laws that an event composes, for each direction of the adjacency.

An upper bound needs laws that dominate every step of every adaptive run, in each direction of the
adjacency. A lower bound needs laws that some pair of data sets produces. ``directions`` returns
both, and refuses a leaf without a theorem.

===========================  ==============================  ========================
leaf                         upper bound                     lower bound
===========================  ==============================  ========================
Gaussian                     N(μ) against N(0)               the same
Poisson, add_remove          both orders of the pair         the same
Poisson, replace_one         the symmetric pair              the same
Poisson, several records     both orders of the mixture      the same
the same, replaced           the symmetric pair of mixtures  the same
mixture of moves             both orders of the mixture      the same
without replacement          the convex profile of both      the pair of one data set
the same, several records    profiles by how many are drawn  the mixture of one data set
truncated Poisson            full lots, revealed or hidden   others that contribute zero
===========================  ==============================  ========================

The two orders are those of the composition as a whole: every add/remove step of one run has the
record on the same side. References: docs/theorems/poisson-add-remove.md,
poisson-replace-one.md, without-replacement.md, truncated-poisson.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, assert_never

from affidavit.accountants.composition import leaves
from affidavit.accountants.fourier.group_sampling import (
    binomial_weights,
    fixed_lot_law,
    fixed_lot_pair,
    group_law,
    hypergeometric_weights,
    max_likely_draws,
    worse_of_both,
)
from affidavit.accountants.fourier.loss_laws import Kind, LaplaceLaw, NormalMixtureLaw
from affidavit.accountants.fourier.privacy_loss import LossLaw
from affidavit.accountants.fourier.schedules import (
    MAX_CELLS,
    MAX_KINDS,
    BracketedRelease,
    group_kinds,
)
from affidavit.accountants.fourier.truncated_group_sampling import (
    attained_sample,
    truncated_group_law,
)
from affidavit.accountants.fourier.truncated_poisson import (
    Cover,
    attained_law,
    hidden_law,
    truncated_law,
    visible_law,
)
from affidavit.accountants.protocol import OutOfReach, Unsupported
from affidavit.plan import events

Side = Literal["remove", "add"]
_Attained = (
    events.Gaussian
    | events.PoissonSubsampledGaussian
    | events.PoissonSampledGroupGaussian
    | events.GaussianMixture
)
"""The releases whose dominating pair is attained and consists of mixtures of normals."""
Lots = Literal["revealed", "hidden", "visible"]
"""How a cut lot is bounded: from above with its fullness revealed; from above with lots that look
like it (of users, with the same records under both hypotheses); or from below with others that
show it."""

MIN_NOISE_MULTIPLIER, MAX_NOISE_MULTIPLIER = 0.1, 1000.0
MIN_MIXTURE_NOISE = 0.06
"""The least noise of a mixture over its largest move that is not negligibly rare, which few of its
outputs are near."""
MIN_SINGLE_RELEASE_NOISE = 1e-6
"""The least noise of one release alone, which needs no lattice; with less, the rounding of its
exponents is not bounded."""
MIN_SAMPLING_PROBABILITY = 1e-6
MAX_STEPS = 10_000_000_000
"""The most steps of a whole run."""
MAX_SAMPLED_NOISE, MIN_SAMPLED_PROBABILITY, MAX_SAMPLED_STEPS = 1e6, 1e-9, 100_000_000
"""The wider range of samples in runs of at most this many steps; rounding hides it in longer ones.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Direction:
    """One order of the hypotheses: the laws of the steps with their counts.

    ``laws`` dominate. ``attained`` are those of a pair of data sets, in the same sequence, and
    differ from ``laws`` only where no pair attains the dominating law. The laws dominate except
    with the probability ``conceded``, of all steps together, which adds to δ.
    """

    laws: tuple[tuple[LossLaw, int], ...]
    attained: tuple[LossLaw, ...]
    conceded: float = 0.0

    @property
    def steps(self) -> int:
        """The number of composed releases."""
        return sum(count for _, count in self.laws)

    @property
    def one_sided(self) -> tuple[Direction, Direction]:
        """The direction of ``laws`` alone, and that of ``attained`` alone."""
        counts = (count for _, count in self.laws)
        return (
            replace(self, attained=tuple(law for law, _ in self.laws)),
            replace(self, laws=tuple(zip(self.attained, counts, strict=True))),
        )

    @property
    def has_gap(self) -> bool:
        """Whether no pair of data sets attains some dominating law, so that brackets stay wide."""
        return any(law != other for (law, _), other in zip(self.laws, self.attained, strict=True))


def directions(
    event: events.Event,
    *,
    lots: Lots = "revealed",
    max_kinds: int = MAX_KINDS,
    max_cells: int = MAX_CELLS,
) -> tuple[Direction, ...]:
    """Return the directions of ``event``, none for the empty composition; ``lots`` as above.

    Those of visible lots bound from below only. More than ``max_kinds`` kinds of release are
    bracketed together in ``max_cells`` cells. Raises ``OutOfReach`` for a leaf outside the range in
    which the bounds were verified, and ``Unsupported`` for one without a law here.
    """
    parts = leaves(event)
    check_range(parts, alone=_is_alone(parts))
    if not parts:
        return ()
    two_orders = any(_has_two_orders(leaf) for leaf, _ in parts)
    sides: Sequence[Side] = ("remove", "add") if two_orders else ("remove",)
    rest, cells = group_kinds(parts, max_kinds, max_cells)
    result = []
    for side in sides:
        releases: list[BracketedRelease] = []
        conceded = 0.0
        for leaf, count in rest:
            if isinstance(leaf, events.RepeatAndSelect):
                continue
            law, attained, lost = _laws(leaf, side, lots)
            releases.append((law, attained, count))
            conceded += count * lost
        releases += [cell.bracketed(side) for cell in cells]
        result.append(
            Direction(
                laws=tuple((law, count) for law, _, count in releases),
                attained=tuple(attained for _, attained, _ in releases),
                conceded=conceded * (1 + 1e-9),
            )
        )
    if lots != "hidden":
        return tuple(result)
    # Under add_remove a cover holds for data sets of at least half of the records.
    halves = {leaf: half for leaf, _ in parts if (half := _halved(leaf))}
    if not halves:
        return tuple(result)
    if len({half.dataset_size for half in halves.values()}) > 1:
        return directions(event)
    smaller = [events.Repeated(event=halves.get(leaf, leaf), count=count) for leaf, count in parts]
    return (*result, *directions(events.Composed(events=tuple(smaller))))


def _halved(leaf: events.Leaf) -> events.TruncatedPoissonGaussian | None:
    """Return ``leaf`` of half of the records, if it has a cover under add_remove."""
    if not isinstance(leaf, events.TruncatedPoissonGaussian) or leaf.neighbours != "add_remove":
        return None
    return replace(leaf, dataset_size=leaf.dataset_size // 2) if Cover.of(leaf) else None


def attained_pair(event: events.Event) -> tuple[Direction, Direction]:
    """Return both orders of the laws that one pair of data sets produces, step for step.

    Raises ``OutOfReach`` as ``directions`` does, and for more than ``MAX_KINDS`` kinds of release.
    """
    releases = leaves(event)
    check_range(releases, alone=_is_alone(releases))
    if len(releases) > MAX_KINDS:
        raise OutOfReach(
            f"{len(releases)} kinds of release, at most {MAX_KINDS}.",
            "Merge releases that are alike.",
        )

    def direction(side: Side) -> Direction:
        laws = tuple((_attained(leaf, side), count) for leaf, count in releases)
        return Direction(laws=laws, attained=tuple(law for law, _ in laws))

    return direction("remove"), direction("add")


def check_range(parts: Sequence[tuple[events.Leaf, int]], *, alone: bool = False) -> None:
    """Raise ``OutOfReach`` if ``parts``, leaves and counts, are outside the method's range.

    The range of one release is wider if it is ``alone``.
    """
    steps = sum(count for _, count in parts)
    if steps > MAX_STEPS:
        raise OutOfReach(f"{steps} steps, at most {MAX_STEPS}.", "Account for fewer steps.")
    for leaf, _ in parts:
        probability, least = _sampling_probability(leaf), MIN_SAMPLING_PROBABILITY
        low, high = MIN_NOISE_MULTIPLIER, MAX_NOISE_MULTIPLIER
        is_sampled = not isinstance(leaf, events.Gaussian | events.Laplace | events.GaussianMixture)
        if steps <= MAX_SAMPLED_STEPS and is_sampled:
            least, high = MIN_SAMPLED_PROBABILITY, MAX_SAMPLED_NOISE
        noise = leaf.noise_multiplier
        match leaf:
            case events.PoissonSampledGroupGaussian() | events.TruncatedPoissonGroupGaussian():
                weights = binomial_weights(leaf.records, leaf.sampling_probability)
                noise /= max_likely_draws(weights)
                low = MIN_MIXTURE_NOISE
            case events.WithoutReplacementGroupGaussian():
                noise /= max_likely_draws(hypergeometric_weights(leaf))
                low = MIN_MIXTURE_NOISE
            case events.GaussianMixture(weights=weights):
                noise /= len(weights) - 1
                low = MIN_MIXTURE_NOISE if steps > 1 else MIN_SINGLE_RELEASE_NOISE
        if alone:
            least, low, high = 0.0, MIN_SINGLE_RELEASE_NOISE, math.inf
        if not low <= noise <= high:
            raise OutOfReach(
                f"noise multiplier {noise:g} is outside [{low:g}, {high:g}].",
                "Use another accountant for such noise.",
            )
        if probability < least:
            raise OutOfReach(
                f"sampling probability {probability:g} is below {least:g}.",
                "Round the sampling probability up.",
            )


def _is_alone(parts: Sequence[tuple[events.Leaf, int]]) -> bool:
    return len(parts) == 1 and parts[0][1] == 1 and isinstance(parts[0][0], _Attained)


def _sampling_probability(leaf: events.Leaf) -> float:
    match leaf:
        case events.Gaussian() | events.Laplace():
            return 1.0
        case events.GaussianMixture(weights=weights):
            return 1 - weights[0]
        case events.WithoutReplacementGaussian() | events.WithoutReplacementGroupGaussian():
            return leaf.sample_size / leaf.dataset_size
        case (
            events.RandomAllocationGaussian()
            | events.ReplacedAllocationGaussian()
            | events.BallsInBinsGaussian()
        ):
            raise _unsupported(leaf)
    return leaf.sampling_probability


def _unsupported(leaf: events.Leaf) -> Unsupported:
    engine = "monte_carlo" if isinstance(leaf, events.BallsInBinsGaussian) else "allocation"
    return Unsupported(
        f"the fourier engine does not support {type(leaf).__name__}.",
        f"Use the {engine} accountant.",
    )


def _has_two_orders(leaf: events.Leaf) -> bool:
    """Return whether the laws of the two orders of the hypotheses differ."""
    match leaf:
        case (
            events.PoissonSubsampledGaussian()
            | events.PoissonSampledGroupGaussian()
            | events.GaussianMixture()
        ):
            return leaf.pair == "add_remove"
        case events.TruncatedPoissonGaussian() | events.TruncatedPoissonGroupGaussian():
            return leaf.neighbours != "replace_one"
        case events.WithoutReplacementGroupGaussian():
            return leaf.zeroed
    return False


def _law(leaf: events.Leaf, side: Side, lots: Lots = "revealed") -> tuple[LossLaw, float]:
    """Return a law that dominates except with a probability, and that probability."""
    match leaf:
        case events.Gaussian(noise_multiplier=sigma):
            return NormalMixtureLaw(kind="gaussian", noise_multiplier=sigma), 0.0
        case events.Laplace(noise_multiplier=scale):
            return LaplaceLaw(scale=scale), 0.0
        case events.PoissonSubsampledGaussian(
            sampling_probability=q, noise_multiplier=sigma, pair=pair
        ):
            kind: Kind = "replace" if pair == "replace_one" else side
            law = NormalMixtureLaw(kind=kind, noise_multiplier=sigma, sampling_probability=q)
            return law, 0.0
        case events.PoissonSampledGroupGaussian():
            return group_law(leaf, added=side == "add"), 0.0
        case events.GaussianMixture(conceded=conceded):
            return group_law(leaf, added=side == "add"), conceded
        case events.WithoutReplacementGaussian(sample_size=sample, dataset_size=size):
            return worse_of_both(sample / size, 1, leaf.noise_multiplier), 0.0
        case events.WithoutReplacementGroupGaussian():
            return fixed_lot_law(leaf, restored=side == "add"), 0.0
        case events.TruncatedPoissonGaussian():
            return hidden_law(leaf, side) if lots == "hidden" else (truncated_law(leaf, side), 0.0)
        case events.TruncatedPoissonGroupGaussian():
            return truncated_group_law(leaf, added=side == "add", displaced=lots == "hidden")
        case (
            events.RandomAllocationGaussian()
            | events.ReplacedAllocationGaussian()
            | events.BallsInBinsGaussian()
        ):
            raise _unsupported(leaf)
        case _:
            assert_never(leaf)


def _attained(leaf: events.Leaf, side: Side) -> LossLaw:
    if isinstance(leaf, events.WithoutReplacementGaussian):
        return NormalMixtureLaw(
            kind=side,
            noise_multiplier=leaf.noise_multiplier,
            sampling_probability=leaf.sample_size / leaf.dataset_size,
            distance=2.0,
        )
    if isinstance(leaf, events.WithoutReplacementGroupGaussian):
        return fixed_lot_pair(leaf, added=side == "add")
    if isinstance(leaf, events.TruncatedPoissonGaussian):
        return attained_law(leaf, side)
    if isinstance(leaf, events.TruncatedPoissonGroupGaussian):
        return _attained(attained_sample(leaf), side)
    return _law(leaf, side)[0]


def _laws(leaf: events.Leaf, side: Side, lots: Lots) -> tuple[LossLaw, LossLaw, float]:
    """Return a dominating law, an attained one, and the probability that the first concedes."""
    if lots == "visible":
        law = _attained(leaf, side)
        if isinstance(leaf, events.TruncatedPoissonGaussian):
            law = visible_law(leaf, side)
        return law, law, 0.0
    law, conceded = _law(leaf, side, lots)
    return law, _attained(leaf, side), conceded
