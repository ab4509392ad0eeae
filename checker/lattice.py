"""Measures on lattices that get coarser away from zero, and their composition in integers.

A measure holds masses in units of 2^-``bits``, always rounded up. Lattice j has the nodes i h 4^j
with |i| at most ``reach``: losses near zero are resolved finely, large ones as finely as they
matter. Every operation on a measure can only raise its bound (docs/theorems/checker.md, Theorems 1
and 2), so that no choice of lattices proves anything false.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from flint import arb, arb_poly, ctx, fmpz, fmpz_poly

MAX_BITS = 192
"""Bits of the units of a measure."""
MAX_NODES = 1 << 16
"""Nodes of all lattices of a grid on one side of zero."""
MAX_WORK = 1 << 23
"""Nodes of the grid times convolutions: less than a minute on one core."""
_COARSENING = 4
"""Ratio of the steps of consecutive lattices."""
_TAIL_UNITS = 1 << 20
"""Mass of a tail, in units, that becomes infinite instead of being carried on."""


ctx.prec = MAX_BITS + 32
"""Balls are sound at any precision. One constant precision for the process avoids refusals by races
between threads."""


class Unproved(Exception):
    """A refusal of the checker, with a stable code."""

    def __init__(self, code: str, message: str, remedy: str) -> None:
        super().__init__(message)
        self.code, self.message, self.remedy = code, message, remedy


def bad_witness(message: str) -> Unproved:
    """Return the refusal of a witness from which nothing follows."""
    return Unproved("bad_witness", f"The witness proves nothing: {message}.", "Search again.")


def no_statement(name: str) -> Unproved:
    """Return the refusal of an event or strategy that no theorem here covers."""
    return Unproved(
        "no_statement",
        f"The checker does not cover {name}.",
        "Rely on the certificate's accountants, or use a release of docs/theorems/checker.md.",
    )


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Lattices of steps ``step`` 4^j for j below ``scales``, with ``reach`` nodes on each side.

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
            and self.reach * self.scales <= MAX_NODES
            and 64 <= self.bits <= MAX_BITS
        ):
            raise bad_witness("a grid's numbers are out of range")

    @cached_property
    def steps(self) -> list[arb]:
        """The step of each lattice."""
        return [arb(self.step) * _COARSENING**j for j in range(self.scales)]

    @cached_property
    def filters(self) -> list[fmpz_poly]:
        """Upper, then lower shares, in units, of the nodes between two of the next lattice.

        Each is in falling order, so that every fourth term of a product is a node of that lattice.
        """
        uppers = [
            [self.share(arb(r), h, _COARSENING) for r in range(_COARSENING)] for h in self.steps
        ]
        falling = [[1 - u for u in row[::-1]] + row[::-1] for row in uppers]
        return [fmpz_poly([self.units(share) for share in row]) for row in falling]

    def share(self, place: arb, h: arb, width: int) -> arb:
        """Return the upper share of a mass at ``place`` h between nodes at 0 and ``width`` h."""
        if self.linear:
            return place / width
        return (-place * h).expm1() / (-width * h).expm1()

    def units(self, mass: arb) -> int:
        """Return ``mass`` in units, rounded up and at least zero."""
        return max(0, rounded_up(mass * fmpz(2) ** self.bits))

    def measure(self, points: Iterable[tuple[arb, arb]], infinite: arb) -> Measure:
        """Return the measure of ``points``, masses and places, moved to the neighbouring nodes."""
        nodes = [[0] * (2 * self.reach + 1) for _ in self.steps]
        above = self.units(infinite)
        for mass, place in points:
            j, upper = self._upper_node(place)
            if j is None:
                above += self.units(mass)
            elif upper == -self.reach:
                # A mass below the last node is raised to it.
                nodes[j][0] += self.units(mass)
            else:
                share = self.share(place / self.steps[j] - (upper - 1), self.steps[j], 1)
                nodes[j][upper - 1 + self.reach] += self.units(mass * (1 - share))
                nodes[j][upper + self.reach] += self.units(mass * share)
        return Measure(grid=self, parts=[fmpz_poly(masses) for masses in nodes], infinite=above)

    def _upper_node(self, place: arb) -> tuple[int | None, int]:
        """Return the finest lattice that holds ``place``, and its first node not below it."""
        for j, h in enumerate(self.steps):
            above = rounded_up(place / h)
            if abs(above) <= self.reach:
                return j, above
        return (None, 0) if above > 0 else (self.scales - 1, -self.reach)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """Masses on a grid's lattices, each from its first node on, and the ``infinite`` mass."""

    grid: Grid
    parts: list[fmpz_poly]
    infinite: int

    def __mul__(self, other: Measure) -> Measure:
        """Return a bound of the convolution; pairs meet on the coarser of their two lattices."""
        reach, scales, square = self.grid.reach, self.grid.scales, self is other
        result, infinite = [], self.infinite + other.infinite
        low = lows = carried = fmpz_poly()  # of finer lattices, carried to this one
        for j, (left, right) in enumerate(zip(self.parts, other.parts, strict=True)):
            product = left * (left + 2 * low) if square else left * (right + lows) + low * right
            masses, lost = self._without_tail(_in_units(product, self.grid.bits))
            # The product begins ``reach`` nodes below the lattice.
            own, infinite = masses.truncate(3 * reach + 1).right_shift(reach), infinite + lost
            result.append(own + carried)
            if j < scales - 1:
                carried = self._carry(j, masses - own.left_shift(reach), -2 * reach)
                low = self._carry(j, low + left, -reach)
                lows = low if square else self._carry(j, lows + right, -reach)
        # Masses beyond the last lattice are raised to its first node or to infinity.
        result[-1] += int(masses.truncate(reach)(1))
        infinite += int(masses.right_shift(3 * reach + 1)(1))
        return Measure(grid=self.grid, parts=result, infinite=infinite)

    def _without_tail(self, masses: fmpz_poly) -> tuple[fmpz_poly, int]:
        """Return ``masses`` of losses without a negligible tail, and the mass of that tail."""
        length, lost = len(masses), 0
        while not self.grid.linear and length and lost + masses[length - 1] <= _TAIL_UNITS:
            length -= 1
            lost += int(masses[length])
        return masses.truncate(length), lost

    def _carry(self, j: int, masses: fmpz_poly, first: int) -> fmpz_poly:
        """Return ``masses``, from node ``first`` of lattice j on, on the next lattice."""
        moved = masses.left_shift(first % _COARSENING) * self.grid.filters[j]
        nodes = fmpz_poly([moved[k] for k in range(_COARSENING - 1, len(moved), _COARSENING)])
        shift = first // _COARSENING + self.grid.reach
        return _in_units(nodes, self.grid.bits).left_shift(shift)

    def points(self) -> Iterable[tuple[arb, arb]]:
        """Yield masses and places of the nodes."""
        for h, masses in zip(self.grid.steps, self.parts, strict=True):
            for k, mass in enumerate(masses.coeffs()):
                if mass:
                    yield arb(mass) / fmpz(2) ** self.grid.bits, h * (k - self.grid.reach)

    def delta(self, epsilon: arb) -> arb:
        """Return ∫ (1 - e^{ε-l})_+ over the measure of losses l, a ball."""
        total, reach = arb(self.infinite), self.grid.reach
        for h, part in zip(self.grid.steps, self.parts, strict=True):
            masses, place = part.coeffs(), epsilon / h
            low, high = (bound + reach for bound in (-rounded_up(-place), rounded_up(place)))
            # At most one, unless the step is absurd, of which it is uncertain if it is above ε.
            for k in range(max(0, low), min(high, len(masses))):
                total += masses[k] * (-(epsilon - h * (k - reach)).expm1()).max(arb(0))
            if (start := max(0, high)) < len(masses):
                sums = arb_poly(masses[start:])
                first = (epsilon - h * (start - reach)).exp()
                total += sums(arb(1)) - first * sums((-h).exp())
        return total / fmpz(2) ** self.grid.bits


def _in_units(masses: fmpz_poly, bits: int) -> fmpz_poly:
    return -(-masses // (1 << bits))


def rounded_up(ball: arb) -> int:
    """Return the least integer certainly not below ``ball``; raises ``Unproved`` if not finite."""
    number = ball.upper().ceil().unique_fmpz()
    if number is None:
        raise bad_witness("a number is not finite")
    return int(number)


def power_product(factors: Sequence[tuple[Measure, int]]) -> Measure:
    """Return a bound of the convolution of measures to powers, by repeated squaring.

    Raises ``Unproved`` if that would take long.
    """
    convolutions = sum(count.bit_length() + count.bit_count() for _, count in factors)
    if any(convolutions * m.grid.reach * m.grid.scales > MAX_WORK for m, _ in factors):
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
