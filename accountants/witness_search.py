"""The search for a witness: floating point, and trusted with nothing.

A witness says how finely losses are cut and added up. What that costs falls with the square of the
number of nodes; so the search tries few, and then as many as what these proved says are needed,
until the bound that ``affidavit.accountants.checker`` proves is close to the one computed.

In certificates witnesses are JSON data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import index
from typing import Any

from flint import arb

from affidavit.accountants.bracket import Bracket, decimal_up
from affidavit.accountants.bracketing_curves import FirstAvailableCurve
from affidavit.accountants.checker import (
    Cover,
    Covers,
    Direction,
    Grid,
    Law,
    Measure,
    Proof,
    Rule,
    RunWitness,
    SingleRelease,
    Unproved,
    Witness,
    chained,
    composed,
    conceded,
    concluded,
    coverable,
    laws,
    ratio_points,
    single_release,
)
from affidavit.accountants.protocol import AccountantError
from affidavit.accountants.registry import certain_accountants
from affidavit.plan import ChainOfNeighbours, Event, Leaf, TruncatedPoissonGaussian, alternatives

MAX_NODES, QUICK_NODES = 6000, 512
"""Nodes of a lattice on one side of zero. With the second a proof mostly takes less than
dp-accounting's PLD, which is asked where that proves too little."""
_FIRST_NODES, _TRIES = 64, 6
_SPACING = 8.0
"""Standard deviations between cuts, times the nodes."""
_ABOUT = 1.2
"""How far above the least bound another is asked, relatively, both of them known to a tenth."""
_HALVINGS = 10
_MAX_TERMS = 100
"""Of a mixture that is cut on a lattice without taking long."""
_LOSS_BITS, _RATIO_BITS = 96, 176
_REACH = 12.5
"""Normal tails that are cut off (standard deviations) are below 1e-35."""

Requirement = Callable[[Event, bool], None]
"""Raises ``Unproved`` for a bound that is not that of the run, or of its neighbours in a chain."""
_Found = tuple[RunWitness | None, Measure | SingleRelease]


def search_witness(
    event: Event,
    epsilon: Bracket,
    delta: float,
    looseness: float,
    most: int = MAX_NODES,
    require: Requirement | None = None,
) -> tuple[Witness, Proof]:
    """A witness that ``event`` is (ε, ``delta``)-DP, and its proof, for the least ε found.

    ``epsilon`` (nats) is what an engine computed. What is proved is at most ``looseness``, relative
    to it, above its upper end; it lies below its lower end only where the engine is wrong. Of
    bounds of the run only those for which ``require`` does not raise ``Unproved`` are tried. Raises
    ``Unproved`` where no statement covers a release, or ``most`` nodes prove too little.
    """
    bounds = alternatives(event)
    for place in _likeliest(bounds, epsilon.upper, delta):
        bound = bounds[place]
        covers = _covers(bound)
        # The engine's least bound may have cut lots revealed.
        for chosen in [covers, ()] if any(covers) else [()]:
            try:
                if isinstance(bound, ChainOfNeighbours):
                    witness, proof = _search_chain(bound, delta, looseness, most, require)
                else:
                    if require is not None:
                        require(bound, False)
                    witness, proof = _search(bound, chosen, epsilon, delta, looseness, most)
            except Unproved as failure:
                unproved = failure
            else:
                return replace(witness, alternative=place), proof
    raise unproved


def _likeliest(bounds: Sequence[Event], epsilon: float, delta: float) -> Sequence[int]:
    """The places of the ``bounds`` that are about as low as ``epsilon`` (nats), the least first."""
    if len(bounds) == 1:
        return [0]
    from affidavit.accountants.fourier import (
        FourierAccountant,  # imports scipy, and is seldom needed
    )

    about, engine = {}, FourierAccountant(relative_width=0.1)
    for place, bound in enumerate(bounds):
        with suppress(AccountantError):
            about[place] = engine.curve(bound).epsilon(delta).upper
    places = sorted(about, key=about.__getitem__)
    return [place for place in places if about[place] <= _ABOUT * epsilon] or places[:1] or [0]


def _covers(event: Event) -> Covers:
    """The covers with which the fourier engine bounds ``event``."""
    # A chain's links have covers of their own.
    leaves = [] if isinstance(event, ChainOfNeighbours) else coverable(event)
    if not leaves:
        return ()
    from affidavit.accountants.fourier import (
        truncated_poisson,  # imports scipy, and is seldom needed
    )

    def chosen(leaf: Leaf) -> Cover | None:
        cover = (
            truncated_poisson.Cover.of(leaf) if isinstance(leaf, TruncatedPoissonGaussian) else None
        )
        if cover is None:
            return None
        return Cover(spent=cover.spent, share=cover.share, crowded=cover.crowded)

    return tuple(chosen(leaf) for leaf in leaves)


