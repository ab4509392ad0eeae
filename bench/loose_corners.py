"""Report our widest brackets, with their ends, width and time, beside dp-accounting.

    python bench/loose_corners.py

dp-accounting's Rényi accountant runs under the plan's adjacency; its bounds hold at every δ. It has
no event for the rows that are left blank.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import dp_accounting
from dp_accounting.dp_event import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    PoissonSampledDpEvent,
    RepeatAndSelectDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.rdp import RdpAccountant

from affidavit.certificate import certify
from affidavit.plan import plan_from

REPLACED = dp_accounting.NeighboringRelation.REPLACE_ONE


def plan(sigma: float, steps: int, delta: float, **changes: Any) -> dict[str, Any]:
    """Return a plan with Poisson lots at q = 0.01 of half a million records, and ``changes``."""
    return {
        "version": 1,
        "adjacency": "add_remove",
        "dataset": {"size": 500_000},
        "sampling": {"scheme": "poisson", "lot_size": 5_000},
        "steps": steps,
        "releases": [{"name": "all", "clip_norm": 1.0, "noise_multiplier": sigma}],
        "target": {"delta": delta},
        **changes,
    }


def cut(largest: int) -> dict[str, Any]:
    """Return Poisson lots of 5,000 records on average, truncated to a maximum."""
    return {"scheme": "truncated_poisson", "lot_size": 5_000, "max_lot_size": largest}


def poisson(sigma: float, steps: int) -> DpEvent:
    """Return Poisson lots at q = 0.01 for a number of steps."""
    return SelfComposedDpEvent(PoissonSampledDpEvent(0.01, GaussianDpEvent(sigma)), steps)


FIXED = {
    "adjacency": "replace_one",
    "dataset": {"size": 50_000},
    "sampling": {"scheme": "fixed_size", "lot_size": 500},
}
BINS = {"dataset": {"size": 50_000}, "sampling": {"scheme": "balls_in_bins", "lot_size": 500}}
AFRESH = {**BINS, "sampling": {**BINS["sampling"], "bins_drawn": "each_epoch"}}
USERS = {"size": 500_000, "unit": "user", "contributions_per_user": 3}
LAPLACE = {"extra": [{"kind": "laplace", "name": "accuracy", "noise_multiplier": 20}]}
SELECTED = {
    "extra": [
        {"kind": "repeat_and_select", "name": "search", "distribution": "geometric", "mean": 10}
    ]
}
BANDED = {"noise": {"kind": "bsr", "bands": 4}}
SEPARATED = {
    **BANDED,
    "sampling": {"scheme": "b_min_sep", "lot_size": 5_000, "separation": 4},
}
GROUPS = {**BANDED, "sampling": {"scheme": "cyclic_poisson", "lot_size": 5_000, "groups": 4}}
ROWS: dict[str, tuple[dict[str, Any], Callable[[], DpEvent] | None]] = {
    "lots of fixed size": (
        plan(1.0, 2000, 1e-6, **FIXED),
        lambda: SelfComposedDpEvent(
            SampledWithoutReplacementDpEvent(50_000, 500, GaussianDpEvent(0.5)), 2000
        ),
    ),
    "bins kept for ten epochs": (plan(2.0, 1000, 1e-6, **BINS), None),
    "bins drawn for each of ten epochs": (plan(2.0, 1000, 1e-6, **AFRESH), None),
    "bins kept, a replaced record": (
        plan(2.0, 1000, 1e-6, **{**BINS, "adjacency": "replace_one"}),
        None,
    ),
    "the best of ten runs on bins": (plan(2.0, 1000, 1e-6, **BINS, **SELECTED), None),
    "separated samples": (plan(2.0, 1000, 1e-6, **SEPARATED), None),
    "the same, a replaced record": (
        plan(2.0, 1000, 1e-6, **{**SEPARATED, "adjacency": "replace_one"}),
        None,
    ),
    "samples of groups, a replaced record": (
        plan(2.0, 1000, 1e-6, **{**GROUPS, "adjacency": "replace_one"}),
        None,
    ),
    "joint σ of 0.15": (plan(0.15, 1000, 1e-6), lambda: poisson(0.15, 1000)),
    "a Laplace metric": (
        plan(1.0, 1000, 1e-6, **LAPLACE),
        lambda: ComposedDpEvent([poisson(1.0, 1000), LaplaceDpEvent(20.0)]),
    ),
    "the best of ten runs": (
        plan(1.0, 1000, 1e-6, **SELECTED),
        lambda: RepeatAndSelectDpEvent(poisson(1.0, 1000), 10.0, 1.0),
    ),
    "δ = 1e-30": (plan(1.0, 1000, 1e-30), lambda: poisson(1.0, 1000)),
    "10^9 steps": (plan(200.0, 10**9, 1e-6), lambda: poisson(200.0, 10**9)),
    "correlated noise, fresh lots": (plan(5.0, 1000, 1e-6, noise={"kind": "sqrt"}), None),
    "the same with tenfold noise": (plan(50.0, 1000, 1e-6, noise={"kind": "sqrt"}), None),
    "three records a user": (plan(1.0, 1000, 1e-6, dataset=USERS), None),
    "the same, replaced": (plan(2.0, 1000, 1e-6, dataset=USERS, adjacency="replace_one"), None),
    "the same in lots of fixed size": (
        plan(2.0, 1000, 1e-6, **{**FIXED, "dataset": {**USERS, "size": 50_000}}),
        None,
    ),
    "three records a user, lots cut at 5,300": (
        plan(1.0, 1000, 1e-6, dataset=USERS, sampling=cut(5_300)),
        None,
    ),
    "the same, cut at 5,500": (
        plan(1.0, 1000, 1e-6, dataset=USERS, sampling=cut(5_500)),
        None,
    ),
}


def main() -> None:
    """Print a row for each corner, with processor times."""
    sys.stdout.write("| corner | ours: ε | width | ms | dp-accounting: ε | ms |\n")
    sys.stdout.write("|---|---|---|---|---|---|\n")
    for name, (document, peer) in ROWS.items():
        start = time.process_time()
        result = certify(plan_from(document), second_opinion=False).epsilon
        ours = 1e3 * (time.process_time() - start)
        if result is None:
            raise RuntimeError(f"{name} has no bound")
        theirs = " | "
        if peer is not None:
            start = time.process_time()
            relation = REPLACED if document["adjacency"] == "replace_one" else None
            accountant = (
                RdpAccountant(neighboring_relation=relation) if relation else RdpAccountant()
            )
            epsilon = accountant.compose(peer()).get_epsilon(document["target"]["delta"])
            theirs = f"{epsilon:.5g} | {1e3 * (time.process_time() - start):.0f}"
        width = result.upper / result.lower - 1 if result.lower > 0 else float("inf")
        sys.stdout.write(
            f"| {name} | [{result.lower:.5g}, {result.upper:.5g}] | {100 * width:.2g} % "
            f"| {ours:.0f} | {theirs} |\n"
        )


if __name__ == "__main__":
    main()
