"""The laws of a mechanism, for every optimiser of the registry."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from affidavit.assessment import certify
from affidavit.mechanisms import all_mechanisms, lower, optimizers
from affidavit.mechanisms.catalogue import MECHANISMS
from affidavit.mechanisms.protocol import ANY_NOISE, CORRELATED, INDEPENDENT
from affidavit.plan import (
    GUARANTEE_FIELDS,
    OPTIMIZER_FIELDS,
    MalformedPlan,
    OptimizerName,
    Phase,
    optimizer_fields,
    plan_from,
)

ROOT = Path(__file__).resolve().parents[2]
VALUES: dict[str, Any] = {
    "momentum": 0.9,
    "beta1": 0.8,
    "beta2": 0.99,
    "learning_rate": 0.01,
    "auxiliary_learning_rate": 0.02,
    "weight_decay": 0.1,
    "floor": 1e-8,
    "smoothing": 0.5,
    "newton_schulz_steps": 3,
    "newton_schulz_degree": 3,
    "newton_schulz_start": "frobenius",
    "probes": 4,
    "kappa": 0.3,
    "gamma": 0.25,
    "denoise": {"threshold": 1.1},
    "combine": "before_clipping",
    "noise_divisor": "one",
    "error_clip_norm": 1,
    "pre_clip_norm": 3,
}
OPTIMIZERS = optimizers()
everywhere = pytest.mark.parametrize("name", OPTIMIZERS)


def minimal(name: str, **optimizer: Any) -> dict[str, Any]:
    document = OPTIMIZERS[name].minimal_plan()
    return {**document, "optimizer": {**document["optimizer"], **optimizer}}


def test_every_optimiser_that_a_plan_may_name_is_described_and_no_other() -> None:
    assert set(MECHANISMS) == set(get_args(OptimizerName)) == set(OPTIMIZER_FIELDS)


def test_the_kinds_of_noise_are_those_of_a_plan() -> None:
    noise = Phase.model_json_schema()["properties"]["noise"]
    assert set(noise["discriminator"]["mapping"]) == ANY_NOISE
    assert INDEPENDENT.isdisjoint(CORRELATED)


@everywhere
def test_a_mechanism_states_what_a_reader_must_check(name: str) -> None:
    result = OPTIMIZERS[name]
    assert result.name == name
    for item in (result.title, result.releases, result.sensitivity, result.proof, result.clipping):
        assert item
    assert result.post_processing
    assert result.sources
    assert result.needs_auxiliary_block == name.startswith("dp_muon")
    codes = [oblige.code for oblige in result.obligations]
    assert len(set(codes)) == len(codes)
    for path in re.findall(r"docs/\S+\.md", result.proof):
        assert (ROOT / path).is_file(), path


@everywhere
def test_only_an_accounted_state_sees_raw_data(name: str) -> None:
    result = OPTIMIZERS[name]
    sees = result.whole_run(plan_from(result.minimal_plan()), 0) is not None
    assert bool(result.state_on_raw_data) == sees == (name == "dp_dice")


@everywhere
def test_its_minimal_plan_is_certified_with_its_obligations(name: str) -> None:
    result = certify(plan_from(minimal(name)), second_opinion=False)
    assert result.verdict == "certified", result.reasons
    codes = [obligation["code"] for obligation in result.obligations]
    assert {oblige.code for oblige in OPTIMIZERS[name].obligations} <= set(codes)
    assert len(set(codes)) == len(codes)


def test_a_wrapper_has_the_cost_of_what_it_wraps() -> None:
    (wrapper,) = (item for item in all_mechanisms().values() if item.kind == "wrapper")
    plan = plan_from(wrapper.minimal_plan())
    bare = plan_from(minimal(plan.optimizer.name))
    assert plan.optimizer.denoise is not None
    assert lower(plan).event() == lower(bare).event()
    assert [hyperparameter["field"] for hyperparameter in wrapper.hyperparameters()] == [
        "threshold"
    ]


@everywhere
def test_hyperparameters_on_released_values_change_no_event(name: str) -> None:
    free = optimizer_fields(name) - GUARANTEE_FIELDS - {"name"}
    changed = plan_from(minimal(name, **{field: VALUES[field] for field in free}))
    assert lower(changed).event() == lower(plan_from(minimal(name))).event()


@everywhere
def test_a_field_of_another_optimiser_is_a_contradiction(name: str) -> None:
    for field in VALUES.keys() - optimizer_fields(name):
        with pytest.raises(MalformedPlan) as caught:
            plan_from(minimal(name, **{field: VALUES[field]}))
        (reason,) = caught.value.reasons
        assert (reason.code, reason.pointer) == ("conflict", f"/optimizer/{field}")
        assert name not in reason.remedy.split(", ")


@everywhere
def test_noise_that_the_mechanism_is_not_defined_with_is_refused(name: str) -> None:
    mechanism = OPTIMIZERS[name]
    for noise in ({"kind": "independent"}, {"kind": "tree"}):
        document = {**minimal(name), "noise": noise}
        result = certify(plan_from(document), second_opinion=False)
        codes = {reason.code for reason in result.reasons}
        assert ("noise_mismatch" in codes) == (not mechanism.accepts(noise["kind"]))


@everywhere
def test_what_is_shown_says_for_every_field_what_it_takes_and_costs(name: str) -> None:
    shown = OPTIMIZERS[name].as_dict()
    assert shown["name"] == name
    assert {entry["field"] for entry in shown["hyperparameters"]} == optimizer_fields(name) - {
        "name"
    }
    for item in shown["hyperparameters"]:
        assert item["takes"]
        assert item["meaning"]
        assert item["changes_the_guarantee"] == (item["field"] in GUARANTEE_FIELDS)