def _search_chain(
    chain: ChainOfNeighbours, delta: float, looseness: float, most: int, require: Requirement | None
) -> tuple[Witness, Proof]:
    """A witness of every link of ``chain``; raises ``Unproved``."""
    of_link = None if require is None else lambda event, _: require(event, True)
    links, proofs, epsilon = [], [], 0.0
    for _ in range(chain.links):
        # Less than its share, because the links' decimals are rounded up.
        at = delta / chain.links * math.exp(-epsilon) * (1 - 1e-9)
        neighbours = FirstAvailableCurve(event=chain.event, engines=certain_accountants())
        try:
            bracket = neighbours.epsilon(at)
        except AccountantError as failure:
            raise Unproved(
                "not_proved", f"No engine bounds a link: {failure}", "Rely on the accountants."
            ) from None
        witness, proof = search_witness(chain.event, bracket, at, looseness, most, of_link)
        links.append(witness)
        proofs.append(proof)
        epsilon = math.nextafter(epsilon + float(proof.epsilon), math.inf)
    claim = Witness(
        epsilon=decimal_up(epsilon, 12), delta=decimal_up(delta, 17), runs=(), links=tuple(links)
    )
    return claim, chained(claim, proofs)


def _search(
    event: Event, covers: Covers, epsilon: Bracket, delta: float, looseness: float, most: int
) -> tuple[Witness, Proof]:
    directions = laws(event, covers)
    if most <= QUICK_NODES and any(map(_takes_long, directions)):
        raise Unproved("not_proved", "A proof takes long.", "Allow it more nodes.")
    highest = epsilon.upper * (1 + looseness)
    runs = [_direction(direction, epsilon.upper, highest, delta, most) for direction in directions]
    result = _concluded(directions, covers, runs, highest, delta)
    at = lowest = epsilon.lower * (1 - 2 * looseness)
    for _ in range(_HALVINGS):
        try:
            result = _concluded(directions, covers, runs, at, delta)
            highest = at
        except Unproved:
            # Where the engine's lower end is loose, what is proved is near its upper end.
            lowest = max(at, epsilon.upper * (1 - 2 * looseness))
        at = (lowest + highest) / 2
    return result


def _takes_long(direction: Direction) -> bool:
    """Whether wide mixtures are composed with other releases: half a minute."""
    terms = (len(piece.over) + len(piece.under) for law, _ in direction for piece in law.pieces)
    return single_release(direction) is None and max(terms, default=0) > _MAX_TERMS


def _concluded(
    directions: tuple[Direction, ...],
    covers: Covers,
    runs: list[_Found],
    epsilon: float,
    delta: float,
) -> tuple[Witness, Proof]:
    """The witness and proof of this ε; raises ``Unproved`` where nothing found proves it."""
    witness = Witness(
        epsilon=decimal_up(epsilon, 12),
        delta=decimal_up(delta, 17),
        runs=tuple(run for run, _ in runs if run is not None),
        covers=covers,
    )
    return witness, concluded(witness, directions, [curve for _, curve in runs])


def _direction(
    direction: Direction, tight: float, highest: float, delta: float, most: int
) -> _Found:
    """What proves one direction at ε = ``highest``; raises ``Unproved``."""
    single = single_release(direction)
    if single is not None:
        return None, single
    delta -= float(conceded(direction).upper())
    if delta <= 0:
        raise Unproved("not_proved", "The cover concedes more than δ.", "Reveal cut lots.")
    spread = min(_spread(law) for law, _ in direction)
    nodes = _FIRST_NODES
    for _ in range(_TRIES):
        run = _witness(direction, spread, highest, nodes)
        measure = composed(direction, run)
        bound, nearer = (_delta(measure, at) for at in (highest, tight))
        if bound <= delta:
            return run, measure
        if nodes >= most:
            break
        # How much larger log δ is than at the tight ε, which falls with the square of the nodes,
        # and how much larger it may be.
        margin = max(math.log(max(nearer, 1e-300) / bound), 1e-9)
        excess = math.log(bound / delta) + margin
        nodes = min(most, math.ceil(nodes * min(8.0, max(1.2, math.sqrt(excess / margin * 1.4)))))
    raise Unproved("not_proved", "The search for a witness failed.", "Rely on the accountants.")


def _delta(measure: Measure | SingleRelease, epsilon: float) -> float:
    return float(measure.delta(arb(epsilon)).upper())


