"""Random plans over the whole declared range, and the laws that every answer must keep.

The tests check a fixed number, ``make soak`` an unlimited number. Each broken law is reported with
a plan that can be pasted.

python -m tests.accountants.soundness [SEED [NUMBER]]
"""

from __future__ import annotations

import itertools
import math
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mpmath
import numpy as np

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.accountants.protocol import OutOfReach, Unsupported
from affidavit.accountants.registry import accountant
from affidavit.plan import events


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One leaf run ``steps`` times, and the δ asked for."""

    leaf: events.PoissonSubsampledGaussian
    steps: int
    delta: float

    @property
    def event(self) -> events.Event:
        """The event that is accounted for."""
        return events.Repeated(event=self.leaf, count=self.steps)

    def with_(self, *, q: float = 1.0, sigma: float = 1.0, steps: int = 0) -> events.Event:
        """The event with the sampling rate and noise multiplied, and steps added."""
        leaf = events.PoissonSubsampledGaussian(
            sampling_probability=self.leaf.sampling_probability * q,
            noise_multiplier=self.leaf.noise_multiplier * sigma,
            pair=self.leaf.pair,
        )
        return events.Repeated(event=leaf, count=self.steps + steps)


def draw(source: np.random.Generator) -> Case:
    """A case, log-uniform in everything."""

    def between(low: float, high: float) -> float:
        return math.exp(source.uniform(math.log(low), math.log(high)))

    pair: events.SubsampledPair = "replace_one" if source.uniform() < 0.4 else "add_remove"
    leaf = events.PoissonSubsampledGaussian(
        sampling_probability=between(1e-6, 0.9), noise_multiplier=between(0.21, 950.0), pair=pair
    )
    steps = 1 if source.uniform() < 0.15 else round(between(1.0, 9e6))
    return Case(leaf=leaf, steps=steps, delta=between(1e-20, 0.1))


def ours(event: events.Event, delta: float, width: float = 1e-4) -> Bracket | None:
    """Our bracket, None where the plan is refused."""
    try:
        return FourierAccountant(relative_width=width).curve(event).epsilon(delta)
    except OutOfReach:
        return None


def is_narrow(bracket: Bracket) -> bool:
    """Whether the bracket is as narrow as promised."""
    return bracket.width <= max(1.0001e-4 * bracket.upper, 1.001e-6)


def one_release_delta(leaf: events.PoissonSubsampledGaussian, epsilon: float) -> mpmath.mpf:
    """δ of one release in closed form; removal is the larger direction."""
    with mpmath.workdps(60):
        q, mu = mpmath.mpf(leaf.sampling_probability), 1 / mpmath.mpf(leaf.noise_multiplier)
        alpha = mpmath.e ** mpmath.mpf(epsilon)
        if leaf.pair == "replace_one":
            scale = (1 - q) / q * mpmath.e ** (mu * mu / 2)
            half = mpmath.log(alpha) / 2
            z = (half + mpmath.asinh(scale * mpmath.sinh(half))) / mu
            p = (1 - q) * mpmath.ncdf(-z) + q * mpmath.ncdf(mu - z)
            return p - alpha * ((1 - q) * mpmath.ncdf(-z) + q * mpmath.ncdf(-mu - z))
        inner = (alpha - (1 - q)) / q
        z = mpmath.log(inner) / mu
        return q * (mpmath.ncdf(mu / 2 - z) - inner * mpmath.ncdf(-mu / 2 - z))


def _refines(case: Case, base: Bracket) -> bool:
    finer = ours(case.event, case.delta, 1e-5)
    return finer is not None and base.lower <= finer.lower <= finer.upper <= base.upper


def _inverts(case: Case, base: Bracket) -> bool:
    curve = FourierAccountant().curve(case.event)
    if base.upper == 0:
        return curve.delta(0.0).lower <= case.delta
    above, below = curve.delta(base.upper), curve.delta(base.lower)
    return above.lower <= case.delta <= below.upper or base.lower == 0


def _orders(case: Case, base: Bracket) -> bool:
    worse = [
        (case.with_(q=1.07), case.delta),
        (case.with_(sigma=1 / 1.04), case.delta),
        (case.with_(steps=1 + case.steps // 30), case.delta),
        (case.event, case.delta * 0.8),
    ]
    better = [(case.with_(q=0.93), case.delta), (case.with_(sigma=1.04), case.delta)]
    up = (ours(event, delta) for event, delta in worse if delta >= 1e-20)
    down = (ours(event, delta) for event, delta in better)
    return all(result is None or base.lower <= result.upper for result in up) and all(
        result is None or result.lower <= base.upper for result in down
    )


def _splits(case: Case, base: Bracket) -> bool:
    part = case.steps // 3
    pieces = (
        events.Repeated(event=case.leaf, count=case.steps - part),
        events.Repeated(event=case.leaf, count=part),
    )
    return ours(events.Composed(events=pieces), case.delta) == base


def _near_phases_meet(case: Case, base: Bracket) -> bool:
    part = case.steps // 3
    near = events.PoissonSubsampledGaussian(
        sampling_probability=case.leaf.sampling_probability,
        noise_multiplier=case.leaf.noise_multiplier * (1 + 1e-13),
        pair=case.leaf.pair,
    )
    pieces = (
        events.Repeated(event=case.leaf, count=case.steps - part),
        events.Repeated(event=near, count=part),
    )
    result = ours(events.Composed(events=pieces), case.delta)
    turned = ours(events.Composed(events=pieces[::-1]), case.delta)
    return result is not None and result == turned and result.meets(base, 1e-9)


def _meets_the_closed_form(case: Case, base: Bracket) -> bool:
    if case.steps > 1:
        return True
    above = one_release_delta(case.leaf, base.upper) <= case.delta
    return above and (base.lower == 0 or one_release_delta(case.leaf, base.lower) >= case.delta)


def _below_the_unsampled(case: Case, base: Bracket) -> bool:
    distance = 2.0 if case.leaf.pair == "replace_one" else 1.0
    full = events.Gaussian(noise_multiplier=case.leaf.noise_multiplier / distance)
    try:
        whole = (
            accountant("gaussian")
            .curve(events.Repeated(event=full, count=case.steps))
            .epsilon(case.delta)
        )
    except OutOfReach:
        return True
    return base.lower <= whole.upper


def _meets_other_engines(case: Case, base: Bracket) -> bool:
    """PLD where it is clean (δ >= 1e-9), and where it takes no more than seconds."""
    work = case.steps if case.leaf.pair == "add_remove" else math.inf
    if case.delta < 1e-9 or work > 2e4 or not 0.05 < base.upper < 50:
        return True
    try:
        theirs = accountant("pld").curve(case.event).epsilon(case.delta)
    except (OutOfReach, Unsupported):
        return True
    return base.meets(theirs, 1e-3)


LAWS: dict[str, Callable[[Case, Bracket], bool]] = {
    "refining shrinks the bracket inside the old one": _refines,
    "delta inverts epsilon": _inverts,
    "monotone in rate, noise, steps and delta": _orders,
    "splitting a phase changes nothing": _splits,
    "phases that hardly differ, in any order, meet": _near_phases_meet,
    "one release meets its closed form": _meets_the_closed_form,
    "sampling never costs more than none": _below_the_unsampled,
    "other engines meet": _meets_other_engines,
}


def broken(case: Case) -> Iterator[str]:
    """The laws that ``case`` breaks, each with the plan."""
    base = ours(case.event, case.delta)
    if base is None:
        return
    for law, holds in LAWS.items():
        if not holds(case, base):
            yield f"{law}: {base}\n  {case!r}"


def main(arguments: list[str]) -> int:
    """Draw and check until interrupted or ``NUMBER`` is reached; 1 if a law was broken."""
    seed = int(arguments[0]) if arguments else secrets.randbits(32)
    number = int(arguments[1]) if len(arguments) > 1 else None
    source = np.random.default_rng(seed)
    sys.stdout.write(f"seed {seed}\n")
    failures = answered = narrow = 0
    try:
        for index in itertools.count() if number is None else range(number):
            case = draw(source)
            for line in broken(case):
                failures += 1
                sys.stdout.write(f"seed {seed}, case {index}: {line}\n")
            base = ours(case.event, case.delta)
            if base is not None:
                answered += 1
                narrow += is_narrow(base)
            if index % 20 == 19:
                sys.stdout.write(
                    f"{index + 1} plans, {answered} answered, {narrow} as narrow as promised, "
                    f"{failures} laws broken\n"
                )
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
