"""Measures on lattices that get coarser away from zero, and their composition in integers.

A measure holds masses in units of 2^-``bits``, always rounded up. Lattice j has the nodes i h 4^j
with |i| at most ``reach``: losses near zero are resolved finely, large ones as finely as they
matter. Whatever is done to a measure can only raise what it bounds (docs/theorems/checker.md,
Theorems 1 and 2), so that no choice of lattices, however bad, proves anything false.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from flint import arb, arb_poly, ctx, fmpz, fmpz_poly

MOST_BITS = 192
"""Of the units of a measure."""
MOST_NODES = 1 << 16
"""Nodes of all lattices of a grid on one side of zero."""
MOST_WORK = 1 << 23
"""Nodes of the grid times convolutions, less than a minute on one core."""
_FACTOR = 4
"""How much coarser each lattice is than the one before."""
_DUST = 1 << 20
"""Units of a tail that is not carried further."""


ctx.prec = MOST_BITS + 32
"""Balls are sound at any precision. One for the process, never changed, refuses nothing by a race
between threads."""


class Unproved(Exception):
    """What the checker does not prove, with a stable code."""

    def __init__(self, code: str, message: str, remedy: str) -> None:
        super().__init__(message)
        self.code, self.message, self.remedy = code, message, remedy


def bad_witness(message: str) -> Unproved:
    """The refusal of a witness from which nothing follows."""
    return Unproved("bad_witness", f"The witness proves nothing: {message}.", "Search again.")


def no_statement(name: str) -> Unproved:
    """The refusal of what no theorem here covers."""
    return Unproved(
        "no_statement",
        f"The checker has no statement about {name}.",
        "Rest on the accountants of the certificate, or use a release of docs/theorems/checker.md.",
    )


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Lattices of steps ``step`` 4^j for j below ``scales``, with ``reach`` nodes a side.

    ``linear`` lattices hold sums of likelihood ratios, others losses (nats).
    """

    step: float
    reach: int
    scales: int
    bits: int
    linear: bool = False

    def __post_init__(self) -> None:
        if not (
            0 < self.step < 1e30
            and self.reach >= 4
            and 1 <= self.scales <= 60
            and self.reach * self.scales <= MOST_NODES
            and 64 <= self.bits <= MOST_BITS
        ):
            raise bad_witness("a grid's numbers are out of range")

    @cached_property
    def steps(self) -> list[arb]:
        """The step of each lattice."""
        return [arb(self.step) * _FACTOR**j for j in range(self.scales)]

    @cached_property
    def filters(self) -> list[fmpz_poly]:
        """Upper, then lower shares, in units, of the nodes between two of the next lattice.

        Each is in falling order, so that a product's every fourth term is a node of that lattice.
        """
        uppers = [[self.share(arb(r), h, _FACTOR) for r in range(_FACTOR)] for h in self.steps]
        falling = [[1 - u for u in row[::-1]] + row[::-1] for row in uppers]
        return [fmpz_poly([self.units(share) for share in row]) for row in falling]

    def share(self, place: arb, h: arb, width: int) -> arb:
        """The upper share of a mass at ``place`` h between nodes at 0 and ``width`` h."""
        if self.linear:
            return place / width
        return (-place * h).expm1() / (-width * h).expm1()

    def units(self, mass: arb) -> int:
        """``mass`` in units, rounded up and at least zero."""
        return max(0, rounded_up(mass * fmpz(2) ** self.bits))

    def measure(self, points: Iterable[tuple[arb, arb]], infinite: arb) -> Measure:
        """The measure of ``points``, masses and places, moved to the nodes beside them."""
        nodes: list[dict[int, int]] = [{} for _ in self.steps]
        above = self.units(infinite)
        for mass, place in points:
            j, upper = self._upper_node(place)
            if j is None:
                above += self.units(mass)
                continue
            # What lies below the last node is raised to it.
            lower, share = upper - 1, arb(1)
            if upper > -self.reach:
                share = self.share(place / self.steps[j] - lower, self.steps[j], 1)
            else:
                lower = upper
            for node, part in ((lower, 1 - share), (upper, share)):
                nodes[j][node] = nodes[j].get(node, 0) + self.units(mass * part)
        parts = []
        for masses in nodes:
            first = min(masses, default=0)
            last = max(masses, default=-1)
            dense = [masses.get(i, 0) for i in range(first, last + 1)]
            parts.append(Part(first, fmpz_poly(dense)))
        return Measure(grid=self, parts=parts, infinite=above)

    def _upper_node(self, place: arb) -> tuple[int | None, int]:
        """The finest lattice that holds ``place``, and its first node not below it."""
        for j, h in enumerate(self.steps):
            above = rounded_up(place / h)
            if abs(above) <= self.reach:
                return j, above
        return (None, 0) if above > 0 else (self.scales - 1, -self.reach)


@dataclass(frozen=True, slots=True)
class Part:
    """Masses on consecutive nodes of one lattice, from the node ``first`` on."""

    first: int
    masses: fmpz_poly

    def __add__(self, other: Part) -> Part:
        first = min(self.first, other.first) if self and other else (self or other).first
        return Part(first, self._from(first) + other._from(first))

    def __bool__(self) -> bool:
        return len(self.masses) > 0

    def _from(self, first: int) -> fmpz_poly:
        gap = self.first - first if self else 0
        return self.masses.left_shift(gap) if gap else self.masses


