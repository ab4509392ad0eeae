"""What one event asks of the method: laws to compose, one list for each direction.

A bound from above needs laws that dominate every step of every adaptive run, in each
direction of the adjacency; a bound from below needs laws that some pair of data sets
really produces. ``directions`` names them; a leaf without a theorem is not in the union.

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

The two orders are taken for the composition as a whole: every add/remove step of one run
has the record on the same side. References: docs/theorems/poisson-add-remove.md,
poisson-replace-one.md, without-replacement.md, truncated-poisson.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, assert_never

from affidavit.accountants.composition import leaves
from affidavit.accountants.fourier.group_sampling import (
    fixed_lot_law,
    fixed_lot_pair,
    group_law,
    most_drawn,
    numbers_drawn,
    numbers_in_a_lot,
    worse_of_both,
)
from affidavit.accountants.fourier.loss_laws import Kind, LaplaceLaw, NormalMixtureLaw
from affidavit.accountants.fourier.privacy_loss import LossLaw
from affidavit.accountants.fourier.schedules import MAX_CELLS, MAX_KINDS, Part, gathered
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
from affidavit.plan import (
    BallsInBinsGaussian,
    Composed,
    Event,
    Gaussian,
    GaussianMixture,
    Laplace,
    Leaf,
    PoissonSampledGroupGaussian,
    PoissonSubsampledGaussian,
    RandomAllocationGaussian,
    RepeatAndSelect,
    Repeated,
    ReplacedAllocationGaussian,
    TruncatedPoissonGaussian,
    TruncatedPoissonGroupGaussian,
    WithoutReplacementGaussian,
    WithoutReplacementGroupGaussian,
)

Side = Literal["remove", "add"]
_Attained = Gaussian | PoissonSubsampledGaussian | PoissonSampledGroupGaussian | GaussianMixture
"""The releases whose dominating pair is attained, and is of mixtures of normals."""
Lots = Literal["revealed", "hidden", "visible"]
"""How a cut lot is bounded: from above with its fullness revealed, from above with the lots that
look like it (of users, with the same records under both hypotheses), or from below with others
that show it."""

NOISE_MULTIPLIERS, MIN_OF_MIXTURES, MIN_ALONE = (0.2, 1000.0), 0.06, 1e-6
SAMPLING_PROBABILITIES = (1e-6, 1.0)
MAX_STEPS = 10_000_000_000
"""The range of the method; steps are those of the whole run. The noise of a mixture is over its
largest move that is not hopelessly rare, which few of its outputs are near. One release alone needs
no lattice; with less noise its exponents would be rounded by more than they say."""
MAX_NOISE, MIN_PROBABILITY, FEWER_STEPS = 1e6, 1e-9, 100_000_000
"""The range of samples in runs of so many steps; of longer ones rounding leaves little there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Direction:
    """One order of the hypotheses: the laws of the steps with their counts.

    ``laws`` dominate; ``attained`` are those of a pair of data sets, step for step in the
    same order, and differ from ``laws`` only where no pair attains the dominating law. The laws
    dominate but for the probability ``conceded``, of all steps together, which adds to δ.
    """

    laws: tuple[tuple[LossLaw, int], ...]
    attained: tuple[LossLaw, ...]
    conceded: float = 0.0

    @property
    def steps(self) -> int:
        """How many releases are composed."""
        return sum(count for _, count in self.laws)

    @property
    def ends(self) -> tuple[Direction, Direction]:
        """The direction of ``laws`` alone, and of those that are ``attained``."""
        counts = (count for _, count in self.laws)
        return (
            replace(self, attained=tuple(law for law, _ in self.laws)),
            replace(self, laws=tuple(zip(self.attained, counts, strict=True))),
        )

    @property
    def gapped(self) -> bool:
        """Whether no pair of data sets attains some dominating law, so that brackets stay wide."""
        return any(law != other for (law, _), other in zip(self.laws, self.attained, strict=True))


