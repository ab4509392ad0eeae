"""Every rule of ``plan.contradictions`` has a plan that only it rejects, and says where."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest

from affidavit.plan import contradictions
from affidavit.plan.diagnostics import MalformedPlan, Reason
from affidavit.plan.parse import plan_from

Make = Callable[..., dict[str, Any]]

NOISY = {"name": "all", "clip_norm": 1, "noise_multiplier": 5}
OPEN = {"name": "all", "clip_norm": 1}
POISSON = {"scheme": "poisson", "probability": 0.1}
PHASE = {"sampling": {"scheme": "full_batch"}, "steps": 3, "releases": [NOISY]}
SHA = "0" * 64


def phases(*parts: dict[str, Any]) -> dict[str, Any]:
    """Changes that make the plan one of several phases."""
    return {"sampling": ..., "steps": ..., "releases": ..., "phases": list(parts)}


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


@pytest.mark.parametrize("name", CASES)
def test_a_contradiction_is_rejected_by_its_own_rule_alone(document: Make, name: str) -> None:
    changes, code, pointer = CASES[name]
    with pytest.raises(MalformedPlan) as caught:
        plan_from(document(**changes))
    (reason,) = caught.value.reasons
    assert (reason.code, reason.pointer) == (code, pointer)
    assert reason.remedy.endswith(".")


def test_every_rule_has_a_plan_that_it_rejects(
    document: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired: set[int] = set()

    def watch(code: str) -> Callable[[str, str, str], Reason]:
        def rule(pointer: str, message: str, remedy: str) -> Reason:
            fired.add(sys._getframe(1).f_lineno)
            return Reason(code=code, pointer=pointer, message=message, remedy=remedy)

        return rule

    for name in ("_conflict", "_missing", "_wrong"):
        monkeypatch.setattr(contradictions, name, watch(name))
    for changes, _, _ in CASES.values():
        with pytest.raises(MalformedPlan):
            plan_from(document(**changes))
    tree = ast.parse(inspect.getsource(contradictions))
    rules = {
        node.value.lineno for node in ast.walk(tree) if isinstance(node, ast.Yield) and node.value
    }
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
        {"noise": {"kind": "blt", "decays": [0.5], "scales": [0.5]}},
        {"dataset": {"unit": "user", "contributions_per_user": 2}},
        phases(PHASE, {**PHASE, "releases": [OPEN]}),
    ],
)
def test_what_agrees_with_itself_is_a_plan(document: Make, changes: dict[str, Any]) -> None:
    assert plan_from(document(**changes)).version == 1
