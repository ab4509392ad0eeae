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
* A bracket asked to be narrower lies inside every wider one.
* The bracket of ε is at most ``relative_width`` of ε wide (1e-6 where that is larger)
  wherever rounding allows, 0.05 of ε beyond ten million steps, and some 0.005 with more than
  ``MAX_INVERTED`` kinds of release; where rounding does not allow it, it is wider, never wrong.
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
    FirstThatAnswers,
    LeastCurve,
    attained_event,
    orders_of,
    refined_curve,
)
from affidavit.accountants.chains import ChainedCurve, chained_epsilon, of_one_record
from affidavit.accountants.column_moments import BoundedByOrder, has_columns, moment_curve
from affidavit.accountants.composition import leaves
from affidavit.accountants.fourier.adaptive_pairs import AdaptiveCurve
from affidavit.accountants.fourier.cache import MAX_BYTES, MAX_LAWS, SharedCache
from affidavit.accountants.fourier.dominating_pairs import Direction, attained_pair, directions
from affidavit.accountants.fourier.evaluation import approximate_epsilon, transforms
from affidavit.accountants.fourier.grid_parameters import (
    Laws,
    choose_grid,
    saddle_at_delta,
    saddle_at_epsilon,
)
from affidavit.accountants.fourier.inversion import inverted_delta, inverted_epsilon
from affidavit.accountants.fourier.loss_laws import LaplaceLaw, RevealedMixtureLaw
from affidavit.accountants.fourier.refinement import (
    MIN_WIDTH,
    SAFE_DELTA,
    DeltaSearch,
    EpsilonSearch,
    nested,
)
from affidavit.accountants.fourier.schedules import FINER_CELLS, MAX_INVERTED, MAX_KINDS
from affidavit.accountants.fourier.single_release import delta_of, epsilon_of, single_release
from affidavit.accountants.protocol import (
    AccountantError,
    OutOfReach,
    PrivacyCurve,
    Unsupported,
    require_delta,
    require_epsilon,
)
from affidavit.accountants.registry import accountant
from affidavit.plan import (
    ChainOfNeighbours,
    Event,
    ReplacedAllocationGaussian,
    alternatives,
)

MIN_DELTA = 1e-30
MAX_DELTA = 0.999
MAX_EPSILON = 1000.0
"""Nats."""

_OF_BINS = ("allocation", "largest_bin")
"""Engines for the neighbours of a chain that this one does not cover."""
_LONG, _WIDE = 10_000_000, 0.05
"""Steps beyond which rounding leaves little of a narrow bracket, and the relative width then."""
_CLOSED = 1e-5
"""Relative width where a law has a closed form: other engines are as narrow there."""
_SCHEDULE = 5e-3
"""Relative width where releases are brought together (``schedules.py``)."""

_VISIBLE, _HIDDEN = 1e-3, 5e-4
"""Relative widths of what others show of a lot, of which the lower end alone is read, and of what
is hidden, by them or of the steps that a record is in, of which the upper end is."""

_MIN_REST = 0.1
"""Of δ, what has to be left after what is conceded."""

_HIDDEN_BY_ROUNDING = 0.05
"""Relative width from which on, below ``SAFE_DELTA``, rounding hides the losses that decide."""