_EMPTY = Part(0, fmpz_poly())


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """Masses on a grid's lattices, and ``infinite`` above all of them."""

    grid: Grid
    parts: list[Part]
    infinite: int

    def __mul__(self, other: Measure) -> Measure:
        """The convolution, at least. Each pair meets on the coarser of its two lattices."""
        grid, square = self.grid, self is other
        result, carried, infinite = [], _EMPTY, self.infinite + other.infinite
        low = lows = _EMPTY  # what lies on finer lattices, carried to this one
        for j in range(grid.scales):
            mine, theirs = self.parts[j], other.parts[j]
            if square:
                product = _times(mine, mine + low + low)
            else:
                product = _times(mine, theirs + lows) + _times(low, theirs)
            own, beyond, lost = self._divide(product, last=j == grid.scales - 1)
            result.append(own + carried)
            infinite += lost
            if j < grid.scales - 1:
                carried = self._carry(j, beyond)
                low = self._carry(j, low + mine)
                lows = low if square else self._carry(j, lows + theirs)
        return Measure(grid=grid, parts=result, infinite=infinite)

    def _divide(self, product: Part, *, last: bool) -> tuple[Part, Part, int]:
        """``product`` in units: what its lattice holds, what lies beyond, and what is infinite."""
        reach, first = self.grid.reach, product.first
        masses, lost = _in_units(product.masses, self.grid.bits), 0
        length = len(masses)
        if not self.grid.linear:
            while length and lost + masses[length - 1] <= _DUST:
                length -= 1
                lost += int(masses[length])
        start = min(max(0, -reach - first), length)
        stop = min(max(start, reach - first + 1), length)
        below, above = masses.truncate(start), masses.truncate(length).right_shift(stop)
        own = Part(first + start, masses.truncate(stop).right_shift(start))
        if not last:
            return own, Part(first, below) + Part(first + stop, above), lost
        raised = Part(-reach, fmpz_poly([below(1)]))
        return own + raised, _EMPTY, lost + int(above(1))

    def _carry(self, j: int, part: Part) -> Part:
        """``part`` of lattice j on the next one."""
        if not part:
            return _EMPTY
        pad = part.first % _FACTOR
        moved = part.masses.left_shift(pad) * self.grid.filters[j]
        nodes = fmpz_poly([moved[k] for k in range(_FACTOR - 1, len(moved), _FACTOR)])
        return Part((part.first - pad) // _FACTOR, _in_units(nodes, self.grid.bits))

    def points(self) -> Iterable[tuple[arb, arb]]:
        """Masses and places of the nodes."""
        for h, part in zip(self.grid.steps, self.parts, strict=True):
            for k, mass in enumerate(part.masses.coeffs()):
                if mass:
                    yield arb(mass) / fmpz(2) ** self.grid.bits, h * (part.first + k)

    def delta(self, epsilon: arb) -> arb:
        """∫ (1 - e^{ε-l})_+ over the measure of losses l, a ball."""
        total = arb(self.infinite)
        for h, part in zip(self.grid.steps, self.parts, strict=True):
            masses = part.masses.coeffs()
            place = epsilon / h
            low, high = -rounded_up(-place), rounded_up(place)
            start = max(0, high - part.first)
            # At most one, unless the step is absurd, which may lie above ε or not.
            for index in range(max(0, low - part.first), min(start, len(masses))):
                gain = -(epsilon - h * (part.first + index)).expm1()
                total += masses[index] * gain.max(arb(0))
            if start < len(masses):
                sums, first = arb_poly(masses[start:]), h * (part.first + start)
                total += sums(arb(1)) - (epsilon - first).exp() * sums((-h).exp())
        return total / fmpz(2) ** self.grid.bits


def _in_units(masses: fmpz_poly, bits: int) -> fmpz_poly:
    return -(-masses // (1 << bits))


def rounded_up(ball: arb) -> int:
    """The least integer that is certainly not below ``ball``; raises ``Unproved`` for no number."""
    number = ball.upper().ceil().unique_fmpz()
    if number is None:
        raise bad_witness("a number is not finite")
    return int(number)


def _times(left: Part, right: Part) -> Part:
    if not left or not right:
        return _EMPTY
    return Part(left.first + right.first, left.masses * right.masses)


def power_product(factors: Sequence[tuple[Measure, int]]) -> Measure:
    """At least the convolution of each measure as often as it says, by repeated squaring.

    Raises ``Unproved`` where that would take long.
    """
    convolutions = sum(count.bit_length() + count.bit_count() for _, count in factors)
    if any(convolutions * m.grid.reach * m.grid.scales > MOST_WORK for m, _ in factors):
        raise bad_witness("it would take too long")
    result: Measure | None = None
    for bit in reversed(range(max(count for _, count in factors).bit_length())):
        if result is not None:
            result = result * result
        for measure, count in factors:
            if count >> bit & 1:
                result = measure if result is None else result * measure
    assert result is not None
    return result
