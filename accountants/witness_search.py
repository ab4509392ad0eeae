"""The search for a witness, in floating point. No proof relies on it.

A witness states how finely losses are discretised and composed. The error decreases with the square
of the number of nodes. So the search starts with few nodes and then takes as many as the error
requires, until the bound that ``affidavit.checker`` proves is close to the computed
one.

In certificates witnesses are JSON data, with doubles as the hexadecimal text of ``float.hex``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import index
from typing import Any

import numpy as np
from flint import arb

from affidavit.accountants.bracket import Bracket, decimal_up
from affidavit.accountants.bracketing_curves import FirstAvailableCurve
from affidavit.accountants.protocol import AccountantError, provable_alone
from affidavit.accountants.registry import certain_accountants
from affidavit.checker import (
    Grid,
    Measure,
    Proof,
    Rule,
    RunWitness,
    SingleRelease,
    Unproved,
    Witness,
    compose,
    conceded_probability,
    conclude,
    conclude_chain,
    dominating_pairs,
    ratio_points,
    single_release,
)
from affidavit.plan import events

MAX_NODES, QUICK_NODES = 6000, 512
"""Nodes of a lattice on one side of zero. With ``QUICK_NODES`` a proof usually takes less time than
dp-accounting's PLD, which is used if that proves too little."""
_INITIAL_NODES, _MAX_TRIES = 64, 6
_SPACING = 8.0
"""Standard deviations between cuts, times the nodes."""
_LIKELY_RATIO = 1.2
"""Ratio to the least bound up to which other bounds are tried; both are known to a tenth."""
_BISECTIONS = 10
_MAX_DIFFERENCE_NODES, _LEAST_SHARE = 256, 1e-10
"""Nodes of sums of differences at most, and the share of the largest δ to which they are summed."""
_MAX_FAST_TERMS = 100
"""Terms of a mixture that a lattice composes quickly."""
_LOSS_BITS, _RATIO_BITS = 96, 176
_MAX_Z = 12.5
"""Standard deviations at which normal tails are cut; they are below 1e-35."""

Requirement = Callable[[events.Event, bool], None]
"""Raises ``Unproved`` for a bound that is not the run's, or not that of neighbours in a chain."""
_RunProof = tuple[RunWitness | None, Measure | SingleRelease]


def search_witness(
    event: events.Event,
    epsilon: Bracket,
    delta: float,
    looseness: float,
    most: int = MAX_NODES,
    require: Requirement | None = None,
) -> tuple[Witness, Proof]:
    """Return a witness that ``event`` is (ε, ``delta``)-DP, and its proof, for the least ε found.

    ``epsilon`` (nats) is the bracket of an engine. The proved ε is at most a relative ``looseness``
    above its upper bound. It is below the lower bound only if the engine is wrong. Only bounds of
    the run for which ``require`` does not raise ``Unproved`` are tried. Raises ``Unproved`` if no
    statement covers a release, or ``most`` nodes prove too little.
    """
    bounds = events.alternatives(event)
    for place in _likely_places(bounds, epsilon.upper, delta):
        bound = bounds[place]
        covers = _covers(bound)
        # The engine's least bound may reveal truncated lots.
        for chosen in [covers, ()] if any(covers) else [()]:
            try:
                if isinstance(bound, events.ChainOfNeighbours):
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


def _likely_places(bounds: Sequence[events.Event], epsilon: float, delta: float) -> Sequence[int]:
    """Return the indices of the ``bounds`` close to ``epsilon`` (nats), the least first."""
    if len(bounds) == 1:
        return [0]
    # Imported here because it imports scipy and is seldom needed.
    from affidavit.accountants.fourier_accountant import FourierAccountant

    upper, engine = {}, FourierAccountant(relative_width=0.1)
    for place, bound in enumerate(bounds):
        with suppress(AccountantError):
            upper[place] = engine.curve(bound).epsilon(delta).upper
    places = sorted(upper, key=upper.__getitem__)
    likely = [place for place in places if upper[place] <= _LIKELY_RATIO * epsilon]
    return likely or places[:1] or [0]


