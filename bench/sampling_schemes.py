"""Compare ε of plans that few or no other libraries account for with theirs, and with simulation.

Monte Carlo takes the lots of one unit from the trainer's samplers, adds noise to the sums of two
neighbouring data sets, and computes the likelihood ratios from the law of the lots that each case
states here: it shares nothing with the accountants. Sums are drawn with a record some times as
large, and weighted, which needs fewer draws. Its intervals of 99.6 % are of batches of lots with
keys of their own. dp-accounting's numbers are upper bounds, and jax-privacy's own are draws too;
it runs in an environment of its own (``make crosscheck``), and is left out without that. Other
records contribute nothing there: in cut or shuffled lots, others show more of a record.

    .venv/bin/python bench/sampling_schemes.py
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import hashlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import numpy as np
from dp_accounting import DpEvent, NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from jax_client import Oracle
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import binom

from affidavit.assessment import certify
from affidavit.assessment.least_gaussian import with_gaussian_bound
from affidavit.plan import Plan
from affidavit.plan.parse import plan_from
from affidavit.trainer.steps.sampling import build_sampler

Array = NDArray[np.float64]
Losses = tuple[Array, Array]
"""Privacy losses and logarithms of their weights, each of shape (batches, draws)."""
Loss = Callable[[Array, Array], Array]
"""The loss of each run, from those of a record in one step, without their square, and the square.