def directions(
    event: Event, *, lots: Lots = "revealed", kinds: int = MAX_KINDS, cells: int = MAX_CELLS
) -> tuple[Direction, ...]:
    """The directions of ``event``, none for the empty composition; ``lots`` as above.

    Those of visible lots bound from below alone. More than so many ``kinds`` of release are brought
    together in so many ``cells``. Raises ``OutOfReach`` for a leaf outside the range
    in which the bounds were verified.
    """
    parts = leaves(event)
    check_range(parts, alone=_alone(parts))
    if not parts:
        return ()
    sides: Sequence[Side] = ("remove", "add") if any(map(_has_sides, parts)) else ("remove",)
    rest, together = gathered(parts, kinds, cells)
    result = []
    for side in sides:
        releases: list[Part] = []
        conceded = 0.0
        for leaf, count in rest:
            if isinstance(leaf, RepeatAndSelect):
                continue
            law, attained, lost = _laws(leaf, side, lots)
            releases.append((law, attained, count))
            conceded += count * lost
        releases += [cell.part(side) for cell in together]
        result.append(
            Direction(
                laws=tuple((law, count) for law, _, count in releases),
                attained=tuple(attained for _, attained, _ in releases),
                conceded=conceded * (1 + 1e-9),
            )
        )
    if lots != "hidden":
        return tuple(result)
    # Under add_remove a cover is one for data sets of at least half of the records.
    halves = {leaf: half for leaf, _ in parts if (half := _halved(leaf))}
    if not halves:
        return tuple(result)
    if len({half.dataset_size for half in halves.values()}) > 1:
        return directions(event)
    smaller = [Repeated(event=halves.get(leaf, leaf), count=count) for leaf, count in parts]
    return (*result, *directions(Composed(events=tuple(smaller))))