def _covers(event: events.Event) -> dominating_pairs.Covers:
    """Return the covers with which the Fourier accountant bounds ``event``."""
    # The links of a chain have their own covers.
    leaves = (
        []
        if isinstance(event, events.ChainOfNeighbours)
        else dominating_pairs.coverable_leaves(event)
    )
    if not leaves:
        return ()
    # Imported here because it imports scipy and is seldom needed.
    from affidavit.accountants.fourier import truncated_poisson

    def chosen(leaf: events.Leaf) -> dominating_pairs.Cover | None:
        cover = (
            truncated_poisson.Cover.of(leaf)
            if isinstance(leaf, events.TruncatedPoissonGaussian)
            else None
        )
        if cover is None:
            return None
        return dominating_pairs.Cover(spent=cover.spent, share=cover.share, crowded=cover.crowded)

    return tuple(chosen(leaf) for leaf in leaves)


def _search_chain(
    chain: events.ChainOfNeighbours,
    delta: float,
    looseness: float,
    most: int,
    require: Requirement | None,
) -> tuple[Witness, Proof]:
    """Return a witness of every link of ``chain``; raises ``Unproved``."""
    require_link = None if require is None else lambda event, _: require(event, True)
    provable = tuple(map(provable_alone, certain_accountants()))
    links, proofs, epsilon = [], [], 0.0
    for _ in range(chain.links):
        # Slightly less than its share, because the links' decimals are rounded up.
        at = delta / chain.links * math.exp(-epsilon) * (1 - 1e-9)
        neighbours = FirstAvailableCurve(event=chain.event, engines=provable)
        try:
            bracket = neighbours.epsilon(at)
        except AccountantError as failure:
            raise Unproved(
                "not_proved", f"No engine bounds a link: {failure}", "Rely on the accountants."
            ) from None
        witness, proof = search_witness(chain.event, bracket, at, looseness, most, require_link)
        links.append(witness)
        proofs.append(proof)
        epsilon = math.nextafter(epsilon + float(proof.epsilon), math.inf)
    claim = Witness(
        epsilon=decimal_up(epsilon, 12), delta=decimal_up(delta, 17), runs=(), links=tuple(links)
    )
    return claim, conclude_chain(claim, proofs)


def _search(
    event: events.Event,
    covers: dominating_pairs.Covers,
    epsilon: Bracket,
    delta: float,
    looseness: float,
    most: int,
) -> tuple[Witness, Proof]:
    directions = dominating_pairs.laws(event, covers)
    if most <= QUICK_NODES and any(map(_is_slow, directions)):
        raise Unproved("not_proved", "A proof would take too long.", "Allow more nodes.")
    if any(law.reverse for direction in directions for law, _ in direction):
        most = min(most, _MAX_DIFFERENCE_NODES)
    highest = epsilon.upper * (1 + looseness)
    runs = [
        _prove_direction(direction, epsilon.upper, highest, delta, most) for direction in directions
    ]
    result = _conclude(directions, covers, runs, highest, delta)
    at = lowest = epsilon.lower * (1 - 2 * looseness)
    for _ in range(_BISECTIONS):
        try:
            result = _conclude(directions, covers, runs, at, delta)
            highest = at
        except Unproved:
            # If the engine's lower bound is loose, the proved ε is near its upper bound.
            lowest = max(at, epsilon.upper * (1 - 2 * looseness))
        at = (lowest + highest) / 2
    return result


def _is_slow(direction: dominating_pairs.Direction) -> bool:
    """Return whether wide mixtures are composed with other releases, or differences summed.

    It takes half a minute.
    """
    if any(law.reverse for law, _ in direction):
        return True
    terms = (len(piece.over) + len(piece.under) for law, _ in direction for piece in law.pieces)
    return single_release(direction) is None and max(terms, default=0) > _MAX_FAST_TERMS