The shapes are (runs, steps) and (steps,); the loss of j records in a step is j s - j² v / 2.
"""

SIZE, DELTA = 5000, 1e-4
BATCHES = 20
REACH = 3.29
"""Standard errors on both sides of the mean of 20 batches, which leave out 0.4 % (Student's t)."""
STRETCHES = {True: (1.0, 1.25, 1.5, 2.0), False: (0.0, -0.5, -1.0)}
"""How many times as large a record may be drawn, in the data set with it and without it."""
WITH_MU = ("Poisson, q = 0.02", "balls in 50 bins, 3 epochs", "fixed size, B/N = 0.02, replaced")
MU_EPSILONS = {False: (0.25, 1.0, 2.0), True: (3.0, 4.0, 6.0, 8.0)}
"""The ε (nats) at which curves are compared with those of Gaussian mechanisms, and whether sums are
drawn with a record of twice the size for them."""
JAX_DRAWS = {"b_min_sep": 100_000, "balls_in_bins": 20_000}


def in_samples(q: float, records: int, s: Array, v: Array) -> Array:
    """Poisson samples of ``records`` of a user."""
    drawn = np.arange(records + 1)
    laws = zip(binom.pmf(drawn, records, q), drawn, strict=True)
    return np.asarray(np.log(sum(p * np.exp(j * s - j**2 * v / 2) for p, j in laws)).sum(axis=1))


def in_one_lot(lots: int, s: Array, v: Array) -> Array:
    """One of ``lots``, of which the first are released, again and again if there are more steps."""
    steps, exact = s.shape[1], s - v / 2
    sums = (exact[:, place::lots].sum(axis=1) for place in range(min(lots, steps)))
    return np.asarray(np.log((max(lots - steps, 0) + sum(map(np.exp, sums))) / lots))


def in_some_steps(taken: int, s: Array, v: Array) -> Array:
    """``taken`` of all steps, every set of them alike: a recursion over those that are left."""
    ratios, steps = np.exp(s - v / 2), s.shape[1]
    left = np.ones((taken + 1, len(s)))
    for step in range(steps - 1, -1, -1):
        share = np.minimum(np.arange(taken + 1) / (steps - step), 1.0)[:, None]
        left[1:] = (1 - share[1:]) * left[1:] + share[1:] * ratios[:, step] * left[:-1]
    return np.asarray(np.log(left[taken]))


def apart(separation: int, p: float, s: Array, v: Array) -> Array:
    """Steps with probability p after a wait of ``separation``, as after many steps."""
    ratios, steps = np.exp(s - v / 2), s.shape[1]
    after = np.ones((steps + separation, len(s)))
    for step in range(steps - 1, -1, -1):
        after[step] = (1 - p) * after[step + 1] + p * ratios[:, step] * after[step + separation]
    waits = after[0] + p * after[1:separation].sum(axis=0)
    return np.asarray(np.log(waits / (1 + (separation - 1) * p)))


def two_in_lots(together: float, s: Array, v: Array) -> Array:
    """Two records in one of the steps each, the same one with the probability ``together``."""
    one, two = np.exp(s - v / 2), np.exp(2 * s - 2 * v)
    pairs = (one.sum(axis=1) ** 2 - (one**2).sum(axis=1)) / (v.size * (v.size - 1))
    return np.asarray(np.log(pairs * (1 - together) + two.mean(axis=1) * together))


def two_apart(separation: int, p: float, s: Array, v: Array) -> Array:
    """Two records, each in steps as ``apart`` has one."""
    waits = range(separation)
    ratios = [1.0, np.exp(s - v / 2), np.exp(2 * s - 2 * v)]
    after = dict.fromkeys(product(waits, waits), np.ones(len(s)))
    chances = {0: ((0, 0, 1 - p), (1, separation - 1, p))}
    moves = {wait: chances.get(wait, ((0, wait - 1, 1.0),)) for wait in waits}
    for step in range(s.shape[1] - 1, -1, -1):
        here = [ratio if index == 0 else ratio[:, step] for index, ratio in enumerate(ratios)]
        after = {
            (one, other): sum(
                chance * share * here[taken + drawn] * after[first, second]
                for taken, first, chance in moves[one]
                for drawn, second, share in moves[other]
            )
            for one, other in product(waits, waits)
        }
    first = [1.0 if wait == 0 else p for wait in waits]
    total = sum(first[one] * first[other] * after[one, other] for one, other in after)
    return np.asarray(np.log(total / (1 + (separation - 1) * p) ** 2))


def in_samples_with_memory(q: float, column: tuple[float, ...], s: Array, v: Array) -> Array:
    """Samples of a record that a ``column`` moves; the last steps in which it was are the state."""
    steps, lags = s.shape[1], len(column)
    unit = v[0] / sum(c * c for c in column)
    weights = {(0,) * (lags - 1): np.ones(len(s))}
    for step in range(steps):
        inside = [
            unit * sum(column[i] * column[i + lag] for i in range(min(lags - lag, steps - step)))
            for lag in range(lags)
        ]
        after: dict[tuple[int, ...], Array] = {}
        for past, weight in weights.items():
            met = sum(inside[lag] for lag in range(1, lags) if past[lag - 1])
            moved = weight * q * np.exp(s[:, step] - v[step] / 2 - met)
            for taken, part in ((0, weight * (1 - q)), (1, moved)):
                state = (taken, *past[:-1])
                after[state] = after.get(state, 0.0) + part
        weights = after
    return np.asarray(np.log(sum(weights.values())))


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A plan, the law of its lots, and what the other libraries have of it.

    A unit's records each move a sum by ``move`` clip norms, and ``column`` says how that spreads
    over the next steps. ``shared`` is the number of users of a record.
    """

    name: str
    sampling: dict[str, Any]
    steps: int
    sigma: float
    loss: Loss
    adjacency: str = "zero_out"
    records: int = 1
    shared: int = 1
    move: float = 1.0
    column: tuple[float, ...] = (1.0,)
    event: DpEvent | None = None

    def plan(self) -> Plan:
        """Return the plan as a user writes it."""
        users = {"unit": "user", "contributions_per_user": self.records}
        users |= {"users_per_record": self.shared} if self.shared > 1 else {}
        noise = {"kind": "toeplitz", "coefficients": [*self.column]}
        return plan_from(
            {
                "version": 1,
                "adjacency": self.adjacency,
                "dataset": {"size": SIZE, **(users if self.records > 1 else {})},
                "sampling": self.sampling,
                "steps": self.steps,
                "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": self.sigma}],
                **({"noise": noise} if len(self.column) > 1 else {}),
                "target": {"delta": DELTA},
            }
        )


def repeated(steps: int, event: DpEvent) -> DpEvent:
    """Return ``event`` in every step."""
    return dp_event.SelfComposedDpEvent(event, steps)


def users_event(records: int, q: float, sigma: float) -> DpEvent:
    """Return the mixture of a user's records that a step draws."""
    drawn = np.arange(records + 1)
    return dp_event.MixtureOfGaussiansDpEvent(
        sigma, drawn.tolist(), binom.pmf(drawn, records, q).tolist()
    )


GAUSSIAN = dp_event.GaussianDpEvent
BANDED = (1.0, 0.5, 0.25, 0.125)
AFTER_WAIT = 0.05 / 0.85
"""The probability of a step after b = 4, with which lots have a twentieth of the records."""
CUT_RATE = 0.02 * binom.cdf(109, SIZE - 1, 0.02) + 110 / SIZE * binom.sf(110, SIZE, 0.02)
"""The probability that a record is in a lot that is cut to 110."""
USERS = Case(
    name="Poisson, q = 0.02, users of 4 records",
    sampling={"scheme": "poisson", "probability": 0.02},
    steps=100,
    sigma=2.0,
    loss=partial(in_samples, 0.02, 4),
    records=4,
    event=repeated(100, users_event(4, 0.02, 2.0)),
)
CASES = (
    Case(
        name="Poisson, q = 0.02",
        sampling={"scheme": "poisson", "probability": 0.02},
        steps=100,
        sigma=0.8,
        loss=partial(in_samples, 0.02, 1),
        event=repeated(100, dp_event.PoissonSampledDpEvent(0.02, GAUSSIAN(0.8))),
    ),
    Case(
        name="k = 2 of T",
        sampling={"scheme": "random_allocation", "participations": 2},
        steps=100,
        sigma=0.8,
        loss=partial(in_some_steps, 2),
    ),
    Case(
        name="k = 10 of T",
        sampling={"scheme": "random_allocation", "participations": 10},
        steps=100,
        sigma=1.5,
        loss=partial(in_some_steps, 10),
    ),
    Case(
        name="balls in 50 bins",
        sampling={"scheme": "balls_in_bins", "lot_size": 100},
        steps=50,
        sigma=0.8,
        loss=partial(in_one_lot, 50),
    ),
    Case(
        name="balls in 50 bins, 3 epochs",
        sampling={"scheme": "balls_in_bins", "lot_size": 100},
        steps=150,
        sigma=1.5,
        loss=partial(in_one_lot, 50),
    ),
    Case(
        name="b_min_sep, b = 4",
        sampling={"scheme": "b_min_sep", "lot_size": 250, "separation": 4},
        steps=100,
        sigma=1.5,
        loss=partial(apart, 4, AFTER_WAIT),
    ),
    Case(
        name="b_min_sep, b = 4, 4 bands",
        sampling={"scheme": "b_min_sep", "lot_size": 250, "separation": 4},
        steps=100,
        sigma=1.5,
        loss=partial(apart, 4, AFTER_WAIT),
        column=BANDED,
    ),
    USERS,
    replace(USERS, name="the same, two users a record", shared=2),
    Case(
        name="Poisson, q = 0.02, cut to 110",
        sampling={"scheme": "truncated_poisson", "probability": 0.02, "max_lot_size": 110},
        steps=100,
        sigma=0.8,
        loss=partial(in_samples, CUT_RATE, 1),
        event=repeated(100, dp_event.TruncatedSubsampledGaussianDpEvent(SIZE, 0.02, 110, 0.8)),
    ),
    Case(
        name="balls in 50 bins, users of 2 records",
        sampling={"scheme": "balls_in_bins", "lot_size": 100},
        steps=50,
        sigma=1.6,
        loss=partial(two_in_lots, 1 / 50),
        records=2,
    ),
    Case(
        name="b_min_sep, b = 4, users of 2 records",
        sampling={"scheme": "b_min_sep", "lot_size": 250, "separation": 4},
        steps=100,
        sigma=3.0,
        loss=partial(two_apart, 4, AFTER_WAIT),
        records=2,
    ),
    Case(
        name="shuffled, 50 lots, users of 2 records",
        sampling={"scheme": "shuffled", "lot_size": 100},
        steps=50,
        sigma=1.6,
        loss=partial(two_in_lots, 99 / 4999),
        records=2,
    ),
    Case(
        name="fixed size, B/N = 0.02, replaced",
        sampling={"scheme": "fixed_size", "lot_size": 100},
        steps=100,
        sigma=1.6,
        loss=partial(in_samples, 0.02, 1),
        adjacency="replace_one",
        move=2.0,
        event=repeated(100, dp_event.SampledWithoutReplacementDpEvent(SIZE, 100, GAUSSIAN(0.8))),
    ),
    Case(
        name="fixed size, B/N = 0.02, 4 bands, replaced",
        sampling={"scheme": "fixed_size", "lot_size": 100},
        steps=100,
        sigma=3.2,
        loss=partial(in_samples_with_memory, 0.02, BANDED),
        adjacency="replace_one",
        move=2.0,
        column=BANDED,
    ),
    Case(
        name="shuffled, 20 of 50 lots, replaced",
        sampling={"scheme": "shuffled", "lot_size": 100},
        steps=20,
        sigma=1.6,
        loss=partial(in_one_lot, 50),
        adjacency="replace_one",
        move=2.0,
    ),
)


@lru_cache(maxsize=2 * BATCHES)
def drawn(case: Case, batch: int) -> Array:
    """Return how many records of each unit are in each lot, shape (units, steps)."""
    key = hashlib.sha256(f"{case.name} {batch}".encode()).digest()
    sampler, taken = build_sampler(case.plan(), 0, key), np.zeros((SIZE, case.steps))
    for step in range(case.steps):
        taken[sampler(step).numpy(), step] = 1
    first = np.arange(0, SIZE, case.records // case.shared)[:, None]
    return np.asarray(taken[(first + np.arange(case.records)) % SIZE].sum(axis=1))


def shifted(values: Array, lag: int) -> Array:
    """Return ``values`` of ``lag`` steps later, or earlier, with zeros beyond the ends."""
    result = np.zeros_like(values)
    ends = slice(lag, None) if lag >= 0 else slice(None, lag)
    other = slice(None, values.shape[1] - lag) if lag >= 0 else slice(-lag, None)
    result[:, other] = values[:, ends]
    return result


def simulate(case: Case, batches: Sequence[int], *, present: bool, times: float) -> Losses:
    """Draw sums of a record ``times`` as large; return losses of runs with or without it."""
    losses, weights = [], []
    steps = np.arange(case.steps)
    squares = sum((steps + lag < case.steps) * c**2 for lag, c in enumerate(case.column))
    for batch in batches:
        source = np.random.default_rng([batch, present])
        counts = drawn(case, batch) * case.move
        sums = case.sigma * source.standard_normal(counts.shape)
        for lag, c in enumerate(case.column):
            sums += times * c * shifted(counts, -lag)
        parts = (c * shifted(sums, lag) for lag, c in enumerate(case.column))
        s = case.move / case.sigma**2 * sum(parts)
        v = (case.move / case.sigma) ** 2 * np.asarray(squares)
        loss, of_drawn = case.loss(s, v), case.loss(times * s, times**2 * v)
        losses.append(loss if present else -loss)
        weights.append(loss - of_drawn if present else -of_drawn)
    return np.array(losses), np.array(weights)


def epsilon_of(losses: Losses, deviations: float) -> float:
    """Return the ε at which the mean δ, and so many standard deviations of it, is ``DELTA``."""
    loss, weight = losses
    low, high = 0.0, 60.0
    for _ in range(40):
        middle = (low + high) / 2
        each = (np.exp(weight) * np.maximum(-np.expm1(middle - loss), 0)).mean(axis=1)
        error = each.std(ddof=1) / math.sqrt(len(each))
        low, high = (middle, high) if each.mean() + deviations * error > DELTA else (low, middle)
    return low


def monte_carlo(case: Case) -> tuple[float, float]:
    """Return the interval of ε, the larger of both orders."""
    ends, pilot = [], range(BATCHES, BATCHES + 4)
    for present in (True, False):
        draw = partial(simulate, case, present=present)
        narrow = min(
            STRETCHES[present],
            key=lambda times: width(draw(pilot, times=times)),
        )
        losses = draw(range(BATCHES), times=narrow)
        ends.append([epsilon_of(losses, sign * REACH) for sign in (-1, 1)])
    return max(end[0] for end in ends), max(end[1] for end in ends)


def width(losses: Losses) -> float:
    """Return the variance of δ relative to its square, at the ε where its mean is ``DELTA``."""
    at = epsilon_of(losses, 0.0)
    each = np.exp(losses[1]) * np.maximum(-np.expm1(at - losses[0]), 0)
    return float(each.var() / max(each.mean(), 1e-300) ** 2)


def of_jax(case: Case, oracle: Oracle) -> tuple[tuple[float, float], float]:
    """Return jax-privacy's interval of ε by its own draws, and its seconds."""
    scheme = case.sampling["scheme"]
    count, seconds, ends = JAX_DRAWS[scheme], 0.0, []
    for present in (True, False):
        answer = oracle.ask(
            "losses_of_draws",
            strategy=scheme,
            steps=case.steps,
            apart=case.sampling.get("separation") or SIZE // case.sampling["lot_size"],
            probability=AFTER_WAIT,
            noise=case.sigma,
            column=[*case.column],
            present=present,
            count=count,
        )
        losses = np.reshape(answer.result, (BATCHES, -1))
        ends.append([epsilon_of((losses, 0 * losses), sign * REACH) for sign in (-1, 1)])
        seconds += answer.seconds
    return (max(end[0] for end in ends), max(end[1] for end in ends)), seconds


def of_dp_accounting(case: Case) -> float:
    """Return dp-accounting's ε, by its accountant that knows the event."""
    assert case.event is not None
    if case.adjacency == "replace_one":
        accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    else:
        accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL)
    return float(accountant.compose(case.event).get_epsilon(DELTA))


def interval(ends: tuple[float, float]) -> str:
    """Return both ends in brackets."""
    return f"[{ends[0]:.4f}, {ends[1]:.4f}]"


def simulated_mu(case: Case) -> float:
    """Return a μ below which the draws exceed the Gaussian δ at some ε."""
    largest = 0.0
    for present, larger in product((True, False), MU_EPSILONS):
        times = (1.0 + larger) if present else -1.0 * larger
        loss, weight = simulate(case, range(BATCHES), present=present, times=times)
        for epsilon in MU_EPSILONS[larger]:
            each = (np.exp(weight) * np.maximum(-np.expm1(epsilon - loss), 0)).mean(axis=1)
            error = REACH * each.std(ddof=1) / math.sqrt(len(each))
            largest = max(largest, mu_at(epsilon, each.mean() - error))
    return largest


def mu_at(epsilon: float, delta: float) -> float:
    """Return the μ of the Gaussian mechanism that has ``delta`` at ``epsilon``."""
    low, high = 1e-6, 50.0
    for _ in range(60):
        mu = (low + high) / 2
        value = ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)
        low, high = (mu, high) if value < delta else (low, mu)
    return high


