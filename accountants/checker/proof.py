"""δ(ε) ≤ x, proved from a witness in ball arithmetic.

With Φ(z) = E e^{zL} of the whole run, G(y) = e^{sy} δ(y) ≥ 0 and η = 2π/W, Poisson summation is

    Σ_j G(ε + jW) = 1/W Σ_k Φ(s + ikη) e^{-ikηε} / ((s + ikη)(s + 1 + ikη)),

and δ(ε) = e^{-sε} G(ε) is at most e^{-sε} times the left side. Tilt s, window W, cut of the
sum and extra noise come from the witness: bad ones make the bound larger, never wrong.
docs/theorems/checker.md has the proof. Nothing here comes from the engines: only events do.

>>> from affidavit.plan import Gaussian
>>> prove(Witness(epsilon="4.4", delta="1e-5", runs=()), Gaussian(noise_multiplier=1.0)).theorems
('gaussian',)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from flint import acb, arb

from affidavit.accountants.checker.dominating_pairs import Direction, laws
from affidavit.accountants.checker.enclosures import Moments, Quadrature, Unproved, at_precision
from affidavit.plan import Event

MOST_FREQUENCIES = 30_000
"""Terms of one sum."""
_DECIMAL = re.compile(r"\d{1,40}(\.\d{1,40})?([eE][+-]?\d{1,3})?", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunWitness:
    """What a search found for one direction of the adjacency; none of it needs to be right.

    ``tilt`` in 1/nat, ``window`` in nats; ``noise`` is the Gaussian-DP parameter of a release
    that is added so that the sum ends. Its first ``frequencies`` terms are summed, the next
    bounded in ``blocks``, each (terms of one, how many of them). ``rules`` sum the moments, one
    for each kind of release that is not plainly Gaussian, in order.
    """

    tilt: float
    window: float
    noise: float
    frequencies: int
    blocks: tuple[tuple[int, int], ...]
    rules: tuple[Quadrature, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Witness:
    """The bound claimed, as decimals, and a ``RunWitness`` for each direction."""

    epsilon: str
    delta: str
    runs: tuple[RunWitness, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """A run is (``epsilon``, ``delta``)-DP by the statements named by ``theorems``."""

    epsilon: str
    delta: str
    theorems: tuple[str, ...]


def prove(witness: Witness, event: Event) -> Proof:
    """The bound that ``witness`` claims, where it proves it of ``event``.

    Raises ``Unproved`` where it does not, or where no theorem here covers the event.
    """
    at_precision()
    epsilon, delta = _decimal(witness.epsilon), _decimal(witness.delta)
    if not (epsilon >= 0 and delta > 0):
        raise Unproved("bad_witness", "ε must not be negative, and δ positive.", "Search again.")
    directions = laws(event)
    bounds = [_gaussian_delta(_mu_squared(direction), epsilon) for direction in directions[:1]]
    if any(law.mixture is not None for law, _ in directions[0]):
        if len(witness.runs) != len(directions):
            raise Unproved(
                "bad_witness", f"{len(directions)} directions are needed.", "Search again."
            )
        bounds = [
            Transform(direction, run).delta(epsilon)
            for direction, run in zip(directions, witness.runs, strict=True)
        ]
    for bound in bounds:
        if not bound <= delta:
            raise Unproved(
                "not_proved",
                f"The witness proves δ ≤ {bound.upper().str(6, radius=False)} at "
                f"ε = {witness.epsilon}, which is above {witness.delta}.",
                "Search for another witness, or state a larger ε.",
            )
    names = {law.theorem for direction in directions for law, _ in direction}
    return Proof(epsilon=witness.epsilon, delta=witness.delta, theorems=tuple(sorted(names)))


class Transform:
    """The moments of a run at the frequencies of a witness, from which δ is bounded at any ε."""

    def __init__(self, direction: Direction, witness: RunWitness) -> None:
        at_precision()
        s, noise, count = arb(witness.tilt), arb(witness.noise), witness.frequencies
        mixtures = [(law.mixture, times) for law, times in direction if law.mixture is not None]
        self._tilt, self._window = s, arb(witness.window)
        if not _in_range(witness) or len(witness.rules) != len(mixtures):
            raise Unproved("bad_witness", "A witness's numbers are out of range.", "Search again.")
        self._eta = eta = 2 * arb.pi() / self._window
        end = count + sum(size * times for size, times in witness.blocks)
        self._mu_squared = _mu_squared(direction) + noise * noise
        laws_used = [
            (mixture.moments(s, eta * end, rule), times)
            for (mixture, times), rule in zip(mixtures, witness.rules, strict=True)
        ]
        near = [moments.at(arb(0), eta, count) for moments, _ in laws_used]
        self._terms = []
        for k in range(count):
            z = acb(s, eta * k)
            value = (self._mu_squared * (z * z + z) / 2).exp() / (z * (z + 1))
            for row, (_, times) in zip(near, laws_used, strict=True):
                value *= row[k] ** times
            self._terms.append(value)
        rest, start = arb(0), count
        for size, blocks in witness.blocks:
            rest += self._blocks(laws_used, near, start, size, blocks)
            start += size * blocks
        whole = arb(1)
        for row, (_, times) in zip(near, laws_used, strict=True):
            whole *= row[0].real ** times
        # Σ_{k≥start} |Φ| / t_k², Φ(s) e^{-μ²t²/2} with the Gaussian part's μ, is the last term.
        self._rest = rest + whole * self._gaussian(eta * start) / (eta * eta * (start - 1))

    def _gaussian(self, t: arb) -> arb:
        """|e^{μ²(z²+z)/2}| at z = s + it, μ that of the Gaussian part; it decreases in t."""
        s = self._tilt
        return arb((self._mu_squared * (s * s + s - t * t) / 2).exp())

    def _blocks(
        self,
        laws_used: list[tuple[Moments, int]],
        near: list[list[acb]],
        start: int,
        size: int,
        blocks: int,
    ) -> arb:
        """At least Σ |Φ| / t² over ``blocks`` blocks of ``size`` terms from ``start`` on.

        By |ψ(t) - ψ(t')|² ≤ 2 (1 - Re ψ(t - t')) for the characteristic function ψ = φ(s + i·)/φ(s)
        of the tilted loss, which may be shifted: |φ(t')| ≤ |φ(t)| + √(2φ(s)(φ(s) - |φ(t - t')|)).
        """
        eta, half = self._eta, size // 2
        totals = [
            self._gaussian(eta * (start + size * k)) * size / (eta * (start + size * k)) ** 2
            for k in range(blocks)
        ]
        for row, (moments, times) in zip(near, laws_used, strict=True):
            most = row[0].real.upper()
            gap = reduce(arb.max, (most - abs(value).lower() for value in row[: half + 1]))
            spread = (2 * most * gap).sqrt()
            centres = moments.at(eta * (start + half), eta * size, blocks)
            totals = [
                total * (abs(centre) + spread) ** times
                for total, centre in zip(totals, centres, strict=True)
            ]
        return sum(totals, arb(0))

    def delta(self, epsilon: arb) -> arb:
        """A ball whose upper end is at least δ(``epsilon``); raises ``Unproved`` if infinite."""
        total = arb(0)
        for k, term in enumerate(self._terms):
            total += (term * acb(0, -self._eta * epsilon * k).exp()).real
        total = 2 * total - self._terms[0].real + 2 * self._rest
        bound = (-self._tilt * epsilon).exp() / self._window * total
        if not bound.is_finite():
            raise Unproved("bad_witness", "The witness gives no finite bound.", "Search again.")
        return bound

    def proves(self, epsilon: float, delta: float) -> bool:
        """Whether δ(``epsilon``) ≤ ``delta`` is proved."""
        return bool(self.delta(arb(epsilon)) <= arb(delta))


def _in_range(witness: RunWitness) -> bool:
    numbers = (witness.tilt, witness.window, witness.noise)
    terms = (witness.frequencies, *(count for _, count in witness.blocks))
    return (
        all(math.isfinite(number) for number in numbers)
        and min(witness.tilt, witness.window) > 0
        and witness.noise >= 0
        and witness.frequencies >= 2
        and sum(terms) <= MOST_FREQUENCIES
        and all(
            count >= 1 and 1 <= size // 2 < witness.frequencies for size, count in witness.blocks
        )
    )


def _gaussian_delta(mu_squared: arb, epsilon: arb) -> arb:
    """N(μ, 1) against N(0, 1): Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ); 0 for the empty run."""
    if mu_squared == 0:
        return arb(0)
    mu, root = mu_squared.sqrt(), arb(2).sqrt()
    high, low = (epsilon / mu - mu / 2) / root, (epsilon / mu + mu / 2) / root
    return (high.erfc() - epsilon.exp() * low.erfc()) / 2


def _mu_squared(direction: Direction) -> arb:
    """μ² of the plainly Gaussian releases together."""
    return sum((law.mu_squared * times for law, times in direction), arb(0))


def _decimal(text: str) -> arb:
    if _DECIMAL.fullmatch(text) is None:
        raise Unproved("bad_witness", f"{text!r} is no decimal number.", "Search again.")
    return arb(text)


def witness_document(witness: Witness) -> dict[str, Any]:
    """``witness`` as JSON data, its doubles as the hexadecimal text of ``float.hex``."""
    return {
        "epsilon": witness.epsilon,
        "delta": witness.delta,
        "runs": [
            {
                "tilt": run.tilt.hex(),
                "window": run.window.hex(),
                "noise": run.noise.hex(),
                "frequencies": run.frequencies,
                "blocks": [list(block) for block in run.blocks],
                "rules": [{"step": r.step.hex(), "strip": r.strip.hex()} for r in run.rules],
            }
            for run in witness.runs
        ],
    }


def witness_from(document: Mapping[str, Any]) -> Witness:
    """The witness of ``witness_document``; raises ``Unproved`` for what is none."""
    try:
        return Witness(
            epsilon=str(document["epsilon"]),
            delta=str(document["delta"]),
            runs=tuple(
                RunWitness(
                    tilt=float.fromhex(run["tilt"]),
                    window=float.fromhex(run["window"]),
                    noise=float.fromhex(run["noise"]),
                    frequencies=int(run["frequencies"]),
                    blocks=tuple((int(size), int(count)) for size, count in run["blocks"]),
                    rules=tuple(
                        Quadrature(
                            step=float.fromhex(rule["step"]), strip=float.fromhex(rule["strip"])
                        )
                        for rule in run["rules"]
                    ),
                )
                for run in document["runs"]
            ),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise Unproved("bad_witness", f"This is no witness: {error}.", "Search again.") from None
