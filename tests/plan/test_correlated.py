"""Noise, participation and workload that do not agree with themselves are not a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from affidavit.plan.diagnostics import MalformedPlan
from affidavit.plan.document import Plan

Make = Callable[..., Plan]
SHA = "0" * 64
RATES = {"kind": "momentum", "momentum": 0.5, "learning_rates": [1]}


@pytest.mark.parametrize(
    ("changes", "code", "pointer"),
    [
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
    ],
)
def test_a_contradiction_names_its_field_and_a_remedy(
    plan_of: Make, changes: dict[str, Any], code: str, pointer: str
) -> None:
    with pytest.raises(MalformedPlan) as caught:
        plan_of(**changes)
    (reason,) = caught.value.reasons
    assert (reason.code, reason.pointer) == (code, pointer)
    assert reason.remedy


@pytest.mark.parametrize(
    "changes",
    [
        {"noise": {"kind": "sqrt"}},
        {"noise": {"kind": "bsr", "bands": 3}},
        {"noise": {"kind": "toeplitz", "coefficients": [1, 0, -1]}},
        {"noise": {"kind": "matrix", "rows": [[1, 0], [-3, 2]]}},
        {"noise": {"kind": "matrix", "file": "n.npy", "sha256": SHA}},
        {"participation": {"schema": "single"}},
        {"participation": {"schema": "single", "participations": 1}},
        {"participation": {"schema": "min_separation", "separation": 3}},
        {"workload": {"kind": "prefix_sum"}},
        {"workload": RATES},
    ],
)
def test_what_agrees_with_itself_is_a_plan(plan_of: Make, changes: dict[str, Any]) -> None:
    plan_of(**changes)