def least_gaussian(case: Case) -> str:
    """Return the least μ that we prove for ``case``, and that of the draws at a few ε."""
    began = time.process_time()
    found = with_gaussian_bound(certify(case.plan(), second_opinion=False)).gaussian
    assert found is not None
    ours = f"| {case.name} | {found.mu:.4f} | {found.regret:.4f} "
    return f"{ours}| {time.process_time() - began:.1f} | {simulated_mu(case):.4f} |\n"


def main() -> None:
    """Print a row for each case, and what a Gaussian curve that bounds some of them needs."""
    oracle = Oracle() if Oracle.available() else None
    heads = ["plan", "T", "σ", "ours: ε", "s", "Monte Carlo: ε", "s"]
    heads += ["jax-privacy: ε", "s", "dp-accounting: ε", "s"]
    sys.stdout.write(f"\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|\n")
    for case in CASES:
        plan, row = case.plan(), [case.name, f"{case.steps}", f"{case.sigma:g}"]
        began = time.process_time()
        ours = certify(plan, second_opinion=False).epsilon
        assert ours is not None
        row += [interval((ours.lower, ours.upper)), f"{time.process_time() - began:.1f}"]
        began = time.process_time()
        row += [interval(monte_carlo(case)), f"{time.process_time() - began:.1f}"]
        if oracle is not None and case.sampling["scheme"] in JAX_DRAWS:
            ends, seconds = of_jax(case, oracle)
            row += [interval(ends), f"{seconds:.1f}"]
        else:
            row += ["", ""]
        began = time.process_time()
        theirs = "" if case.event is None else f"{of_dp_accounting(case):.4f}"
        row += [theirs, f"{time.process_time() - began:.1f}" if theirs else ""]
        sys.stdout.write(f"| {' | '.join(row)} |\n")
        sys.stdout.flush()
    sys.stdout.write("\n| plan | ours: μ | regret | s | Monte Carlo: μ ≥ |\n" + "|---" * 5 + "|\n")
    for case in CASES:
        if case.name in WITH_MU:
            sys.stdout.write(least_gaussian(case))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
