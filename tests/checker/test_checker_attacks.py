"""The checker against exact curves: what an honest or hostile witness proves is never less."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import mpmath
import pytest
from flint import arb, ctx
from mpmath import mpf

from affidavit.accountants import parse_witness, witness_document
from affidavit.checker import (
    Grid,
    Rule,
    RunWitness,
    Unproved,
    Witness,
    compose,
    dominating_pairs,
    prove,
)
from affidavit.plan import events
from tests.accountants.exact_curves import BY_QUADRATURE, CLOSED, DIGITS, ExactRun

Draw = Callable[[random.Random], ExactRun]
SURE = mpf(10) ** -15
"""Relative, above the errors of quadrature."""
TINY = mpf(10) ** -10


def witness_of(event: events.Event, fineness: int = 1) -> tuple[RunWitness, ...]:
    """A witness for each direction that proves a single release within a few percent."""
    sums = Grid(step=2.0**-10 / fineness, reach=64 * fineness, scales=16, bits=176, linear=True)
    grid = Grid(step=0.002 / fineness, reach=128 * fineness, scales=8, bits=128)
    spacing = 0.05 / fineness
    return tuple(
        RunWitness(
            grid=grid,
            rules=tuple(
                Rule(spacing=spacing, reach=12.0, sums=sums if law.bins else None)
                for law, _ in direction
            ),
        )
        for direction in dominating_pairs.laws(event)
    )


def compare(run: ExactRun, epsilon: float, fineness: int) -> None:
    """What is proved of one direction lies above the truth, and not far."""
    direction, witness = (
        dominating_pairs.laws(run.event)[run.direction],
        witness_of(run.event, fineness),
    )
    bound = compose(direction, witness[run.direction]).delta(arb(epsilon)).upper()
    with mpmath.workdps(DIGITS):
        truth = run.delta(mpf(epsilon))
        proved = mpf(bound.str(DIGITS, radius=False))
        assert proved >= truth * (1 - SURE), (run.event, epsilon)
        assert proved <= truth * mpf("1.1") + TINY, (run.event, epsilon, proved / truth)


@pytest.mark.ordinary("fixed_size_run", "two_bins_run", "poisson_run", "gaussian_run")
@pytest.mark.parametrize("kind", CLOSED + BY_QUADRATURE)
def test_what_is_proved_of_a_random_run_lies_just_above_the_truth(kind: Draw) -> None:
    draw = random.Random(3)
    for _ in range(2 if kind in BY_QUADRATURE else 3):
        with mpmath.workdps(DIGITS):
            run = kind(draw)
        compare(run, draw.choice((0.0, draw.uniform(0, 2))), 1)


@pytest.mark.ordinary("not cut_run")
@pytest.mark.parametrize("kind", CLOSED + BY_QUADRATURE)
def test_balls_of_any_precision_prove_nothing_below_the_truth(kind: Draw) -> None:
    """No comparison of balls that is uncertain leaves something out."""
    draw = random.Random(5)
    with mpmath.workdps(DIGITS):
        run, epsilon = kind(draw), draw.uniform(0, 0.5)
        truth = run.delta(mpf(epsilon))
    witness, precision = witness_of(run.event)[run.direction : run.direction + 1], ctx.prec
    for bits in (2, 8, 24, 53):
        try:
            ctx.prec = bits
            direction = dominating_pairs.laws(run.event)[run.direction]
            bound = compose(direction, *witness or (None,)).delta(arb(epsilon))
        except Unproved:
            continue
        finally:
            ctx.prec = precision
        assert not bound < arb(mpmath.nstr(truth * (1 - SURE), DIGITS)), bits


@pytest.mark.soak
@pytest.mark.parametrize("kind", CLOSED + BY_QUADRATURE)
def test_what_is_proved_of_many_random_runs_lies_just_above_the_truth(kind: Draw) -> None:
    draw = random.Random(4)
    for _ in range(40 if kind in BY_QUADRATURE else 300):
        with mpmath.workdps(DIGITS):
            run = kind(draw)
        compare(run, draw.choice((0.0, draw.uniform(0, 0.1), draw.uniform(0, 4))), 2)


@dataclass(frozen=True)
class Target:
    """A run, an honest document for it, and ε with what δ is there at the least."""

    event: events.Event
    document: dict[str, Any]
    epsilon: str
    truth: mpf


def targets(seed: int, number: int) -> list[Target]:
    """Runs of every kind whose δ at some ε is known."""
    draw, result = random.Random(seed), []
    while len(result) < number:
        kind = (CLOSED + BY_QUADRATURE)[len(result) % 7]
        with mpmath.workdps(DIGITS):
            run, epsilon = kind(draw), str(round(draw.uniform(0, 1.5), 3))
            truth = run.delta(mpf(epsilon))
        if truth > TINY:
            witness = Witness(epsilon=epsilon, delta="1", runs=witness_of(run.event))
            result.append(Target(run.event, witness_document(witness), epsilon, truth))
    return result


HOSTILE: tuple[Any, ...] = (
    *(
        "nan",
        "inf",
        "-inf",
        "0x0p0",
        "-0x1p-3",
        "0x1p-1074",
        "0x1p1023",
        "0x1p9999",
        "٣",
        "9" * 5000,
    ),
    *(0, -1, 1, 3, 4, 63, 64, 192, 193, 10**30, -(10**30), 1 << 16, 1.5, float("nan"), True, None),
    *([], {}, "", [[]], {"step": "0x1p0"}),
)


def spoilt(draw: random.Random, document: Any, others: list[Target]) -> Any:
    """``document`` with one thing changed: a field, a rule, a direction, or all of it."""
    other = deepcopy(draw.choice(others).document)
    match draw.randrange(7):
        case 0:  # a witness of another run, and perhaps of another kind
            return {**document, "runs": other["runs"]}
        case 1:  # rules, grids and directions of another run
            place, own, foreign = "runs", document, other
            if document["runs"] and other["runs"] and draw.random() < 0.7:
                place, own = draw.choice(("grid", "rules")), draw.choice(document["runs"])
                foreign = draw.choice(other["runs"])
            own[place] = foreign[place]
            return document
        case 2:  # fewer or more of something
            lists = [document["runs"], *(run["rules"] for run in document["runs"])]
            chosen = draw.choice(lists)
            if chosen and draw.random() < 0.5:
                chosen.pop(draw.randrange(len(chosen)))
            else:
                chosen.extend(chosen[:1])
            return document
        case _:  # a field far from what it was, or at an extreme
            fields = [
                (part, name)
                for run in document["runs"]
                for part in (run["grid"], *run["rules"], *(r.get("sums") for r in run["rules"]))
                if isinstance(part, dict)
                for name in part
            ]
            if not fields:
                return document
            part, name = draw.choice(fields)
            part[name] = spoilt_number(draw, part[name])
            if draw.random() < 0.1:
                part.pop(name)
            return document


def spoilt_number(draw: random.Random, value: Any) -> Any:
    factor = 10 ** draw.choice((draw.uniform(-1, 1), draw.uniform(-8, 8)))
    if draw.random() < 0.3 or value in HOSTILE:
        return deepcopy(draw.choice(HOSTILE))
    if isinstance(value, str):
        return (float.fromhex(value) * draw.choice((1, 1, 1, -1)) * factor).hex()
    return draw.randrange(1, 260) if isinstance(value, int) else value


def attack(seed: int, count: int, number: int = 21) -> int:
    """Make ``count`` claims by spoilt witnesses of so many runs; how many of them were proved.

    Half of the claims are below the truth, and a third are made at a precision of balls that is
    drawn as well.
    """
    draw, precision, proved = random.Random(seed), ctx.prec, 0
    pool = targets(seed, number)
    for _ in range(count):
        target = draw.choice(pool)
        claim = deepcopy(target.document)
        for _ in range(draw.choice((0, 1, 1, 2, 4))):
            claim = spoilt(draw, claim, pool)
        below = draw.choice((1 - SURE, mpf("0.999"), mpf("0.5"), mpf("1e-6")))
        share = draw.choice((below, mpf(draw.choice((2, 1000)))))
        claim["delta"] = mpmath.nstr(target.truth * share, 30)
        if draw.random() < 0.05:
            claim[draw.choice(("epsilon", "delta"))] = draw.choice(HOSTILE)
        try:
            if draw.random() < 1 / 3:
                ctx.prec = draw.choice((2, 24, 53, 128, 300))
            proof = prove(parse_witness(claim), target.event)
        except Unproved:
            continue
        finally:
            ctx.prec = precision
        # Another ε may have been drawn.
        if proof.epsilon == target.epsilon and mpf(proof.delta) < target.truth * (1 - SURE / 2):
            pytest.fail(f"seed {seed}: δ ≤ {proof.delta} is proved of {target}, by {claim}")
        proved += 1
    return proved


def test_a_dishonest_witness_proves_nothing_below_the_truth() -> None:
    assert attack(seed=1, count=25, number=7) > 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_ten_thousand_dishonest_witnesses_prove_nothing_below_the_truth(seed: int) -> None:
    assert attack(seed=100 + seed, count=500) > 50