_FAR_DELTAS, _NEGLIGIBLE_DELTA = (1e-100, 1e-50, 1e-26), 1e-22
"""Beyond the ε of one of the first, δ is only bounded, by less than the second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FourierAccountant:
    """Two-sided accounting of subsampled Gaussians by tilted transforms.

    ``relative_width`` is the requested width of the brackets, relative to ε (or δ). Where it is
    ``provable``, bounds for which the checker has no statement are left out.
    """

    relative_width: float = 1e-4
    provable: bool = False
    answers: SharedCache = field(
        default_factory=partial(SharedCache, MAX_LAWS), repr=False, compare=False
    )
    shared: SharedCache = field(
        default_factory=partial(SharedCache, MAX_BYTES), repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not 1e-7 <= self.relative_width <= 0.1:
            raise ValueError(f"relative_width must lie in [1e-7, 0.1], got {self.relative_width}")

    @property
    def name(self) -> str:
        """``fourier``."""
        return "fourier"

    @property
    def version(self) -> str:
        """The version of Affidavit, whose own method this is."""
        return __version__

    def provable_alone(self) -> FourierAccountant:
        """This accountant, of bounds that the checker proves."""
        return replace(self, provable=True)

    def curve(self, event: Event) -> PrivacyCurve:
        """The privacy curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        bounds = alternatives(event)
        if len(bounds) > 1 or isinstance(bounds[0], ChainOfNeighbours):
            return self._least_of(bounds)
        own, least = self._curve(event), attained_event(event)
        neighbours, records = of_one_record(event)
        if least == event and neighbours is None:
            return _after_concessions(own)
        # A transform that is tilted for what bounds the run would see little of what it attains.
        shown = self._curve(least)
        below = [shown, _after_concessions(own)]
        visible = directions(event, lots="visible")
        if any(isinstance(law, RevealedMixtureLaw) for one in visible for law, _ in one.laws):
            wide = max(own.relative_width, _VISIBLE)
            below.append(replace(own.of(visible), relative_width=wide))
        if neighbours is None:
            return BracketingCurve(above=_least(_above(event, own, shown)), below=tuple(below))
        return ChainedCurve(
            above=_above(event, own, shown),
            below=tuple(below),
            neighbours=_least(
                _above(neighbours, self._curve(neighbours), self._curve(attained_event(neighbours)))
            ),
            links=records,
        )

    def _least_of(self, bounds: Sequence[Event]) -> PrivacyCurve:
        """The least upper ends of events that each bound the run, none of which it attains."""
        if self.provable:
            bounds = [bound for bound in bounds if _is_stated(bound)]
        chains = [bound for bound in bounds if isinstance(bound, ChainOfNeighbours)]
        own = [bound for bound in bounds if not isinstance(bound, ChainOfNeighbours)]
        if not chains:
            return self._least_of_own(own)
        engines = (accountant("gaussian"), self, *map(accountant, _OF_BINS))
        return ChainedCurve(
            above=(self._least_of_own(own),) if own else (),
            below=(),
            neighbours=_least_upper_ends(
                [FirstThatAnswers(event=chain.event, engines=engines) for chain in chains]
            ),
            links=max(chain.links for chain in chains),
        )

    def _least_of_own(self, bounds: Sequence[Event]) -> LeastCurve | BoundedByOrder:
        moments = [bound for bound in bounds if has_columns(bound)]
        first, *others = [bound for bound in bounds if bound not in moments]
        # With little noise the first is what other engines would have answered.
        engines = (self, accountant("gaussian"), accountant("participations"))
        curves = [FirstThatAnswers(event=first, engines=engines)]
        rest = (engines[1], self, accountant("allocation"))
        curves += [FirstThatAnswers(event=other, engines=rest) for other in others]
        both = _least_upper_ends(curves)
        if not moments:
            return both
        return BoundedByOrder(
            both=both,
            removed=_least(tuple(map(moment_curve, moments))),
            added=tuple(self._added((first, *others))),
        )

    def _added(self, bounds: Sequence[Event]) -> Iterator[PrivacyCurve]:
        """Upper ends of one that is not there against one that is, for each of ``bounds``."""
        for bound in bounds:
            with suppress(AccountantError):
                yield orders_of(self.curve(bound))[1]

    def _curve(self, event: Event) -> FourierCurve:
        both, kinds = directions(event), len(leaves(event))
        laplace = [isinstance(law, LaplaceLaw) for one in both for law, _ in one.laws]
        if laplace and all(laplace):
            raise Unsupported(
                "a run of Laplace releases alone has losses that no tilt separates.",
                "Use the pld accountant.",
            )
        steps = max((direction.steps for direction in both), default=0)
        merged = kinds > MAX_KINDS
        widest = max(_SCHEDULE if merged else 0.0, _WIDE if steps > _LONG else 0.0)
        narrow = _CLOSED if any(laplace) else math.inf
        return FourierCurve(
            directions=both,
            finer=_finer(event, kinds) if merged else (),
            relative_width=max(min(self.relative_width, narrow), widest),
            answers=self.answers,
            shared=self.shared,
        )

    def attained(self, event: Event) -> tuple[FourierCurve, FourierCurve]:
        """The curves of one pair of data sets, one for each order of the two.

        Raises ``Unsupported`` or ``OutOfReach``.
        """
        return self._curve(event).of(attained_pair(event)).orders

    def approximate_epsilon(self, event: Event, delta: float) -> float:
        """About ε (nats) of ``event`` at ``delta``, for a search to begin at; not a bound."""
        results, errors = [], []
        for bound in alternatives(event):
            try:
                results.append(_approximate_epsilon(bound, delta))
            except AccountantError as error:
                errors.append(error)
        if not results:
            raise errors[0]
        return min(results)


