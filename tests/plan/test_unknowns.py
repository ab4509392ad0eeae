"""Null asks: which nulls are questions, what stands in their way, and what they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from affidavit.plan import Plan
from affidavit.plan.diagnostics import MalformedPlan
from affidavit.plan.serialization import as_document, digest

PlanOf = Callable[..., Plan]

POISSON = {"scheme": "poisson"}


@pytest.mark.parametrize(
    ("sampling", "asks"),
    [
        ({**POISSON, "lot_size": None}, "lot_size"),
        ({"scheme": "fixed_size", "lot_size": None}, "lot_size"),
        ({**POISSON, "probability": None}, "probability"),
        ({**POISSON, "lot_size": 10}, None),
        ({**POISSON, "lot_size": None, "probability": 0.01}, None),
        ({**POISSON, "lot_size": 10, "probability": None}, None),
        ({"scheme": "full_batch", "lot_size": None, "probability": None}, None),
    ],
)
def test_a_null_is_a_question_where_nothing_else_answers_it(
    plan_of: PlanOf, sampling: dict[str, Any], asks: str | None
) -> None:
    plan = plan_of(sampling=sampling)
    assert (plan.asks_for_lot_size, plan.asks_for_probability) == (
        asks == "lot_size",
        asks == "probability",
    )
    assert plan.is_open == (asks is not None)


def test_each_question_is_a_plan_of_its_own(plan_of: PlanOf) -> None:
    requested = [
        plan_of(sampling={**POISSON, "lot_size": None}),
        plan_of(sampling={**POISSON, "probability": None}),
        plan_of(sampling={**POISSON, "lot_size": 10}, steps=None),
    ]
    assert len({digest(plan) for plan in requested}) == 3
    assert as_document(requested[0])["sampling"] == {**POISSON, "lot_size": None}
    assert as_document(requested[1])["sampling"] == {**POISSON, "probability": None}


@pytest.mark.parametrize("given", [{"lot_size": 10}, {"probability": 0.01}])
def test_a_null_beside_an_answer_changes_no_digest(
    plan_of: PlanOf, given: dict[str, float]
) -> None:
    plain = plan_of(sampling={**POISSON, **given})
    nulls = {"lot_size": None, "probability": None}
    assert digest(plan_of(sampling={**POISSON, **nulls, **given})) == digest(plain)


@pytest.mark.parametrize(
    ("changes", "code", "pointer"),
    [
        ({"dataset": {"name": "toy"}}, "missing_field", "/dataset/size"),
        ({"target": {"delta": 1e-5}}, "missing_field", "/target/epsilon"),
        ({"target": {"epsilon": 1}}, "missing_field", "/target/delta"),
        ({"target": {}}, "missing_field", "/target"),
        ({"steps": None}, "conflict", "/sampling/lot_size"),
        (
            {"steps": ..., "epochs": 3, "sampling": {**POISSON, "probability": None}},
            "conflict",
            "/epochs",
        ),
        ({"releases": [{"name": "all", "clip_norm": 1}]}, "conflict", "/sampling/lot_size"),
        (
            {"sampling": {**POISSON, "lot_size": None, "probability": None}},
            "conflict",
            "/sampling/probability",
        ),
        (
            {"sampling": {"scheme": "shuffled", "lot_size": None}},
            "missing_field",
            "/sampling/lot_size",
        ),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused_once(
    plan_of: PlanOf, changes: dict[str, Any], code: str, pointer: str
) -> None:
    with pytest.raises(MalformedPlan) as refused:
        plan_of(**{"sampling": {**POISSON, "lot_size": None}, **changes})
    assert [(reason.code, reason.pointer) for reason in refused.value.reasons] == [(code, pointer)]
    assert refused.value.reasons[0].remedy


def test_one_phase_among_several_asks_nothing(plan_of: PlanOf) -> None:
    phase = {
        "sampling": {**POISSON, "lot_size": None},
        "steps": 10,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 20}],
    }
    with pytest.raises(MalformedPlan, match="several phases"):
        plan_of(phases=[phase, phase], sampling=..., steps=..., releases=...)
