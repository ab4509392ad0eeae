"""Small plans of every scheme, adjacency, unit and kind of noise, and their attacks."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from affidavit.accountants import Bracket, accountant
from affidavit.assessment import Solver, certify
from affidavit.assessment.calibration import lower_open
from affidavit.mechanisms import Attack
from affidavit.plan import Plan
from affidavit.plan.parse import plan_from
from tests.assessment.attacks.execution import Executed, Execution

DELTA = 0.05
RUNS = 200_000 if os.environ.get("AFFIDAVIT_SEED") is None else 500_000
BIDIAGONAL = {"kind": "bidiagonal", "lambda": 0.8}
SIGNED = {"kind": "toeplitz_inverse", "coefficients": [1, -0.5, 0.3]}
TREE, BANDED, ROOT = {"kind": "tree"}, {"kind": "banded", "bands": 3}, {"kind": "sqrt"}
BLT = {"kind": "blt", "decays": [0.9, 0.5], "scales": [0.1, 0.3]}
POISSON = {"scheme": "poisson", "probability": 0.3}
TRUNCATED = {"scheme": "truncated_poisson", "probability": 0.3, "max_lot_size": 6}
FIXED_SIZE = {"scheme": "fixed_size", "lot_size": 5}
SHUFFLED, CYCLIC = {"scheme": "shuffled", "lot_size": 5}, {"scheme": "cyclic", "lot_size": 5}
BINS = {"scheme": "balls_in_bins", "lot_size": 5}
FRESH_BINS = {**BINS, "bins_drawn": "each_epoch"}
GROUPS = {"scheme": "cyclic_poisson", "lot_size": 4, "groups": 4}
APART = {"scheme": "b_min_sep", "lot_size": 5, "separation": 3}
ALLOCATED = {"scheme": "random_allocation", "participations": 2}
FULL = {"scheme": "full_batch"}


def small(
    sampling: dict[str, Any] | None = None,
    sigma: float = 1.0,
    steps: int = 6,
    *,
    records: int | None = None,
    size: int = 20,
    delta: float = DELTA,
    **fields: Any,
) -> Plan:
    """A plan over ``size`` records; ``records`` are those of a user, if that is the unit."""
    dataset: dict[str, Any] = {"size": size}
    if records is not None:
        dataset |= {"unit": "user", "contributions_per_user": records}
    document: dict[str, Any] = {
        "version": 1,
        "adjacency": "zero_out",
        "dataset": dataset,
        "target": {"delta": delta},
        "allow_large_delta": "small runs",
        **({} if sampling is None else phase(sampling, sigma, steps)),
        **fields,
    }
    return plan_from(document)


def phase(sampling: dict[str, Any], sigma: float, steps: int, **fields: Any) -> dict[str, Any]:
    """One phase of a plan."""
    release = {"name": "all", "clip_norm": 1, "noise_multiplier": sigma}
    return {"sampling": sampling, "steps": steps, "releases": [release], **fields}


def strongest_attack(plan: Plan) -> tuple[Bracket, Attack, float]:
    """The bracket that is printed for ``plan``, its strongest attack, and the ε of the attack."""
    assessment = certify(plan, second_opinion=False)
    assert assessment.epsilon is not None, assessment.reasons
    engine = accountant(assessment.accountants[0].name)
    solver = Solver(lowered=lower_open(plan), engine=engine)
    assert plan.target.delta is not None
    return assessment.epsilon, *solver.strongest_attack(solver.solve(), plan.target.delta)


def execute(plan: Plan, attack: Attack, seed: int | str, runs: int = RUNS) -> Executed:
    """The outcomes of ``attack``, with the better of what others may contribute."""
    assert plan.target.delta is not None
    words = [int(byte) for byte in str(seed).encode()]
    free = any(phase.others == "nothing_or_right_angle" for phase in attack.phases)
    found = [
        Execution(attack, np.random.default_rng(words), right_angle=angle).run(
            runs, plan.target.delta
        )
        for angle in ([False, True] if free else [False])
    ]
    return max(found, key=lambda one: one.most(1.0))