def _witness(direction: Direction, spread: float, epsilon: float, nodes: int) -> RunWitness:
    grid = _grid(2 * spread / nodes, nodes, 2 * epsilon + 30, _LOSS_BITS)
    rules = []
    for law, _ in direction:
        sums = None
        if law.bins:
            mu = float(law.mu)
            largest = law.bins * math.exp(min(mu * (mu + _REACH), 600.0))
            # One is a node, so that no ratio is carried below zero.
            width = 4.0 ** math.ceil(math.log(1 / min(1.0, _deviation(mu)), 4) + 1)
            sums = _grid(1 / (nodes * width), nodes, largest, _RATIO_BITS, linear=True)
        rules.append(Rule(spacing=_SPACING / nodes, reach=_REACH, sums=sums))
    return RunWitness(grid=grid, rules=tuple(rules))


def _grid(step: float, reach: int, largest: float, bits: int, *, linear: bool = False) -> Grid:
    scales = max(1, math.ceil(math.log(largest / (step * (reach - 2)), 4)) + 1)
    return Grid(step=step, reach=reach, scales=min(scales, 60), bits=bits, linear=linear)


def _spread(law: Law) -> float:
    """About how far the frequent losses of one release lie from zero (nats)."""
    mu = float(law.mu)
    if law.bins:
        return min(1.0, _deviation(mu) / math.sqrt(law.bins)) * float(law.share)
    points, _ = ratio_points(law, Rule(spacing=0.25, reach=6.0))
    return max(1e-9, sum(float(mass) * min(1.0, abs(float(x.log()))) for mass, x in points))


def _deviation(mu: float) -> float:
    """Of e^{μz - μ²/2}."""
    return math.sqrt(math.expm1(min(mu * mu, 600.0)))


def witness_document(witness: Witness) -> dict[str, Any]:
    """``witness`` as JSON data, its doubles as the hexadecimal text of ``float.hex``."""
    covers = [None if cover is None else _cover_document(cover) for cover in witness.covers]
    return {
        "epsilon": witness.epsilon,
        "delta": witness.delta,
        "runs": [
            {
                "grid": _grid_document(run.grid),
                "rules": [
                    {"spacing": rule.spacing.hex(), "reach": rule.reach.hex()}
                    | ({} if rule.sums is None else {"sums": _grid_document(rule.sums)})
                    for rule in run.rules
                ],
            }
            for run in witness.runs
        ],
        **({"covers": covers} if covers else {}),
        **({"alternative": witness.alternative} if witness.alternative else {}),
        **({"links": [witness_document(link) for link in witness.links]} if witness.links else {}),
    }


def parse_witness(document: Mapping[str, Any]) -> Witness:
    """The witness of ``witness_document``; raises ``Unproved`` for what is none."""
    try:
        return Witness(
            epsilon=document["epsilon"],
            delta=document["delta"],
            runs=tuple(
                RunWitness(
                    grid=_grid_from(run["grid"], linear=False),
                    rules=tuple(
                        Rule(
                            spacing=float.fromhex(rule["spacing"]),
                            reach=float.fromhex(rule["reach"]),
                            sums=_grid_from(rule["sums"], linear=True) if "sums" in rule else None,
                        )
                        for rule in run["rules"]
                    ),
                )
                for run in document["runs"]
            ),
            covers=tuple(
                None if cover is None else _cover_from(cover)
                for cover in document.get("covers", ())
            ),
            alternative=index(document.get("alternative", 0)),
            links=tuple(parse_witness(link) for link in document.get("links", ())),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise Unproved("bad_witness", f"This is not a witness: {error}.", "Search again.") from None


def _cover_document(cover: Cover) -> dict[str, Any]:
    return {
        "spent": cover.spent.hex(),
        "share": cover.share.hex(),
        "crowded": cover.crowded.hex(),
    }


def _cover_from(document: Mapping[str, Any]) -> Cover:
    spent, share, crowded = (
        float.fromhex(document[name]) for name in ("spent", "share", "crowded")
    )
    return Cover(spent=spent, share=share, crowded=crowded)


def _grid_document(grid: Grid) -> dict[str, Any]:
    return {
        "step": grid.step.hex(),
        "reach": grid.reach,
        "scales": grid.scales,
        "bits": grid.bits,
    }


def _grid_from(document: Mapping[str, Any], *, linear: bool) -> Grid:
    return Grid(
        step=float.fromhex(document["step"]),
        reach=index(document["reach"]),
        scales=index(document["scales"]),
        bits=index(document["bits"]),
        linear=linear,
    )
