"""The audit: does any attack beat the certificate?

Two worlds differ in one record, the canary. In each, whole runs of the trainer are observed at
every iterate and over all blocks jointly (one block at a time, noise that is √K too small would
pass). Of the runs of a stage, some calibrate: they choose the attack, its threshold and the point
(ε, δ) of the certified curve where it promises most. The others are counted, and the claim is
falsified if the lower bound on ε that they prove is above the certified one. Stages differ in
their plan and in what the other records contribute: nothing, or the opposite of the canary (so
that a sampler whose lots have a fixed size gives the canary away by whom it displaces).

Guarantees
    * A trainer that keeps its certificate is falsified with probability at most ``ALARM``,
      over all stages together, whatever the attacks do.
    * Nothing but iterates is read. A trainer that passes was not falsified; that is all.

The plan of a stage is ``plan_of_stage``; its claims are points of its certified curve, which
is asked for outside this room (``affidavit.certificate.privacy_curves``).

An attack gives one number for each run, larger where the canary seems to have been there:

certified   the likelihood ratio of the certified mechanism, over all blocks and steps
measured    the same with each tensor's noise as runs without the canary really have it: finds
            noise that is too small, or missing
displaced   that of a canary which takes the place of a record that contributes the opposite
summed      the sum of matched filters over all blocks and steps: finds noise that cancels
quietest    the least length of what is orthogonal to the canary, in any step
quiet       the sum of the logarithms of those lengths: finds noise whose scale depends on data

Each is a function of what is observed and of calibration runs alone, so that runs which were
not used to choose an attack are a fair test of it.

What a rate of right guesses proves about ε: (ε, δ)-DP says P(S) ≤ e^ε P'(S) + δ for every set of
outcomes and both orders of the two worlds. Whoever guesses "first world" on S and "second"
elsewhere is then right, on average over the worlds, with a probability of at most

    p = (P(S) + 1 - P'(S)) / 2 ≤ (e^ε + δ) / (e^ε + 1).

With n independent runs, half of them in each world, the number of right guesses is a sum of
Bernoulli variables of mean p, whose upper tail is at most that of Binomial(n, p) (Hoeffding,
1956), so that the bound of Clopper and Pearson on p holds, and with it one on ε. It can only
falsify: nothing follows where it does not.

>>> round(lower_epsilon(180, 200, delta=0.0, alarm=0.05), 3)
1.799
>>> lower_epsilon(100, 200, delta=0.0, alarm=0.05)
0.0

References: W. Hoeffding, Ann. Math. Stat. 27 (1956) 713; Clopper and Pearson,
Biometrika 26 (1934) 404; Kairouz, Oh and Viswanath, arXiv:1311.0776 (the bound on p); Steinke,
Nasr and Jagielski, arXiv:2305.08846.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.stats import beta

from affidavit.plan import Plan, plan_from, schedule
from affidavit.trainer.noise.chacha import derived_key
from tests.trainer.audit.transcripts import (
    HIDDEN,
    Array,
    Build,
    Transcripts,
    observe,
    training_of,
)

Score = Callable[[Transcripts], Array]
"""From R runs to R numbers."""

MIN_VARIANCE = 1e-6
"""Of a matched filter, so that one without noise does not stop the arithmetic."""


def scores(outside: Transcripts, probability: float) -> dict[str, Score]:
    """All attacks, calibrated on runs without the canary; q < 1 is the sampling probability."""
    measured = _measured(outside)
    baseline = float(outside.filtered.mean())
    return {
        "certified": lambda seen: _likelihood(seen.filtered, seen.joint, probability),
        "measured": lambda seen: measured(seen, probability),
        "displaced": lambda seen: _likelihood(
            seen.filtered - baseline, seen.joint, probability, shift=2.0
        ),
        "summed": lambda seen: seen.filtered.sum(1),
        "quietest": lambda seen: -seen.lengths.min(1),
        "quiet": lambda seen: -np.log(seen.lengths + 1e-12).sum(1),
    }


def _likelihood(values: Array, std: float, probability: float, *, shift: float = 1.0) -> Array:
    """Σ_t log(1 - q + q exp(ℓ_t)), ℓ_t that of a Gaussian moved by ``shift``."""
    moved = (2 * shift * values - shift**2) / (2 * std**2)
    item = np.logaddexp(np.log1p(-probability), np.log(probability) + moved)
    result: Array = item.sum(1)
    return result


def _measured(outside: Transcripts) -> Callable[[Transcripts, float], Array]:
    """The likelihood under the noise that each tensor's matched filter has in ``outside``."""
    variance = outside.matched.var((0, 1)) + MIN_VARIANCE
    precision = 1 / variance
    std = float(precision.sum() ** -0.5)

    def score(seen: Transcripts, probability: float) -> Array:
        joined = seen.matched @ (precision / precision.sum())
        return _likelihood(joined, std, probability)

    return score


def lower_epsilon(right: int, runs: int, *, delta: float, alarm: float) -> float:
    """The least ε, in nats, at ``delta`` that ``right`` of ``runs`` right guesses leave; 0 if all.

    The true ε is below it with probability at most ``alarm``, for a guess that was chosen
    before the runs were made.
    """
    if right <= runs / 2 + 1:  # below the mean the two tails are not in this order
        return 0.0
    low = float(beta.ppf(alarm, right, runs - right + 1))
    return math.log(max(1.0, (low - delta) / (1 - low)))


ALARM = 1e-5
"""Probability that a trainer which keeps its certificate is falsified, of a whole audit."""