def _conclude(
    directions: tuple[dominating_pairs.Direction, ...],
    covers: dominating_pairs.Covers,
    runs: list[_RunProof],
    epsilon: float,
    delta: float,
) -> tuple[Witness, Proof]:
    """Return the witness and proof of ``epsilon``; raises ``Unproved`` if there is none."""
    witness = Witness(
        epsilon=decimal_up(epsilon, 12),
        delta=decimal_up(delta, 17),
        runs=tuple(run for run, _ in runs if run is not None),
        covers=covers,
    )
    return witness, conclude(witness, directions, [curve for _, curve in runs])


def _prove_direction(
    direction: dominating_pairs.Direction, tight: float, highest: float, delta: float, most: int
) -> _RunProof:
    """Return the proof of one direction at ε = ``highest`` (nats); raises ``Unproved``."""
    single = single_release(direction)
    if single is not None:
        return None, single
    delta -= float(conceded_probability(direction).upper())
    if delta <= 0:
        raise Unproved("not_proved", "The cover concedes more than δ.", "Reveal cut lots.")
    spread = min(_spread(law) for law, _ in direction)
    nodes = _INITIAL_NODES
    for _ in range(_MAX_TRIES):
        run = _witness(direction, spread, highest, nodes)
        measure = compose(direction, run)
        bound, nearer = (_delta(measure, at) for at in (highest, tight))
        if bound <= delta:
            return run, measure
        if nodes >= most:
            break
        # ``excess`` is that of log δ at the tight ε, which decreases with the square of the nodes.
        # ``margin`` is the allowed excess.
        margin = max(math.log(max(nearer, 1e-300) / bound), 1e-9)
        excess = math.log(bound / delta) + margin
        nodes = min(most, math.ceil(nodes * min(8.0, max(1.2, math.sqrt(excess / margin * 1.4)))))
    raise Unproved("not_proved", "The search for a witness failed.", "Rely on the accountants.")


def _delta(measure: Measure | SingleRelease, epsilon: float) -> float:
    return float(measure.delta(arb(epsilon)).upper())


def _witness(
    direction: dominating_pairs.Direction, spread: float, epsilon: float, nodes: int
) -> RunWitness:
    grid = _grid(2 * spread / nodes, nodes, 2 * epsilon + 30, _LOSS_BITS)
    rules = []
    for law, _ in direction:
        sums, ratios = None, _ratios(law, nodes) if law.reverse else ()
        if law.bins:
            mu = _farthest(law) * float(law.mu)
            largest = law.bins * math.exp(min(mu * (mu + _MAX_Z), 600.0)) * max(ratios, default=1)
            # One is a node, so that no ratio moves below zero.
            width = 4.0 ** math.ceil(math.log(1 / min(1.0, _deviation(mu)), 4) + 1)
            sums = _grid(1 / (nodes * width), nodes, largest, _RATIO_BITS, linear=True)
        rules.append(Rule(spacing=_SPACING / nodes, reach=_MAX_Z, sums=sums, ratios=ratios))
    return RunWitness(grid=grid, rules=tuple(rules))


def _farthest(law: dominating_pairs.Law) -> int:
    return max(abs(mean) for piece in law.pieces for mean in (*piece.over, *piece.under))