def _halved(leaf: Leaf) -> TruncatedPoissonGaussian | None:
    """``leaf`` of half of the records, if it has a cover under add_remove."""
    if not isinstance(leaf, TruncatedPoissonGaussian) or leaf.neighbours != "add_remove":
        return None
    return replace(leaf, dataset_size=leaf.dataset_size // 2) if Cover.of(leaf) else None


def attained_pair(event: Event) -> tuple[Direction, Direction]:
    """Both orders of laws that one pair of data sets produces, step for step.

    Raises ``OutOfReach`` as ``directions`` does, and for more kinds of release than are accounted
    for one by one.
    """
    releases = leaves(event)
    check_range(releases, alone=_alone(releases))
    if len(releases) > MAX_KINDS:
        raise OutOfReach(
            f"{len(releases)} kinds of release, at most {MAX_KINDS}.",
            "Merge releases that are alike.",
        )
    sides: tuple[Side, Side] = ("remove", "add")
    first, second = (
        tuple((_attained(leaf, side), count) for leaf, count in releases) for side in sides
    )
    return _own(first), _own(second)


def _own(laws: tuple[tuple[LossLaw, int], ...]) -> Direction:
    return Direction(laws=laws, attained=tuple(law for law, _ in laws))


def check_range(parts: Sequence[tuple[Leaf, int]], *, alone: bool = False) -> None:
    """Raise ``OutOfReach`` where ``parts``, leaves and counts, are outside the method's range.

    That of one release is wider where it is ``alone``.
    """
    steps = sum(count for _, count in parts)
    if steps > MAX_STEPS:
        raise OutOfReach(f"{steps} steps, at most {MAX_STEPS}.", "Account for fewer steps.")
    for leaf, _ in parts:
        probability, least = _sampling_probability(leaf), SAMPLING_PROBABILITIES[0]
        low, high = NOISE_MULTIPLIERS
        if steps <= FEWER_STEPS and not isinstance(leaf, Gaussian | Laplace | GaussianMixture):
            least, high = MIN_PROBABILITY, MAX_NOISE
        noise = leaf.noise_multiplier
        match leaf:
            case PoissonSampledGroupGaussian() | TruncatedPoissonGroupGaussian():
                noise /= most_drawn(numbers_drawn(leaf.records, leaf.sampling_probability))
                low = MIN_OF_MIXTURES
            case WithoutReplacementGroupGaussian():
                noise /= most_drawn(numbers_in_a_lot(leaf))
                low = MIN_OF_MIXTURES
            case GaussianMixture(weights=weights):
                noise /= len(weights) - 1
                low = MIN_OF_MIXTURES if steps > 1 else MIN_ALONE
        if alone:
            least, low, high = 0.0, MIN_ALONE, math.inf
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


def _alone(parts: Sequence[tuple[Leaf, int]]) -> bool:
    return len(parts) == 1 and parts[0][1] == 1 and isinstance(parts[0][0], _Attained)


def _sampling_probability(leaf: Leaf) -> float:
    match leaf:
        case Gaussian() | Laplace():
            return 1.0
        case (
            PoissonSubsampledGaussian(sampling_probability=probability)
            | PoissonSampledGroupGaussian(sampling_probability=probability)
            | TruncatedPoissonGaussian(sampling_probability=probability)
            | TruncatedPoissonGroupGaussian(sampling_probability=probability)
        ):
            return probability
        case GaussianMixture(weights=weights):
            return 1 - weights[0]
        case RandomAllocationGaussian() | ReplacedAllocationGaussian():
            raise Unsupported(
                "random allocation is not supported by the fourier engine.",
                "Use the allocation accountant.",
            )
        case (
            WithoutReplacementGaussian(sample_size=sample, dataset_size=size)
            | WithoutReplacementGroupGaussian(sample_size=sample, dataset_size=size)
        ):
            return sample / size
        case BallsInBinsGaussian():
            raise Unsupported(
                "balls in bins with correlated noise is not supported by the fourier engine.",
                "Use the monte_carlo accountant.",
            )
        case _:
            assert_never(leaf)


def _has_sides(part: tuple[Leaf, int]) -> bool:
    leaf, _ = part
    match leaf:
        case Gaussian():
            return False
        case (
            PoissonSubsampledGaussian(pair=pair)
            | PoissonSampledGroupGaussian(pair=pair)
            | GaussianMixture(pair=pair)
        ):
            return pair == "add_remove"
        case (
            TruncatedPoissonGaussian(neighbours=neighbours)
            | TruncatedPoissonGroupGaussian(neighbours=neighbours)
        ):
            return neighbours != "replace_one"
        case (
            WithoutReplacementGaussian()
            | WithoutReplacementGroupGaussian()
            | RandomAllocationGaussian()
            | ReplacedAllocationGaussian()
            | BallsInBinsGaussian()
            | Laplace()
        ):
            return False
        case _:
            assert_never(leaf)


def _law(leaf: Leaf, side: Side, lots: Lots = "revealed") -> tuple[LossLaw, float]:
    """A law that dominates but for a probability, and that probability."""
    match leaf:
        case Gaussian(noise_multiplier=sigma):
            return NormalMixtureLaw(kind="gaussian", noise_multiplier=sigma), 0.0
        case Laplace(noise_multiplier=scale):
            return LaplaceLaw(scale=scale), 0.0
        case PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma, pair=pair):
            kind: Kind = "replace" if pair == "replace_one" else side
            law = NormalMixtureLaw(kind=kind, noise_multiplier=sigma, sampling_probability=q)
            return law, 0.0
        case PoissonSampledGroupGaussian():
            return group_law(leaf, added=side == "add"), 0.0
        case GaussianMixture(conceded=conceded):
            return group_law(leaf, added=side == "add"), conceded
        case WithoutReplacementGaussian(sample_size=sample, dataset_size=size):
            return worse_of_both(sample / size, 1, leaf.noise_multiplier), 0.0
        case WithoutReplacementGroupGaussian():
            return fixed_lot_law(leaf), 0.0
        case TruncatedPoissonGaussian():
            return hidden_law(leaf, side) if lots == "hidden" else (truncated_law(leaf, side), 0.0)
        case TruncatedPoissonGroupGaussian():
            return truncated_group_law(leaf, added=side == "add", displaced=lots == "hidden")
        case RandomAllocationGaussian() | ReplacedAllocationGaussian() | BallsInBinsGaussian():
            raise Unsupported(
                f"the fourier engine does not support {type(leaf).__name__}.",
                "Use another accountant.",
            )
        case _:
            assert_never(leaf)


def _attained(leaf: Leaf, side: Side) -> LossLaw:
    if isinstance(leaf, WithoutReplacementGaussian):
        return NormalMixtureLaw(
            kind=side,
            noise_multiplier=leaf.noise_multiplier,
            sampling_probability=leaf.sample_size / leaf.dataset_size,
            distance=2.0,
        )
    if isinstance(leaf, WithoutReplacementGroupGaussian):
        return fixed_lot_pair(leaf, added=side == "add")
    if isinstance(leaf, TruncatedPoissonGaussian):
        return attained_law(leaf, side)
    if isinstance(leaf, TruncatedPoissonGroupGaussian):
        return _attained(attained_sample(leaf), side)
    return _law(leaf, side)[0]


def _laws(leaf: Leaf, side: Side, lots: Lots) -> tuple[LossLaw, LossLaw, float]:
    """A law that dominates, one that is attained, and the probability that the first concedes."""
    if lots == "visible":
        law = _attained(leaf, side)
        if isinstance(leaf, TruncatedPoissonGaussian):
            law = visible_law(leaf, side)
        return law, law, 0.0
    law, conceded = _law(leaf, side, lots)
    return law, _attained(leaf, side), conceded
