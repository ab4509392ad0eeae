"""The checker proves what is true and nothing below it, whatever the witness says."""

from __future__ import annotations

import random
from dataclasses import replace

import mpmath
import pytest

from affidavit.accountants import FourierAccountant, search_witness
from affidavit.accountants.checker import (
    DOMINATING_PAIRS,
    Proof,
    Quadrature,
    RunWitness,
    Unproved,
    Witness,
    prove,
    witness_document,
    witness_from,
)
from affidavit.plan import (
    Composed,
    Event,
    Gaussian,
    Laplace,
    PoissonSubsampledGaussian,
    Repeated,
)
from affidavit.plan.events import SubsampledPair

DELTA = 1e-6


def poisson(q: float, sigma: float, steps: int, pair: SubsampledPair = "add_remove") -> Repeated:
    release = PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma, pair=pair)
    return Repeated(event=release, count=steps)


RUNS: dict[str, Event] = {
    "add_remove": poisson(0.2, 4.0, 410),
    "replace_one": poisson(0.01, 1.0, 1000, "replace_one"),
    "phases": Composed(
        events=(
            poisson(0.01, 1.2, 500),
            poisson(0.02, 2.0, 300),
            Repeated(event=Gaussian(noise_multiplier=20.0), count=3),
        )
    ),
    "pairs mixed": Composed(
        events=(poisson(0.02, 2.0, 200), poisson(0.03, 3.0, 200, "replace_one"))
    ),
}


def closed_form(q: float, sigma: float, epsilon: float, *, add: bool) -> mpmath.mpf:
    """δ of one Poisson sampled release, to 60 digits: the likelihood ratio inverted."""
    with mpmath.workdps(60):
        q, mu, e = mpmath.mpf(q), 1 / mpmath.mpf(sigma), mpmath.exp(mpmath.mpf(epsilon))
        if add:
            odds = (1 / e - (1 - q)) / q
            if odds <= 0:
                return mpmath.mpf(0)
            place = (mpmath.log(odds) + mu**2 / 2) / mu
            mixed = (1 - q) * mpmath.ncdf(place) + q * mpmath.ncdf(place - mu)
            return mpmath.ncdf(place) - e * mixed
        place = (mpmath.log((e - (1 - q)) / q) + mu**2 / 2) / mu
        mixed = (1 - q) * mpmath.ncdf(-place) + q * mpmath.ncdf(mu - place)
        return mixed - e * mpmath.ncdf(-place)


@pytest.mark.parametrize("name", RUNS)
def test_it_proves_the_engines_bound_within_1e_4(name: str) -> None:
    """The engine and the checker share no code; the bound proved lies above the tight ε."""
    bracket = FourierAccountant().curve(RUNS[name]).epsilon(DELTA)
    proof = prove(search_witness(RUNS[name], bracket.upper, DELTA), RUNS[name])
    assert bracket.lower < float(proof.epsilon) <= bracket.upper * (1 + 1e-4)


@pytest.mark.parametrize("epsilon", [0.3, 1.0])
def test_a_single_release_is_bounded_above_its_60_digits(epsilon: float) -> None:
    event = poisson(0.3, 1.5, 1)
    truth = max(closed_form(0.3, 1.5, epsilon, add=add) for add in (True, False))
    run = RunWitness(
        tilt=3.0,
        window=10.0,
        noise=0.05,
        frequencies=280,
        blocks=(),
        rules=(Quadrature(step=0.02, strip=2.3),),
    )
    witness = Witness(epsilon=str(epsilon), delta=mpmath.nstr(truth * 1.1, 30), runs=(run, run))
    assert isinstance(prove(witness, event), Proof)
    with pytest.raises(Unproved, match="proves δ"):
        prove(replace(witness, delta=mpmath.nstr(truth * (1 - 1e-9), 30)), event)


def test_one_gaussian_mechanism_is_its_closed_form() -> None:
    event = Repeated(event=Gaussian(noise_multiplier=2.0), count=9)
    with mpmath.workdps(60):
        mu, epsilon = mpmath.mpf(1.5), mpmath.mpf(4)
        truth = mpmath.ncdf(mu / 2 - epsilon / mu)
        truth -= mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)
        above = mpmath.nstr(truth * (1 + mpmath.mpf(10) ** -20), 30)
        below = mpmath.nstr(truth * (1 - mpmath.mpf(10) ** -20), 30)
    assert prove(Witness(epsilon="4", delta=above, runs=()), event).theorems == ("gaussian",)
    with pytest.raises(Unproved):
        prove(Witness(epsilon="4", delta=below, runs=()), event)