def _above(event: Event, own: FourierCurve, shown: FourierCurve) -> tuple[PrivacyCurve, ...]:
    """Upper ends of ``event`` with cut lots revealed, its ``own``, and with them hidden if any are.

    ``shown`` is of what it attains.
    """
    hidden, revealed = directions(event, lots="hidden"), _after_concessions(own)
    if hidden == own.directions:
        return (revealed,)
    # The quicker one, mostly; where it meets what is attained the other adds nothing.
    return BracketingCurve(above=_after_concessions(own.of(hidden)), below=(shown,)), revealed


def _finer(event: Event, kinds: int) -> tuple[Direction, ...]:
    if kinds <= MAX_INVERTED:
        return directions(event, kinds=kinds)
    return directions(event, cells=FINER_CELLS)


def _is_stated(bound: Event) -> bool:
    """Whether the checker has statements for all of ``bound``, or for each link of a chain."""
    if has_columns(bound):
        return False
    return isinstance(bound, ChainOfNeighbours) or not any(
        isinstance(leaf, ReplacedAllocationGaussian) for leaf, _ in leaves(bound)
    )


def _least_upper_ends(curves: Sequence[PrivacyCurve]) -> LeastCurve:
    """Of bounds of one run, whose lower ends are not its own."""
    return LeastCurve(tuple(BracketingCurve(above=curve, below=()) for curve in curves))


def _approximate_epsilon(bound: Event, delta: float) -> float:
    if isinstance(bound, ChainOfNeighbours):
        return chained_epsilon(lambda at: approximate_epsilon(bound.event, at), delta, bound.links)
    return approximate_epsilon(bound, delta)


