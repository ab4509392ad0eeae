"""Every rule of the validators and of the noise has a plan that only it rejects, and says where."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest

from affidavit.plan import strategies, validators
from affidavit.plan.diagnostics import MalformedPlan, Reason
from affidavit.plan.parse import plan_from

Make = Callable[..., dict[str, Any]]

NOISY = {"name": "all", "clip_norm": 1, "noise_multiplier": 5}
OPEN = {"name": "all", "clip_norm": 1}
POISSON = {"scheme": "poisson", "probability": 0.1}
ALLOCATED = {"scheme": "random_allocation", "participations": 2}
PHASE = {"sampling": {"scheme": "full_batch"}, "steps": 3, "releases": [NOISY]}
SHA = "0" * 64


def phases(*parts: dict[str, Any]) -> dict[str, Any]:
    """Changes that make the plan one of several phases."""
    return {"sampling": ..., "steps": ..., "releases": ..., "phases": list(parts)}


FORMS: tuple[tuple[dict[str, Any], str, str], ...] = (
    (
        {"releases": [{**NOISY, "clip_norm": 1e18}]},  # signed as a whole number above 2^53
        "invalid_value",
        "/releases/0/clip_norm",
    ),
    ({"noise": {"kind": "bsr"}}, "missing_field", "/noise/bands"),
    ({"noise": {"kind": "bisr"}}, "missing_field", "/noise/bands"),
    ({"noise": {"kind": "banded"}}, "missing_field", "/noise/bands"),
    ({"noise": {"kind": "banded_inverse"}}, "missing_field", "/noise/bands"),
    ({"noise": {"kind": "sqrt", "bands": 3}}, "conflict", "/noise/bands"),
    (
        {"noise": {"kind": "toeplitz", "coefficients": [0, 1]}},
        "invalid_value",
        "/noise/coefficients/0",
    ),
    (
        {"noise": {"kind": "toeplitz_inverse", "coefficients": [1e-200]}},
        "invalid_value",
        "/noise/coefficients/0",
    ),
    (
        {"noise": {"kind": "toeplitz", "coefficients": [1, 1e200]}},
        "invalid_value",
        "/noise/coefficients/1",
    ),
    (
        {"noise": {"kind": "matrix", "rows": [[1, 0], [1]]}},
        "invalid_value",
        "/noise/rows/1",
    ),
    (
        {"noise": {"kind": "matrix", "rows": [[1, 0.5], [0, 1]]}},
        "invalid_value",
        "/noise/rows/0/1",
    ),
    (
        {"noise": {"kind": "matrix", "rows": [[1, 0], [1, 0]]}},
        "invalid_value",
        "/noise/rows/1/1",
    ),
    (
        {"noise": {"kind": "matrix", "rows": [[1, 0], [1e101, 1]]}},
        "invalid_value",
        "/noise/rows/1",
    ),
    (
        {"participation": {"schema": "single", "participations": 2}},
        "conflict",
        "/participation/participations",
    ),
    (
        {"participation": {"schema": "single", "separation": 2}},
        "conflict",
        "/participation/separation",
    ),
    (
        {"participation": {"schema": "min_separation", "participations": 2}},
        "missing_field",
        "/participation/separation",
    ),
    (
        {"participation": {"schema": "fixed_epoch"}},
        "missing_field",
        "/participation/separation",
    ),
    ({"workload": {"kind": "momentum"}}, "missing_field", "/workload/momentum"),
    ({"workload": {"momentum": 0.5}}, "conflict", "/workload/momentum"),
    ({"workload": {"learning_rates": [1]}}, "conflict", "/workload/learning_rates"),
)

CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "version": ({"version": 2}, "invalid_value", "/version"),
    "user without contributions": (
        {"dataset": {"unit": "user"}},
        "missing_field",
        "/dataset/contributions_per_user",
    ),
    "contributions without user": (
        {"dataset": {"contributions_per_user": 3}},
        "conflict",
        "/dataset/contributions_per_user",
    ),
    "users of a record without user": (
        {"dataset": {"users_per_record": 2}},
        "conflict",
        "/dataset/users_per_record",
    ),
    "steps and epochs": ({"epochs": 1}, "conflict", "/steps"),
    "no length": ({"steps": ...}, "missing_field", "/steps"),
    "steps: null among several": (
        phases(PHASE, {**PHASE, "steps": None}),
        "conflict",
        "/phases/1/steps",
    ),
    "steps and noise open": ({"steps": None, "releases": [OPEN]}, "conflict", "/steps"),
    "full batch with a lot": (
        {"sampling": {"scheme": "full_batch", "lot_size": 10}},
        "conflict",
        "/sampling",
    ),
    "full batch with a probability": (
        {"sampling": {"scheme": "full_batch", "probability": 0.5}},
        "conflict",
        "/sampling",
    ),
    "lot and probability": (
        {"sampling": {**POISSON, "lot_size": 10}},
        "conflict",
        "/sampling/probability",
    ),
    "a probability of lots in order": (
        {"sampling": {"scheme": "shuffled", "probability": 0.5}},
        "conflict",
        "/sampling/probability",
    ),
    "no lot": ({"sampling": {"scheme": "cyclic"}}, "missing_field", "/sampling/lot_size"),
    "a lot of nothing": (
        {"sampling": {"scheme": "poisson", "lot_size": 10}, "dataset": {"name": "toy"}},
        "missing_field",
        "/dataset/size",
    ),
    "a lot of more than all": (
        {"sampling": {"scheme": "poisson", "lot_size": 1001}},
        "conflict",
        "/sampling/lot_size",
    ),
    "truncated without a limit": (
        {"sampling": {"scheme": "truncated_poisson", "probability": 0.1}},
        "missing_field",
        "/sampling/max_lot_size",
    ),
    "truncated without a size": (
        {
            "sampling": {"scheme": "truncated_poisson", "probability": 0.1, "max_lot_size": 10},
            "dataset": {"name": "toy"},
        },
        "missing_field",
        "/dataset/size",
    ),
    "groups missing": (
        {"sampling": {"scheme": "cyclic_poisson", "lot_size": 10}},
        "missing_field",
        "/sampling/groups",
    ),
    "a limit that is not used": (
        {"sampling": {**POISSON, "max_lot_size": 10}},
        "conflict",
        "/sampling/max_lot_size",
    ),
    "groups that are not used": (
        {"sampling": {**POISSON, "groups": 10}},
        "conflict",
        "/sampling/groups",
    ),
    "a lot size of a random allocation": (
        {"sampling": {**ALLOCATED, "lot_size": 10}},
        "conflict",
        "/sampling",
    ),
    "epochs of a random allocation": (
        {"sampling": ALLOCATED, "steps": ..., "epochs": 3},
        "missing_field",
        "/steps",
    ),
    "more participations than steps": (
        {"sampling": {**ALLOCATED, "participations": 10_000}},
        "conflict",
        "/sampling/participations",
    ),
    "bins of no bins": (
        {"sampling": {**POISSON, "bins_drawn": "once"}},
        "conflict",
        "/sampling/bins_drawn",
    ),
    "bins afresh under correlated noise": (
        {
            "sampling": {"scheme": "balls_in_bins", "lot_size": 10, "bins_drawn": "each_epoch"},
            "noise": {"kind": "bidiagonal", "lambda": 0.5},
        },
        "conflict",
        "/sampling/bins_drawn",
    ),
    "a last lot of no epochs": (
        {"sampling": {**POISSON, "drop_last": False}},
        "conflict",
        "/sampling/drop_last",
    ),
    "a smaller lot under correlated noise": (
        {
            "sampling": {"scheme": "shuffled", "lot_size": 10, "drop_last": False},
            "noise": {"kind": "bidiagonal", "lambda": 0.5},
        },
        "conflict",
        "/sampling/drop_last",
    ),
    "a new tree each epoch without epochs": (
        {"sampling": POISSON, "noise": {"kind": "tree", "restart": True}},
        "conflict",
        "/noise/restart",
    ),
    "noise twice": (
        {"releases": [{**NOISY, "noise_std": 5}]},
        "conflict",
        "/releases/0/noise_std",
    ),
    "noise of some": (
        {"releases": [NOISY, {**OPEN, "name": "other"}]},
        "missing_field",
        "/releases/1/noise_multiplier",
    ),
    "a matrix of nothing": ({"noise": {"kind": "matrix"}}, "conflict", "/noise"),
    "a matrix twice": (
        {"noise": {"kind": "matrix", "rows": [[1]], "file": "n.npy", "sha256": SHA}},
        "conflict",
        "/noise",
    ),
    "a file that may change": (
        {"noise": {"kind": "matrix", "file": "n.npy"}},
        "missing_field",
        "/noise/sha256",
    ),
    "an objective for a BLT that is given": (
        {"noise": {"kind": "blt", "decays": [0.5], "scales": [0.5], "objective": "max"}},
        "conflict",
        "/noise/objective",
    ),
    "a BLT of nothing": ({"noise": {"kind": "blt"}}, "conflict", "/noise"),
    "a BLT twice": (
        {"noise": {"kind": "blt", "buffers": 1, "decays": [0.5], "scales": [0.5]}},
        "conflict",
        "/noise",
    ),
    "a BLT with a scale missing": (
        {"noise": {"kind": "blt", "decays": [0.5, 0.4], "scales": [0.5]}},
        "conflict",
        "/noise/scales",
    ),
    "a release named twice": ({"releases": [NOISY, NOISY]}, "conflict", "/releases/0/name"),
    "flat clipping with two norms": (
        {"clipping": "flat", "releases": [NOISY, {**NOISY, "name": "b", "clip_norm": 2}]},
        "conflict",
        "/clipping",
    ),
    "an event named twice": (
        {"extra": [{"kind": "gaussian", "name": "m", "noise_multiplier": 9}] * 2},
        "conflict",
        "/extra/1/name",
    ),
    "no target": ({"target": {}}, "missing_field", "/target"),
    "noise for no epsilon": (
        {"releases": [OPEN], "target": {"delta": 1e-5}},
        "missing_field",
        "/target/epsilon",
    ),
    "noise for no delta": (
        {"releases": [OPEN], "target": {"epsilon": 1}},
        "missing_field",
        "/target/delta",
    ),
    "steps for no delta": (
        {"steps": None, "target": {"epsilon": 1}},
        "missing_field",
        "/target/delta",
    ),
    "proportional without weights": (
        {"allocation": "proportional", "releases": [OPEN]},
        "missing_field",
        "/releases/0/weight",
    ),
    "optimal without dimensions": (
        {"allocation": "optimal", "releases": [OPEN]},
        "missing_field",
        "/releases/0/dimension",
    ),
    "a Gaussian event without noise": (
        {"extra": [{"kind": "gaussian", "name": "m"}]},
        "missing_field",
        "/extra/0/noise_multiplier",
    ),
    "epochs without end": (
        {"steps": ..., "epochs": 1e100},
        "invalid_value",
        "/epochs",
    ),
}

LOT = {"scheme": "poisson", "lot_size": None}
PROBABILITY = {"scheme": "poisson", "probability": None}
METRIC = {"kind": "gaussian", "name": "accuracy", "noise_multiplier": 5}
SELECTION = {
    "kind": "repeat_and_select",
    "name": "best",
    "distribution": "geometric",
    "mean": 3,
}
SIZED = {"dataset": {"size": 100}}
CASES |= {
    "canaries under replace_one": (
        {"canaries": {"count": 4}, "adjacency": "replace_one", **SIZED},
        "conflict",
        "/canaries",
    ),
    "canaries in a data set without a size": (
        {"canaries": {"count": 4}, "dataset": {}, "sampling": POISSON},
        "missing_field",
        "/dataset/size",
    ),
    "more canaries than records": (
        {"canaries": {"count": 10**6}, **SIZED},
        "conflict",
        "/canaries/count",
    ),
    "an odd number of guesses": (
        {"canaries": {"count": 4, "guesses": 3}, **SIZED},
        "invalid_value",
        "/canaries/guesses",
    ),
    "both the lot size and the probability are asked for": (
        {"sampling": {**LOT, **PROBABILITY}, **SIZED},
        "conflict",
        "/sampling/probability",
    ),
    "the lot size of one phase among several is asked for": (
        {**phases(PHASE, {**PHASE, "sampling": LOT}), **SIZED},
        "conflict",
        "/phases/1/sampling/lot_size",
    ),
    "the lot size and the steps are asked for": (
        {"sampling": LOT, "steps": None, **SIZED},
        "conflict",
        "/sampling/lot_size",
    ),
    "epochs by a probability that is asked for": (
        {"sampling": PROBABILITY, "steps": ..., "epochs": 3},
        "conflict",
        "/epochs",
    ),
    "the lot size of a data set without a size": (
        {"sampling": LOT, "dataset": {}},
        "missing_field",
        "/dataset/size",
    ),
    "no number is claimed": ({"claim": {}}, "claim_unanswerable", "/claim"),
    "a claim about a run that is not given": (
        {"claim": 8, "steps": None},
        "claim_unanswerable",
        "/target",
    ),
    "a claimed epsilon without delta": (
        {"claim": 8, "target": {"epsilon": 8}},
        "claim_unanswerable",
        "/target/delta",
    ),
    "a claimed epsilon of noise that is left open": (
        {"claim": 8, "releases": [OPEN]},
        "claim_unanswerable",
        "/releases/0/noise_multiplier",
    ),
    "a claimed noise multiplier without its epsilon": (
        {"claim": {"noise_multiplier": 1}, "target": {"delta": 1e-5}},
        "claim_unanswerable",
        "/target/epsilon",
    ),
    "a best lambda with normalized columns": (
        {"noise": {"kind": "bidiagonal", "normalized": True}},
        "missing_field",
        "/noise/lambda",
    ),
    "two metrics of one name": ({"extra": [METRIC, METRIC]}, "conflict", "/extra/1/name"),
    "a noise that does not follow an adapted clip norm": (
        {
            "extra": [{"kind": "adaptive_clipping_quantile", "name": "norm", "noise_std": 5}],
            "releases": [{**OPEN, "noise_std": 5}],
        },
        "conflict",
        "/releases/0/noise_std",
    ),
    "two selections": (
        {"extra": [SELECTION, {**SELECTION, "name": "other"}]},
        "conflict",
        "/extra/0/kind",
    ),
    "a part of repetitions that are none": (
        {"extra": [{**METRIC, "each_repetition": True}]},
        "conflict",
        "/extra/0/each_repetition",
    ),
    "a truncated negative binomial without a shape": (
        {"extra": [{**SELECTION, "distribution": "truncated_negative_binomial"}]},
        "missing_field",
        "/extra/0/shape",
    ),
    "a geometric distribution with a shape": (
        {"extra": [{**SELECTION, "shape": 1}]},
        "conflict",
        "/extra/0/shape",
    ),
    "a field of another optimiser": (
        {"optimizer": {"name": "dp_sgd", "probes": 3}},
        "conflict",
        "/optimizer/probes",
    ),
    "a pre-clip below the clip norm": (
        {"optimizer": {"name": "dp_dice", "pre_clip_norm": 0.5}},
        "conflict",
        "/optimizer/pre_clip_norm",
    ),
}
CASES |= {
    f"{next(iter(changes))} at {pointer}, {next(iter(changes.values()))}": (changes, code, pointer)
    for changes, code, pointer in FORMS
}


@pytest.mark.parametrize("name", CASES)
def test_a_contradiction_is_rejected_by_its_own_rule_alone(document: Make, name: str) -> None:
    changes, code, pointer = CASES[name]
    with pytest.raises(MalformedPlan) as caught:
        plan_from(document(**changes))
    reason, *others = caught.value.reasons
    assert (reason.code, reason.pointer) == (code, pointer)
    assert {other.message for other in others} <= {reason.message}
    assert reason.remedy.endswith(".")


def test_every_rule_has_a_plan_that_it_rejects(
    document: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired: set[tuple[str, int]] = set()

    def watch(rule: Callable[[str, str, str], Reason]) -> Callable[[str, str, str], Reason]:
        def watched(pointer: str, message: str, remedy: str) -> Reason:
            caller = sys._getframe(1)
            fired.add((caller.f_globals["__name__"], caller.f_lineno))
            return rule(pointer, message, remedy)

        return watched

    rules: set[tuple[str, int]] = set()
    for module in (validators, strategies):
        for name in ("conflict", "missing_field", "invalid_value", "_claim_conflict"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, watch(getattr(module, name)))
        rules |= {
            (module.__name__, node.value.lineno)
            for node in ast.walk(ast.parse(inspect.getsource(module)))
            if isinstance(node, ast.Yield) and node.value
        }
    for changes, _, _ in CASES.values():
        with pytest.raises(MalformedPlan):
            plan_from(document(**changes))
    assert rules == fired


def test_contradictions_of_several_fields_come_together_in_their_order(document: Make) -> None:
    with pytest.raises(MalformedPlan) as caught:
        plan_from(document(version=3, epochs=1, target={}))
    assert [r.pointer for r in caught.value.reasons] == ["/version", "/steps", "/target"]


@pytest.mark.parametrize(
    "changes",
    [
        {"releases": [OPEN]},
        {"steps": None},
        {"target": {"delta": 1e-5}},
        {"target": {"epsilon": 1}},
        {"sampling": {"scheme": "poisson", "lot_size": 1000}},
        {"sampling": {**POISSON, "probability": 1}, "dataset": {}},
        {"allocation": "optimal"},
        {"noise": {"kind": "blt", "buffers": 3}},
        {"noise": {"kind": "blt", "buffers": 3, "objective": "max"}},
        {"noise": {"kind": "blt", "decays": [0.5], "scales": [0.5]}},
        {"dataset": {"unit": "user", "contributions_per_user": 2}},
        {"noise": {"kind": "sqrt"}},
        {"noise": {"kind": "bsr", "bands": 3}},
        {"noise": {"kind": "toeplitz", "coefficients": [1, 0, -1]}},
        {"noise": {"kind": "matrix", "rows": [[1, 0], [-3, 2]]}},
        {"noise": {"kind": "matrix", "file": "n.npy", "sha256": SHA}},
        {"participation": {"schema": "single"}},
        {"participation": {"schema": "single", "participations": 1}},
        {"participation": {"schema": "min_separation", "separation": 3}},
        {"workload": {"kind": "prefix_sum"}},
        {"workload": {"kind": "momentum", "momentum": 0.5, "learning_rates": [1]}},
        phases(PHASE, {**PHASE, "releases": [OPEN]}),
    ],
)
def test_what_agrees_with_itself_is_a_plan(document: Make, changes: dict[str, Any]) -> None:
    assert plan_from(document(**changes)).version == 1