def attack(seed: int, count: int) -> int:
    """Mutate ``count`` witnesses; how many proved a bound, all of them at least the truth."""
    draw = random.Random(seed)
    event = poisson(0.3, 2.0, 2)
    bracket = FourierAccountant().curve(event).with_width(1e-6).epsilon(DELTA)
    honest = RunWitness(
        tilt=4.0,
        window=12.0,
        noise=0.3,
        frequencies=60,
        blocks=((2, 3), (8, 2)),
        rules=(Quadrature(step=0.1, strip=2.0),),
    )

    def mutated(run: RunWitness) -> RunWitness:
        factor = 10 ** draw.uniform(-1.5, 1.5)
        rule = run.rules[0]
        wild = draw.choice((0.0, -1.0, float("nan"), float("inf"), 1e300))
        changes: tuple[RunWitness, ...] = (
            replace(run, tilt=run.tilt * factor),
            replace(run, window=run.window * factor),
            replace(run, noise=draw.choice((0.0, run.noise * factor))),
            replace(run, frequencies=draw.randrange(-1, 120)),
            replace(run, blocks=((draw.randrange(-1, 100), draw.randrange(-1, 9)),)),
            replace(run, blocks=()),
            replace(run, rules=(replace(rule, step=max(rule.step * factor, 0.02)),)),
            replace(run, rules=(replace(rule, strip=rule.strip * factor),)),
            replace(run, rules=(replace(rule, step=wild),)),
            replace(run, tilt=wild),
            replace(run, window=wild),
            replace(run, rules=()),
        )
        return draw.choice(changes)

    proved = 0
    for _ in range(count):
        runs = []
        for _ in range(2):
            run = mutated(honest)
            runs.append(mutated(run) if run.rules and draw.random() < 0.5 else run)
        # The truth lies above the bracket's lower end: nothing may be proved below it.
        epsilon = bracket.lower * draw.choice((1 - 1e-9, 0.999, 0.9, 0.5))
        try:
            prove(Witness(epsilon=repr(epsilon), delta=repr(DELTA), runs=tuple(runs)), event)
        except Unproved:
            pass
        else:
            pytest.fail(f"seed {seed} proved ε ≤ {epsilon}, below {bracket.lower}, by {runs}")
        try:
            prove(Witness(epsilon="30", delta=repr(DELTA), runs=tuple(runs)), event)
            proved += 1
        except Unproved:
            continue
    return proved


def test_a_dishonest_witness_proves_nothing_below_the_truth() -> None:
    assert attack(seed=1, count=40) > 0


@pytest.mark.soak
def test_ten_thousand_dishonest_witnesses_prove_nothing_below_the_truth() -> None:
    assert attack(seed=2, count=10_000) > 0


@pytest.mark.soak
def test_rare_losses_are_proved_with_less_noise() -> None:
    run = poisson(0.0011, 0.91, 8760)
    bracket = FourierAccountant().curve(run).epsilon(DELTA)
    proof = prove(search_witness(run, bracket.upper, DELTA), run)
    assert float(proof.epsilon) <= bracket.upper * (1 + 1e-4)


def test_a_witness_for_another_run_does_not_prove_this_one() -> None:
    bracket = FourierAccountant().curve(RUNS["add_remove"]).epsilon(DELTA)
    witness = search_witness(RUNS["add_remove"], bracket.upper, DELTA)
    for other in (poisson(0.2, 3.99, 410), poisson(0.2, 4.0, 412), poisson(0.201, 4.0, 410)):
        with pytest.raises(Unproved, match="above"):
            prove(witness, other)


def test_what_has_no_statement_is_refused() -> None:
    event = Composed(events=(poisson(0.2, 4.0, 4), Laplace(noise_multiplier=3.0)))
    with pytest.raises(Unproved, match="Laplace") as refusal:
        search_witness(event, 1.0, DELTA)
    assert refusal.value.code == "no_statement"


def test_a_witness_survives_its_document_and_bad_documents_are_refused() -> None:
    bracket = FourierAccountant().curve(RUNS["replace_one"]).epsilon(DELTA)
    witness = search_witness(RUNS["replace_one"], bracket.upper, DELTA)
    document = witness_document(witness)
    assert witness_from(document) == witness
    for broken in ({}, document | {"runs": [{}]}, document | {"runs": 3}):
        with pytest.raises(Unproved, match="no witness"):
            witness_from(broken)
    for epsilon in ("nan", "-1", "eight", "[1 +/- 9]", ""):
        with pytest.raises(Unproved):
            prove(replace(witness, epsilon=epsilon), RUNS["replace_one"])


def test_the_theorem_page_names_every_statement() -> None:
    from pathlib import Path

    pages = Path("docs/theorems")
    text = (pages / "checker.md").read_text()
    for name, row in DOMINATING_PAIRS.items():
        assert f"`{name}`" in text
        assert (pages / f"{row.source}.md").exists()