@dataclass(frozen=True, kw_only=True, slots=True)
class FourierCurve:
    """ε against δ of one event, over all its ``directions``; ``relative_width`` as above.

    Where these bring many kinds of release together, ``finer`` are directions with fewer together,
    or none, for a bound without a lattice.
    """

    directions: tuple[Direction, ...]
    relative_width: float
    finer: tuple[Direction, ...] = ()
    answers: SharedCache = field(
        default_factory=partial(SharedCache, MAX_LAWS), repr=False, compare=False
    )
    shared: SharedCache = field(
        default_factory=partial(SharedCache, MAX_BYTES), repr=False, compare=False
    )

    def with_width(self, relative_width: float) -> PrivacyCurve:
        """The same curve with brackets about ``relative_width`` of ε (or δ) wide.

        A narrower one than this is ``refined``, too.
        """
        curve = replace(self, relative_width=relative_width)
        return refined_curve(curve) if relative_width < self.relative_width else curve

    @property
    def refined(self) -> AdaptiveCurve | None:
        """Upper ends of lots of fixed size, if there are any, that take about a second each."""
        return AdaptiveCurve.of(self.directions, self.shared)

    @property
    def orders(self) -> tuple[FourierCurve, FourierCurve]:
        """The curves of P against Q, and of Q against P."""
        if len(self.directions) < 2:
            return self, self
        # Those of data sets of several sizes follow each other, each in both orders.
        one, other = (
            replace(self, directions=self.directions[side::2], finer=self.finer[side::2])
            for side in (0, 1)
        )
        return one, other

    def of(self, pairs: tuple[Direction, ...]) -> FourierCurve:
        """The curve of other ``pairs``."""
        return replace(self, directions=pairs, finer=())

    def epsilon(self, delta: float) -> Bracket:
        """Bracket of the smallest ε (nats) at ``delta``.

        Raises ``ValueError`` unless 0 < δ < 1, and ``OutOfReach`` for a δ or an ε outside the range
        of the method.
        """
        require_delta(delta)
        if not self.directions:
            return Bracket(lower=0.0, upper=0.0)
        return self._kept("epsilon", delta, lambda: self._epsilon(delta))

    def _epsilon(self, delta: float) -> Bracket:
        if laws := single_release(self.directions):
            return reduce(Bracket.larger, (epsilon_of(law, delta) for law in laws))
        inverted = inverted_epsilon(self.finer or self.directions, delta)
        return self._narrowed(inverted, MIN_WIDTH, lambda: self._epsilon_by_lattice(delta))

    def _epsilon_by_lattice(self, delta: float) -> Bracket:
        if not MIN_DELTA <= delta <= MAX_DELTA:
            raise OutOfReach(
                f"delta {delta:g} is outside [{MIN_DELTA:g}, {MAX_DELTA:g}].",
                "Ask within that range.",
            )
        both = self._laws
        guesses = [saddle_at_delta(laws, delta).epsilon for laws in both]
        if max(guesses) > MAX_EPSILON:
            raise OutOfReach(
                f"epsilon is about {max(guesses):.4g}, above {MAX_EPSILON:g}.",
                "Add noise or run fewer steps.",
            )
        order = sorted(range(len(guesses)), key=lambda i: -guesses[i])
        laws = [both[index] for index in order]
        result = nested(
            lambda widths: _epsilon(laws, delta, widths),
            self.relative_width,
            least=MIN_WIDTH,
            gapped=self._gapped,
        )
        if delta < SAFE_DELTA and result.width > _HIDDEN_BY_ROUNDING * result.upper:
            raise OutOfReach(
                f"at delta {delta:g} rounding hides the losses that decide.", "Choose a larger δ."
            )
        return result

    def delta(self, epsilon: float) -> Bracket:
        """Bracket of the smallest δ at ``epsilon`` (nats).

        Raises ``ValueError`` unless ε is finite and at least 0.
        """
        require_epsilon(epsilon)
        return self._kept("delta", epsilon, lambda: self._delta(epsilon))

    def _delta(self, epsilon: float) -> Bracket:
        if laws := single_release(self.directions):
            return reduce(Bracket.larger, (delta_of(law, epsilon) for law in laws))
        inverted = inverted_delta(self.finer or self.directions, epsilon)
        return self._narrowed(inverted, 0.0, lambda: self._delta_by_lattice(epsilon))

    def _delta_by_lattice(self, epsilon: float) -> Bracket:
        near, bound = [], 0.0
        for laws in self._laws:
            if epsilon >= _ceiling(laws) * (1 + 1e-12):
                continue
            beyond = self._beyond(laws, epsilon)
            if beyond is None:
                near.append(laws)
            else:
                bound = max(bound, beyond)
        result = self._nested(near, epsilon) if near else Bracket(lower=0.0, upper=0.0)
        return result.larger(Bracket(lower=0.0, upper=bound))

    def _beyond(self, laws: Laws, epsilon: float) -> float | None:
        """A bound of a direction's δ at ``epsilon`` where it is below what anybody asks for.

        δ falls with ε, so that a nearer ε bounds it. Rounding lets no lattice follow it there.
        """
        for far in _FAR_DELTAS:
            near = saddle_at_delta(laws, far).epsilon
            if 0 < near < epsilon:
                bound = self.of((laws.direction,)).delta(near).upper
                return bound if bound < _NEGLIGIBLE_DELTA else None
        return None

    def _nested(self, directions: Sequence[Laws], epsilon: float) -> Bracket:
        result = nested(
            lambda widths: _delta(directions, epsilon, widths),
            self.relative_width,
            least=0.0,
            gapped=self._gapped,
        )
        return result.intersect(Bracket(lower=0.0, upper=1.0))

    def _narrowed(
        self, inverted: Bracket | None, least: float, by_lattice: Callable[[], Bracket]
    ) -> Bracket:
        """The bracket without a lattice, and with one where that is wider than requested."""
        if inverted is None:
            return by_lattice()
        if inverted.width <= max(self.relative_width * inverted.upper, least):
            return inverted
        try:
            return inverted.intersect(by_lattice())
        except OutOfReach:
            return inverted

    def _kept(self, what: str, at: float, compute: Callable[[], Bracket]) -> Bracket:
        size = sum(len(direction.laws) for direction in (*self.directions, *self.finer))
        question = (what, self.directions, self.finer, at, self.relative_width)
        return self.answers.get(question, compute, lambda _: size)

    @property
    def _laws(self) -> tuple[Laws, ...]:
        return tuple(Laws.of(direction, self.shared) for direction in self.directions)

    @property
    def _gapped(self) -> bool:
        return any(direction.gapped for direction in self.directions)