Claim = tuple[float, float]
"""ε in nats and δ, a point of the certified curve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A data set of ``size`` records, the canary included; one record a lot is expected.

    ``others`` is the amplitude of the records that are no canary; ``balanced`` turns the sign
    of all of them at every other step. ``joint`` is the joint noise multiplier.
    """

    name: str
    size: int
    steps: int
    joint: float
    others: float
    balanced: bool

    @property
    def signs(self) -> tuple[float, ...]:
        """One for each step; balanced ones add to nothing, so that noise that is always the
        same cancels and the canary does not."""
        return tuple(-1.0 if self.balanced and step % 2 else 1.0 for step in range(self.steps))


STAGES = (
    Stage(name="silent", size=2, steps=4, joint=1.1, others=0.0, balanced=True),
    Stage(name="opposed", size=8, steps=8, joint=0.6, others=-1.0, balanced=False),
)
"""Both are certified to let an attacker be right at most 68 times in 100: low-ε plans."""


def plan_of_stage(stage: Stage) -> Plan:
    """Poisson lots, DP-SGD at learning rate 1 without momentum, a block for each matrix."""
    noise = {"clip_norm": 0.5, "noise_multiplier": stage.joint * (HIDDEN + 1) ** 0.5}
    return plan_from(
        {
            "version": 1,
            "name": f"audit-{stage.name}",
            "dataset": {"size": stage.size},
            "adjacency": "add_remove",
            "sampling": {"scheme": "poisson", "probability": 1 / stage.size},
            "steps": stage.steps,
            "releases": [
                {"name": "hidden", "count": HIDDEN, **noise},
                {"name": "auxiliary", "count": 1, **noise},
            ],
            "optimizer": {"name": "dp_sgd", "learning_rate": 1},
            "target": {"delta": 0.1},
        }
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Runs of each world in a stage: for calibration, and to be counted."""

    calibration: int = 60
    counted: int = 140


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a stage proved: ε is at least ``epsilon`` at ``delta``, where it was certified to be
    at most ``certified``; all ε in nats."""

    stage: str
    attack: str
    epsilon: float
    certified: float
    delta: float

    @property
    def falsified(self) -> bool:
        """Whether the trainer violates its certificate."""
        return self.epsilon > self.certified


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chosen:
    """An attack that guesses "inside" where ``sign`` times its score is above a threshold."""

    attack: str
    score: Score
    sign: float
    threshold: float
    claim: Claim

    def right(self, inside: Transcripts, outside: Transcripts) -> int:
        """The number of runs of the two worlds that it guesses right."""
        yes, no = (self.sign * self.score(seen) > self.threshold for seen in (inside, outside))
        return int(yes.sum() + (~no).sum())


def audit(
    stage: Stage,
    claims: Sequence[Claim],
    *,
    key: bytes,
    build: Build = training_of,
    sizes: Sizes | None = None,
) -> Finding:
    """The finding of a stage about the trainer that ``build`` creates.

    ``claims`` are of ``plan_of_stage(stage)``; ``key`` (32 bytes) is that of the audit's own
    randomness.
    """
    sizes, plan, others = sizes or Sizes(), plan_of_stage(stage), [stage.others] * (stage.size - 1)
    runs = sizes.calibration + sizes.counted
    inside, outside = (
        observe(plan, amplitudes, stage.signs, runs, key=derived_key(key, world), build=build)
        for world, amplitudes in (("inside", [*others, 1.0]), ("outside", others))
    )
    first = sizes.calibration
    chosen = _choose(plan, claims, inside.part(0, first), outside.part(0, first), sizes.counted)
    epsilon, delta = chosen.claim
    return Finding(
        stage=stage.name,
        attack=chosen.attack,
        epsilon=lower_epsilon(
            chosen.right(inside.part(first, runs), outside.part(first, runs)),
            2 * sizes.counted,
            delta=delta,
            alarm=ALARM / len(STAGES),
        ),
        certified=epsilon,
        delta=delta,
    )


def _choose(
    plan: Plan, claims: Sequence[Claim], inside: Transcripts, outside: Transcripts, counted: int
) -> _Chosen:
    """The attack that should beat a claim by most, by what it does in the calibration runs."""
    probability = float(schedule.sampling_probability(plan, plan.phases[0]))
    result: list[tuple[float, str, Score, float, float]] = []
    for (name, score), sign in product(scores(outside, probability).items(), (1.0, -1.0)):
        yes, no = np.sort(sign * score(inside)), np.sort(sign * score(outside))
        thresholds = _between(np.concatenate([yes, no]))
        right = len(yes) - np.searchsorted(yes, thresholds, side="right")
        right += np.searchsorted(no, thresholds, side="right")
        place = int(np.argmax(right))
        # A right and a wrong guess are added: few runs without a wrong one prove little.
        rate = (right[place] + 1) / (len(yes) + len(no) + 2)
        result.append((float(rate), name, score, sign, float(thresholds[place])))
    rate, name, score, sign, threshold = max(result, key=lambda item: item[0])
    expected = int(rate * 2 * counted)

    def margin(claim: Claim) -> float:
        alarm = ALARM / len(STAGES)
        return lower_epsilon(expected, 2 * counted, delta=claim[1], alarm=alarm) - claim[0]

    return _Chosen(
        attack=name, score=score, sign=sign, threshold=threshold, claim=max(claims, key=margin)
    )


def _between(values: Array) -> Array:
    """Thresholds halfway between neighbours."""
    ordered = np.unique(values)
    return (ordered[1:] + ordered[:-1]) / 2 if len(ordered) > 1 else ordered
