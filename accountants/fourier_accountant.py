"""The accountant: both directions of the composition, each bracketed.

>>> from affidavit.plan.events import PoissonSubsampledGaussian, Repeated
>>> step = PoissonSubsampledGaussian(sampling_probability=0.01, noise_multiplier=1.0)
>>> epsilon = FourierAccountant().curve(Repeated(event=step, count=1000)).epsilon(1e-5)
>>> round(epsilon.lower, 3), round(epsilon.upper, 3)
(1.828, 1.828)

Guarantees
----------
* ``upper`` is at least, and ``lower`` at most, the tight value over both directions of
  the composition as a whole.
* Parameters out of range, and plans that would cost too much, are refused before work.
* A narrower bracket lies inside every wider one.
* The bracket of ε is at most ``relative_width`` of ε wide (1e-6 if that is larger) unless rounding
  prevents it; 0.05 of ε beyond ten million steps, and some 0.005 with more than
  ``MAX_KINDS_INVERTED`` kinds of release. A bracket that rounding widens is still a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce

from affidavit import __version__
from affidavit.accountants.bracket import Bracket
from affidavit.accountants.bracketing_curves import (
    BracketingCurve,
    FirstAvailableCurve,
    MinimumCurve,
    attained_event,
    orders_of,
    refined_curve,
)
from affidavit.accountants.chains import ChainedCurve, chained_epsilon, neighbour_event
from affidavit.accountants.column_moments import BoundedByOrder, has_columns, moment_curve
from affidavit.accountants.columns_of_nodes import ColumnsOfNodesCurve
from affidavit.accountants.composition import leaves
from affidavit.accountants.fixed_size_run import FixedSizeRunCurve
from affidavit.accountants.fourier.adaptive_pairs import AdaptiveCurve
from affidavit.accountants.fourier.cache import LAW_BYTES, SharedCache
from affidavit.accountants.fourier.direct_inversion import invert_delta, invert_epsilon
from affidavit.accountants.fourier.dominating_pairs import Direction, attained_pair, directions
from affidavit.accountants.fourier.evaluation import approximate_epsilon, bounding_curves
from affidavit.accountants.fourier.grid_parameters import (
    Laws,
    choose_grid,
    saddle_at_delta,
    saddle_at_epsilon,
)
from affidavit.accountants.fourier.loss_laws import LaplaceLaw, RevealedMixtureLaw
from affidavit.accountants.fourier.refinement import (
    MIN_RESOLVED_DELTA,
    MIN_WIDTH,
    DeltaSearch,
    EpsilonSearch,
    nested,
)
from affidavit.accountants.fourier.schedules import (
    MAX_CELLS_INVERTED,
    MAX_KINDS,
    MAX_KINDS_INVERTED,
)
from affidavit.accountants.fourier.single_release import delta_of, epsilon_of, single_release
from affidavit.accountants.mean_pattern import without_record
from affidavit.accountants.overlapping_bins import OverlappingBinsCurve
from affidavit.accountants.overlapping_columns import OverlappingColumnsCurve
from affidavit.accountants.protocol import (
    Accountant,
    AccountantError,
    OutOfReach,
    PrivacyCurve,
    Unsupported,
    provable_alone,
    require_delta,
    require_epsilon,
)
from affidavit.accountants.registry import accountant
from affidavit.plan import events

MIN_DELTA = 1e-30
MAX_DELTA = 0.999
MAX_EPSILON = 1000.0
"""The largest ε (nats) that a lattice answers."""

_MAX_NARROW_STEPS, _LONG_RUN_WIDTH = 10_000_000, 0.05
"""Steps beyond which rounding prevents narrow brackets, and the relative width then."""
_LAPLACE_WIDTH = 1e-5
"""Relative width if a law has a closed form, for which other engines are as narrow."""
_SCHEDULE_WIDTH = 5e-3
"""Relative width if kinds of release are merged (``schedules.py``)."""
_VISIBLE_LOTS_WIDTH, _CONCEDED_WIDTH = 1e-3, 5e-4
"""Relative widths of the curve of visible lots, of which only the lower end is used, and of curves
that concede some of δ, of which only the upper end is."""
_MIN_DELTA_SHARE = 0.1
"""Share of δ that must remain after the conceded probability."""
_MAX_TINY_DELTA_WIDTH = 0.05
"""Relative width from which on, below ``MIN_RESOLVED_DELTA``, rounding hides the decisive losses.
"""
_FAR_DELTAS, _NEGLIGIBLE_DELTA = (1e-100, 1e-50, 1e-26), 1e-22
"""Beyond the ε of one of the first, δ is only bounded, by less than the second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FourierAccountant:
    """Two-sided accounting of subsampled Gaussians by tilted transforms.

    ``relative_width`` is the requested width of the brackets, relative to ε (or δ). If it is
    ``provable``, bounds for which the checker has no statement are omitted.
    """

    relative_width: float = 1e-4
    provable: bool = False
    cache: SharedCache = field(default_factory=SharedCache, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1e-7 <= self.relative_width <= 0.1:
            raise ValueError(f"relative_width must lie in [1e-7, 0.1], got {self.relative_width}")

    @property
    def name(self) -> str:
        """``fourier``."""
        return "fourier"

    @property
    def version(self) -> str:
        """The version of Affidavit, which implements the method."""
        return __version__

    def provable_alone(self) -> FourierAccountant:
        """Return this accountant with only the bounds that the checker proves."""
        return replace(self, provable=True)

    def curve(self, event: events.Event) -> PrivacyCurve:
        """Return the privacy curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        bounds = events.alternatives(event)
        if len(bounds) > 1 or isinstance(bounds[0], events.ChainOfNeighbours):
            return self._curve_of_bounds(bounds)
        curve, least = self._curve(event), attained_event(event)
        neighbours, records = neighbour_event(event)
        if least == event and neighbours is None:
            return _after_concessions(curve)
        # A transform tilted for the bound of the run would resolve little of the attained law.
        attained_curve = self._curve(least)
        below = [attained_curve, _after_concessions(curve)]
        visible = directions(event, lots="visible")
        if any(isinstance(law, RevealedMixtureLaw) for one in visible for law, _ in one.laws):
            width = max(curve.relative_width, _VISIBLE_LOTS_WIDTH)
            below.append(replace(curve.of(visible), relative_width=width))
        above = _upper_curves(event, curve, attained_curve)
        if neighbours is None:
            return BracketingCurve(above=_least(above), below=tuple(below))
        links = _upper_curves(
            neighbours, self._curve(neighbours), self._curve(attained_event(neighbours))
        )
        return ChainedCurve(
            above=above, below=tuple(below), neighbours=_least(links), links=records
        )

    def _curve_of_bounds(self, bounds: Sequence[events.Event]) -> PrivacyCurve:
        """Return the least upper ends of events that each bound the run, which attains none."""
        if self.provable:
            bounds = [bound for bound in bounds if _has_statement(bound)]
        chains = [bound for bound in bounds if isinstance(bound, events.ChainOfNeighbours)]
        others = [bound for bound in bounds if not isinstance(bound, events.ChainOfNeighbours)]
        if not self.provable:
            chains = [chain for chain in chains if not _is_superseded(chain, others)]
        if not chains:
            return self._least_of_engines(others)
        # Imported here because most chains are of runs without correlated noise.
        from affidavit.accountants.largest_bin import LargestBinAccountant

        bins = LargestBinAccountant(lower_ends=False)
        engines = (accountant("gaussian"), self, self._engine("allocation"), bins)
        above: tuple[PrivacyCurve, ...] = (self._least_of_engines(others),) if others else ()
        for number, replaced in sorted({(chain.links, chain.replaced) for chain in chains}):
            events_of_links = dict.fromkeys(
                bound
                for chain in chains
                if (chain.links, chain.replaced) == (number, replaced)
                for bound in _bounds_alone(chain)
            )
            links = [
                run_curve(one) or FirstAvailableCurve(event=one, engines=engines)
                for one in events_of_links
            ]
            removed, added = links, None
            if replaced and not self.provable:
                both = [
                    self._orders_of_link(*one) for one in zip(events_of_links, links, strict=True)
                ]
                removed = [curve for curve, _ in both]
                added = _least_upper_ends([curve for _, curve in both])
            above = (
                ChainedCurve(
                    above=above,
                    below=(),
                    neighbours=_least_upper_ends(removed),
                    links=number,
                    added=added,
                ),
            )
        return above[0]

    def _orders_of_link(
        self, link: events.Event, curve: PrivacyCurve
    ) -> tuple[PrivacyCurve, PrivacyCurve]:
        """Return the curves of a removed and of an added record, where they are known apart."""
        if any(map(has_columns, events.alternatives(link))):
            with suppress(AccountantError):
                return orders_of(self.curve(link))
        return curve, curve

    def _engine(self, name: str) -> Accountant:
        return provable_alone(accountant(name)) if self.provable else accountant(name)

    def _least_of_engines(self, bounds: Sequence[events.Event]) -> MinimumCurve | BoundedByOrder:
        moments = [bound for bound in bounds if has_columns(bound)]
        runs = {bound: curve for bound in bounds if (curve := run_curve(bound)) is not None}
        first, *others = [bound for bound in bounds if bound not in (*moments, *runs)]
        # With little noise, other engines answer for the first bound.
        engines = (accountant("gaussian"), self, accountant("participations"))
        curves = [FirstAvailableCurve(event=first, engines=engines)]
        rest = (*engines[:2], self._engine("allocation"))
        curves += [FirstAvailableCurve(event=other, engines=rest) for other in others]
        both = _least_upper_ends([*curves, *runs.values()])
        if not moments:
            return both
        return BoundedByOrder(
            both=both,
            removed=_least(tuple(map(moment_curve, moments))),
            added=(
                *self._mean_pattern_curves(moments),
                *self._added_record_curves((first, *others)),
            ),
        )

    def _mean_pattern_curves(self, bounds: Sequence[events.Event]) -> Iterator[PrivacyCurve]:
        """Yield the upper ends of an added record for each of ``bounds``, runs of columns."""
        for bound in bounds:
            curve = without_record(bound, (accountant("gaussian"), self))
            if curve is not None:
                yield curve

    def _added_record_curves(self, bounds: Sequence[events.Event]) -> Iterator[PrivacyCurve]:
        """Yield the upper ends of an added record for each of ``bounds`` that has them."""
        for bound in bounds:
            with suppress(AccountantError):
                yield orders_of(self.curve(bound))[1]

    def _curve(self, event: events.Event) -> FourierCurve:
        both, kinds = directions(event), len(leaves(event))
        laplace = [isinstance(law, LaplaceLaw) for one in both for law, _ in one.laws]
        if laplace and all(laplace):
            raise Unsupported(
                "a run of Laplace releases alone has losses that no tilt separates.",
                "Use the pld accountant.",
            )
        steps = max((direction.steps for direction in both), default=0)
        is_merged = kinds > MAX_KINDS
        min_width = max(
            _SCHEDULE_WIDTH if is_merged else 0.0,
            _LONG_RUN_WIDTH if steps > _MAX_NARROW_STEPS else 0.0,
        )
        max_width = _LAPLACE_WIDTH if any(laplace) else math.inf
        return FourierCurve(
            directions=both,
            finer=_finer_directions(event, kinds) if is_merged else (),
            relative_width=max(min(self.relative_width, max_width), min_width),
            cache=self.cache,
        )

    def attained(self, event: events.Event) -> tuple[FourierCurve, FourierCurve]:
        """Return the curves of one pair of data sets, one for each order of the two.

        Raises ``Unsupported`` or ``OutOfReach``.
        """
        return self._curve(event).of(attained_pair(event)).orders

    def approximate_epsilon(self, event: events.Event, delta: float) -> float:
        """Return about ε (nats) of ``event`` at ``delta``, where a search begins; not a bound."""
        results, errors = [], []
        for bound in events.alternatives(event):
            try:
                results.append(_approximate_epsilon(bound, delta))
            except AccountantError as error:
                errors.append(error)
        if not results:
            raise errors[0]
        return min(results)


def _upper_curves(
    event: events.Event, curve: FourierCurve, attained_curve: FourierCurve
) -> tuple[PrivacyCurve, ...]:
    """Return upper ends of ``event`` with cut lots revealed, by ``curve``, and hidden if any are.

    ``attained_curve`` is the curve of the attained event.
    """
    hidden, revealed = directions(event, lots="hidden"), _after_concessions(curve)
    if hidden == curve.directions:
        return (revealed,)
    # The first is usually quicker; if it meets the attained curve, the other adds nothing.
    above = _after_concessions(curve.of(hidden))
    return BracketingCurve(above=above, below=(attained_curve,)), revealed


def _finer_directions(event: events.Event, kinds: int) -> tuple[Direction, ...]:
    if kinds <= MAX_KINDS_INVERTED:
        return directions(event, max_kinds=kinds)
    return directions(event, max_cells=MAX_CELLS_INVERTED)


def run_curve(bound: events.Event) -> PrivacyCurve | None:
    """Return the upper ends of a whole run that only a curve of its own bounds, else None."""
    match bound:
        case events.Composed(events=(only,)):
            return run_curve(only)
        case events.FixedSizeRun():
            return FixedSizeRunCurve(bound)
        case events.OverlappingBins():
            return OverlappingBinsCurve(bound)
        case events.OverlappingColumns(nodes=()):
            return OverlappingColumnsCurve(bound)
        case events.OverlappingColumns():
            return ColumnsOfNodesCurve(bound)
        case _:
            return None


def _has_statement(bound: events.Event) -> bool:
    """Return whether the checker has statements for all of ``bound``, or for a chain's links."""
    if has_columns(bound) or run_curve(bound) is not None:
        return False
    return isinstance(bound, events.ChainOfNeighbours) or not any(
        isinstance(leaf, events.ReplacedAllocationGaussian) for leaf, _ in leaves(bound)
    )


def _bounds_alone(chain: events.ChainOfNeighbours) -> tuple[events.Event, ...]:
    """Return the bounds of a link, or all of them as one event if some need others beside them."""
    bounds = events.alternatives(chain.event)
    if any(map(has_columns, bounds)):
        return (chain.event,)
    return bounds


def _is_superseded(chain: events.ChainOfNeighbours, others: Sequence[events.Event]) -> bool:
    """Return whether another bound is of the same lots for a record in the place of another.

    It costs less than a chain of two records that are not there, each twice as far from others.
    """
    doubled = {(2 * leaf.noise_multiplier, count) for leaf, count in _leaves_alone(chain.event)}
    return bool(doubled) and any(_placed_releases(bound) == doubled for bound in others)


def _placed_releases(bound: events.Event) -> set[tuple[float, int]] | None:
    """Return the noise of releases of a record in another's place, or None unless all are."""
    # Imported here because most runs have no allocation.
    from affidavit.accountants.random_allocation.replaced import is_in_reach

    result = set()
    for leaf, count in _leaves_alone(bound):
        if not isinstance(leaf, events.ReplacedAllocationGaussian) or not leaf.place:
            return None
        if not is_in_reach(leaf):
            return None
        result.add((leaf.noise_multiplier, count))
    return result


def _leaves_alone(event: events.Event) -> tuple[tuple[events.Leaf, int], ...]:
    """Return the leaves of ``event``, or nothing if it is not made of leaves alone."""
    try:
        return leaves(event)
    except Unsupported:
        return ()


def _least_upper_ends(curves: Sequence[PrivacyCurve]) -> MinimumCurve:
    """Return the least of bounds of one run, whose lower ends are not the run's."""
    return MinimumCurve(tuple(BracketingCurve(above=curve, below=()) for curve in curves))


def _approximate_epsilon(bound: events.Event, delta: float) -> float:
    if isinstance(bound, events.ChainOfNeighbours):
        return chained_epsilon(lambda at: approximate_epsilon(bound.event, at), delta, bound.links)
    return approximate_epsilon(_like_samples(bound), delta)


def _like_samples(bound: events.Event) -> events.Event:
    """Return ``bound`` with Poisson samples of about the cost of replaced records in bins."""
    parts = _leaves_alone(bound)
    if not any(isinstance(leaf, events.ReplacedAllocationGaussian) for leaf, _ in parts):
        return bound
    # Imported here because most runs have no allocation.
    from affidavit.accountants.random_allocation.replaced import sample_like

    return events.Composed(
        events=tuple(
            events.Repeated(event=sample_like(leaf), count=count * leaf.bins)
            if isinstance(leaf, events.ReplacedAllocationGaussian)
            else events.Repeated(event=leaf, count=count)
            for leaf, count in parts
        )
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FourierCurve:
    """ε against δ of one event, over all its ``directions``; ``relative_width`` as above.

    If these merge many kinds of release, ``finer`` are directions with fewer or no merged kinds,
    for a bound without a lattice.
    """

    directions: tuple[Direction, ...]
    relative_width: float
    finer: tuple[Direction, ...] = ()
    cache: SharedCache = field(default_factory=SharedCache, repr=False, compare=False)

    def with_width(self, relative_width: float) -> PrivacyCurve:
        """Return the same curve with brackets about ``relative_width`` of ε (or δ) wide.

        A curve narrower than this one is also ``refined``.
        """
        curve = replace(self, relative_width=relative_width)
        return refined_curve(curve) if relative_width < self.relative_width else curve

    @property
    def refined(self) -> AdaptiveCurve | None:
        """Upper ends of lots of fixed size, if there are any, that take about a second each."""
        return AdaptiveCurve.of(self.directions, self.cache)

    @property
    def orders(self) -> tuple[FourierCurve, FourierCurve]:
        """The curves of P against Q, and of Q against P."""
        if len(self.directions) < 2:
            return self, self
        # Those of data sets of several sizes follow each other, each in both orders.
        first, second = (
            replace(self, directions=self.directions[side::2], finer=self.finer[side::2])
            for side in (0, 1)
        )
        return first, second

    def of(self, pairs: tuple[Direction, ...]) -> FourierCurve:
        """Return the curve of other ``pairs``."""
        return replace(self, directions=pairs, finer=())

    def epsilon(self, delta: float) -> Bracket:
        """Return the bracket of the smallest ε (nats) at ``delta``.

        Raises ``ValueError`` unless 0 < δ < 1, and ``OutOfReach`` for a δ or an ε outside the range
        of the method.
        """
        require_delta(delta)
        if not self.directions:
            return Bracket(lower=0.0, upper=0.0)
        return self._cached("epsilon", delta, self._epsilon)

    def _epsilon(self, delta: float) -> Bracket:
        if laws := single_release(self.directions):
            return reduce(Bracket.larger, (epsilon_of(law, delta) for law in laws))
        inverted = invert_epsilon(self.finer or self.directions, delta)
        return self._narrowed(inverted, MIN_WIDTH, lambda: self._epsilon_by_lattice(delta))

    def _epsilon_by_lattice(self, delta: float) -> Bracket:
        if not MIN_DELTA <= delta <= MAX_DELTA:
            raise OutOfReach(
                f"delta {delta:g} is outside [{MIN_DELTA:g}, {MAX_DELTA:g}].",
                "Ask within that range.",
            )
        guesses = [(saddle_at_delta(laws, delta).epsilon, laws) for laws in self._laws]
        guesses.sort(key=lambda guess: -guess[0])
        largest = guesses[0][0]
        if largest > MAX_EPSILON:
            raise OutOfReach(
                f"epsilon is about {largest:.4g}, above {MAX_EPSILON:g}.",
                "Add noise or run fewer steps.",
            )
        result = nested(
            lambda widths: _search_epsilon([laws for _, laws in guesses], delta, widths),
            self.relative_width,
            min_width=MIN_WIDTH,
            has_gap=self._has_gap,
        )
        if delta < MIN_RESOLVED_DELTA and result.width > _MAX_TINY_DELTA_WIDTH * result.upper:
            raise OutOfReach(
                f"at delta {delta:g} rounding hides the losses that decide.", "Choose a larger δ."
            )
        return result

    def delta(self, epsilon: float) -> Bracket:
        """Return the bracket of the smallest δ at ``epsilon`` (nats).

        Raises ``ValueError`` unless ε is finite and at least 0.
        """
        require_epsilon(epsilon)
        return self._cached("delta", epsilon, self._delta)

    def _delta(self, epsilon: float) -> Bracket:
        if laws := single_release(self.directions):
            return reduce(Bracket.larger, (delta_of(law, epsilon) for law in laws))
        inverted = invert_delta(self.finer or self.directions, epsilon)
        return self._narrowed(inverted, 0.0, lambda: self._delta_by_lattice(epsilon))

    def _delta_by_lattice(self, epsilon: float) -> Bracket:
        near, bound = [], 0.0
        for laws in self._laws:
            if epsilon >= _max_loss(laws) * (1 + 1e-12):
                continue
            far = self._far_bound(laws, epsilon)
            if far is None:
                near.append(laws)
            else:
                bound = max(bound, far)
        result = Bracket(lower=0.0, upper=bound)
        if near:
            by_search = nested(
                lambda widths: _search_delta(near, epsilon, widths),
                self.relative_width,
                has_gap=self._has_gap,
            )
            result = by_search.intersect(Bracket(lower=0.0, upper=1.0)).larger(result)
        return result

    def _far_bound(self, laws: Laws, epsilon: float) -> float | None:
        """Return a bound of a direction's δ at ``epsilon`` if it is negligible.

        δ falls with ε, so that a nearer ε bounds it. Rounding lets no lattice resolve it there.
        """
        for delta in _FAR_DELTAS:
            near = saddle_at_delta(laws, delta).epsilon
            if 0 < near < epsilon:
                bound = self.of((laws.direction,)).delta(near).upper
                return bound if bound < _NEGLIGIBLE_DELTA else None
        return None

    def _narrowed(
        self, inverted: Bracket | None, min_width: float, by_lattice: Callable[[], Bracket]
    ) -> Bracket:
        """Return the bracket without a lattice, and with one if that is wider than requested."""
        if inverted is None:
            return by_lattice()
        if inverted.width <= max(self.relative_width * inverted.upper, min_width):
            return inverted
        try:
            return inverted.intersect(by_lattice())
        except OutOfReach:
            return inverted

    def _cached(self, name: str, at: float, compute: Callable[[float], Bracket]) -> Bracket:
        laws = sum(len(direction.laws) for direction in (*self.directions, *self.finer))
        key = (name, self.directions, self.finer, at, self.relative_width)
        return self.cache.get(key, partial(compute, at), lambda _: LAW_BYTES * laws)

    @property
    def _laws(self) -> tuple[Laws, ...]:
        return tuple(Laws.of(direction, self.cache) for direction in self.directions)

    @property
    def _has_gap(self) -> bool:
        return any(direction.has_gap for direction in self.directions)


def _least(curves: tuple[PrivacyCurve, ...]) -> PrivacyCurve:
    return MinimumCurve(curves) if len(curves) > 1 else curves[0]


def _after_concessions(curve: FourierCurve) -> FourierCurve | ConcedingCurve:
    """Return ``curve``, or its upper ends if its laws concede some of δ."""
    if all(direction.conceded == 0 for direction in curve.directions):
        return curve
    width = max(curve.relative_width, _CONCEDED_WIDTH)
    return ConcedingCurve(curve=replace(curve, relative_width=width))


@dataclass(frozen=True, kw_only=True, slots=True)
class ConcedingCurve:
    """Upper ends of a run by ``curve``, whose laws concede some of δ."""

    curve: FourierCurve

    def with_width(self, relative_width: float) -> ConcedingCurve:
        """Return the same with brackets about ``relative_width`` of ε (or δ) wide."""
        width = max(relative_width, _CONCEDED_WIDTH)
        return ConcedingCurve(curve=replace(self.curve, relative_width=width))

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[0, ε]`` (nats) at ``delta``; raises as ``FourierCurve`` does."""
        require_delta(delta)
        rest = delta - self._conceded
        if rest <= _MIN_DELTA_SHARE * delta:
            raise OutOfReach(
                f"δ = {delta:g} is too small for the probability that the bound concedes.",
                "Choose a larger δ.",
            )
        return Bracket(lower=0.0, upper=self.curve.epsilon(rest).upper)

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[0, δ]`` at ``epsilon`` (nats); raises as ``FourierCurve`` does."""
        upper = (self.curve.delta(epsilon).upper + self._conceded) * (1 + 1e-15)
        return Bracket(lower=0.0, upper=min(1.0, upper))

    @property
    def orders(self) -> tuple[ConcedingCurve, ConcedingCurve]:
        """The curves of P against Q, and of Q against P."""
        first, second = self.curve.orders
        return ConcedingCurve(curve=first), ConcedingCurve(curve=second)

    @property
    def _conceded(self) -> float:
        return max(direction.conceded for direction in self.curve.directions)


def _search_epsilon(directions: Sequence[Laws], delta: float, widths: Sequence[float]) -> Bracket:
    """Return ε over ``directions``, the worst first, by way of all ``widths``."""
    searches: dict[int, EpsilonSearch] = {}
    best = Bracket(lower=0.0, upper=math.inf)
    for width in widths:
        result = Bracket(lower=0.0, upper=0.0)
        for index, laws in enumerate(directions):
            if index not in searches:
                if index and _is_ruled_out(laws, result.upper, delta):
                    continue
                searches[index] = EpsilonSearch(laws, delta)
            result = result.larger(searches[index].refine(width))
        best = best.intersect(result)
    return best


def _search_delta(directions: Sequence[Laws], epsilon: float, widths: Sequence[float]) -> Bracket:
    """Return δ over ``directions`` by way of all ``widths``; only the worst are refined."""
    searches = [DeltaSearch(laws, epsilon) for laws in directions]
    searches.sort(key=lambda search: -search.bracket.upper)
    best = Bracket(lower=0.0, upper=1.0)
    for width in widths:
        result = Bracket(lower=0.0, upper=0.0)
        for search in searches:
            if search.bracket.upper > result.lower:
                result = result.larger(search.refine(width))
        best = best.intersect(result)
    return best


def _max_loss(laws: Laws) -> float:
    return sum(law.max_loss * count for law, count in laws.direction.laws)


def _is_ruled_out(laws: Laws, epsilon: float, delta: float) -> bool:
    """Return whether a coarse bound proves that δ at ``epsilon`` is below ``delta``."""
    if epsilon >= _max_loss(laws) * (1 + 1e-12):
        return True
    saddle, guess = saddle_at_epsilon(laws, epsilon, delta)
    gap = math.log(delta) - saddle.log_delta
    if gap < 1e-3:
        return False
    try:
        parameters = choose_grid(
            laws, saddle, epsilon, max(guess, delta * 1e-6), min(0.5, 0.3 * gap)
        )
        above, _ = bounding_curves(laws, parameters, lower=False)
    except OutOfReach:
        return False
    return above.upper(epsilon) <= delta