def _least(curves: tuple[PrivacyCurve, ...]) -> PrivacyCurve:
    return LeastCurve(curves) if len(curves) > 1 else curves[0]


def _after_concessions(curve: FourierCurve) -> FourierCurve | UpperCurve:
    """``curve``, or its upper ends where its laws concede some of δ."""
    if all(direction.conceded == 0 for direction in curve.directions):
        return curve
    wide = max(curve.relative_width, _HIDDEN)
    return UpperCurve(curve=replace(curve, relative_width=wide))


@dataclass(frozen=True, kw_only=True, slots=True)
class UpperCurve:
    """Upper ends of a run by ``curve``, whose laws concede some of δ."""

    curve: FourierCurve

    def with_width(self, relative_width: float) -> UpperCurve:
        """The same with brackets about ``relative_width`` of ε (or δ) wide."""
        return UpperCurve(curve=replace(self.curve, relative_width=max(relative_width, _HIDDEN)))

    def epsilon(self, delta: float) -> Bracket:
        """``[0, ε]`` (nats) at ``delta``; raises as ``FourierCurve`` does."""
        require_delta(delta)
        rest = delta - self._conceded
        if rest <= _MIN_REST * delta:
            raise OutOfReach(
                f"δ = {delta:g} is too small for what the bound concedes.", "Choose a larger δ."
            )
        return Bracket(lower=0.0, upper=self.curve.epsilon(rest).upper)

    def delta(self, epsilon: float) -> Bracket:
        """``[0, δ]`` at ``epsilon`` (nats); raises as ``FourierCurve`` does."""
        upper = (self.curve.delta(epsilon).upper + self._conceded) * (1 + 1e-15)
        return Bracket(lower=0.0, upper=min(1.0, upper))

    @property
    def orders(self) -> tuple[UpperCurve, UpperCurve]:
        """The curves of P against Q, and of Q against P."""
        one, other = self.curve.orders
        return UpperCurve(curve=one), UpperCurve(curve=other)

    @property
    def _conceded(self) -> float:
        return max(direction.conceded for direction in self.curve.directions)


def _epsilon(directions: Sequence[Laws], delta: float, widths: Sequence[float]) -> Bracket:
    """ε over ``directions``, the worst first, by way of all ``widths``."""
    searches: dict[int, EpsilonSearch] = {}
    best = Bracket(lower=0.0, upper=math.inf)
    for width in widths:
        result = Bracket(lower=0.0, upper=0.0)
        for index, laws in enumerate(directions):
            if index not in searches:
                if index and _ruled_out(laws, result.upper, delta):
                    continue
                searches[index] = EpsilonSearch(laws, delta)
            result = result.larger(searches[index].refine(width))
        best = best.intersect(result)
    return best


def _delta(directions: Sequence[Laws], epsilon: float, widths: Sequence[float]) -> Bracket:
    """δ over ``directions`` by way of all ``widths``; what cannot be the worst is left as it is."""
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


def _ceiling(laws: Laws) -> float:
    return sum(law.ceiling * count for law, count in laws.direction.laws)


def _ruled_out(laws: Laws, epsilon: float, delta: float) -> bool:
    """Whether a coarse bound proves this direction's δ at ``epsilon`` to be below ``delta``."""
    if epsilon >= _ceiling(laws) * (1 + 1e-12):
        return True
    saddle, guess = saddle_at_epsilon(laws, epsilon, delta)
    gap = math.log(delta) - saddle.log_delta
    if gap < 1e-3:
        return False
    try:
        parameters = choose_grid(
            laws, saddle, epsilon, max(guess, delta * 1e-6), min(0.5, 0.3 * gap)
        )
        above, _ = transforms(laws, parameters, lower=False)
    except OutOfReach:
        return False
    return above.upper(epsilon) <= delta