def _ratios(law: dominating_pairs.Law, nodes: int) -> tuple[float, ...]:
    """Return values of e^ε between which both curves of differences fall alike."""
    # Imported here because it imports scipy and is seldom needed.
    from affidavit.accountants.random_allocation.replaced import ReplacedDirection, orders_like

    both = [
        ReplacedDirection(bins=law.bins, rate=float(law.mu), order=order, drawn=float(law.share))
        for order in orders_like(law.statement.removeprefix("in_place_"))
    ]
    epsilons = {
        direction.approximate_epsilon(direction.approximate_delta(0.0) * share)
        for direction in both
        for share in np.geomspace(0.9, _LEAST_SHARE, nodes // 4).tolist()
    }
    apart = 0.2 * max(epsilons) / len(epsilons)
    result = [0.0]
    for epsilon in sorted(epsilons):
        if epsilon > result[-1] + apart:
            result.append(epsilon)
    return tuple(math.exp(epsilon) for epsilon in result[1:])


def _grid(step: float, reach: int, largest: float, bits: int, *, linear: bool = False) -> Grid:
    scales = max(1, math.ceil(math.log(largest / (step * (reach - 2)), 4)) + 1)
    return Grid(step=step, reach=reach, scales=min(scales, 60), bits=bits, linear=linear)


def _spread(law: dominating_pairs.Law) -> float:
    """Return about the distance (nats) of the frequent losses of one release from zero."""
    mu = float(law.mu)
    if law.bins:
        deviation = _deviation(_farthest(law) * mu)
        return min(1.0, deviation / math.sqrt(law.bins)) * float(law.share)
    points, _ = ratio_points(law, Rule(spacing=0.25, reach=6.0))
    return max(1e-9, sum(float(mass) * min(1.0, abs(float(x.log()))) for mass, x in points))


def _deviation(mu: float) -> float:
    """Return the standard deviation of e^{μz - μ²/2}."""
    return math.sqrt(math.expm1(min(mu * mu, 600.0)))


def witness_document(witness: Witness) -> dict[str, Any]:
    """Return ``witness`` as JSON data."""
    covers = [None if cover is None else _to_hex(cover, _COVER_FIELDS) for cover in witness.covers]
    return {
        "epsilon": witness.epsilon,
        "delta": witness.delta,
        "runs": [
            {
                "grid": _to_hex(run.grid, _GRID_FIELDS),
                "rules": [
                    _to_hex(rule, ("spacing", "reach"))
                    | ({} if rule.sums is None else {"sums": _to_hex(rule.sums, _GRID_FIELDS)})
                    | ({"ratios": [at.hex() for at in rule.ratios]} if rule.ratios else {})
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
    """Parse the data of ``witness_document``; raises ``Unproved`` if it is no witness."""
    try:
        return Witness(
            epsilon=document["epsilon"],
            delta=document["delta"],
            runs=tuple(
                RunWitness(
                    grid=_parse_grid(run["grid"], linear=False),
                    rules=tuple(
                        Rule(
                            spacing=float.fromhex(rule["spacing"]),
                            reach=float.fromhex(rule["reach"]),
                            sums=_parse_grid(rule["sums"], linear=True) if "sums" in rule else None,
                            ratios=tuple(map(float.fromhex, rule.get("ratios", ()))),
                        )
                        for rule in run["rules"]
                    ),
                )
                for run in document["runs"]
            ),
            covers=tuple(
                None
                if cover is None
                else dominating_pairs.Cover(
                    **{name: float.fromhex(cover[name]) for name in _COVER_FIELDS}
                )
                for cover in document.get("covers", ())
            ),
            alternative=index(document.get("alternative", 0)),
            links=tuple(parse_witness(link) for link in document.get("links", ())),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise Unproved("bad_witness", f"This is not a witness: {error}.", "Search again.") from None


_COVER_FIELDS = ("spent", "share", "crowded")
_GRID_FIELDS = ("step", "reach", "scales", "bits")


def _to_hex(part: dominating_pairs.Cover | Grid | Rule, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields ``names`` of ``part``, with doubles as hexadecimal text."""
    values = {name: getattr(part, name) for name in names}
    return {k: value.hex() if isinstance(value, float) else value for k, value in values.items()}


def _parse_grid(document: Mapping[str, Any], *, linear: bool) -> Grid:
    return Grid(
        step=float.fromhex(document["step"]),
        reach=index(document["reach"]),
        scales=index(document["scales"]),
        bits=index(document["bits"]),
        linear=linear,
    )
