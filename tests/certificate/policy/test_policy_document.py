"""A policy is unambiguous or refused, and its digest never changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from affidavit.assessment import certify
from affidavit.certificate.policy import evaluate_policy
from affidavit.certificate.policy.document import (
    BUILT_IN,
    MalformedPolicy,
    Policy,
    parse_policy,
    policy_from,
)
from affidavit.certificate.requirements import with_requirements
from affidavit.plan import parse_plan

EXAMPLES = Path(__file__).parents[3] / "examples"
LEAST: dict[str, Any] = {
    "schema_version": 1,
    "name": "nlg",
    "version": 1,
    "datasets": ["e2e-nlg", "dart"],
}


def policy(**changes: Any) -> Policy:
    return policy_from({**LEAST, **changes})


@pytest.mark.parametrize("name", ["e2e-dp-sgd-published", "e2e-dp-muon-published"])
def test_the_built_in_policy_changes_no_answer(name: str) -> None:
    """So commands without a policy apply none."""
    plan = parse_plan((EXAMPLES / f"{name}.yaml").read_bytes(), "yaml")
    answer = certify(plan, second_opinion=False)
    assert with_requirements(answer, BUILT_IN) is answer
    assert evaluate_policy(plan, answer, BUILT_IN)[0] is answer


def test_the_name_of_the_built_in_policy_never_changes() -> None:
    """Certificates name it by this digest; another document is another version."""
    assert BUILT_IN.reference() == {
        "name": "default",
        "version": 2,
        "digest": BUILT_IN_DIGEST,
    }


BUILT_IN_DIGEST = "sha256:d6cff414c0e5386d6827f5ba0f4d5fa91177eb674f16ef3f4fc930a53a19dcf0"


def test_yaml_and_json_and_the_order_of_lists_are_one_policy() -> None:
    yaml = b"""
schema_version: 1.0
name: nlg
version: 1
datasets: [dart, e2e-nlg]
adjacencies: [zero_out, add_remove]
epsilon_cap: 8
"""
    provided = {**LEAST, "adjacencies": ["add_remove", "zero_out"], "epsilon_cap": 8.0}
    assert parse_policy(yaml, "yaml").digest() == policy_from(provided).digest()
    assert parse_policy(json.dumps(provided).encode(), "json") == policy_from(provided)


def test_what_is_written_out_is_the_same_policy() -> None:
    provided = policy(
        caps={"dart": {"epsilon": 2}}, accountants={"pld": "0.6.0"}, on_outage="warn", approvals=2
    )
    assert policy_from(provided.as_document()) == provided
    assert policy_from(BUILT_IN.as_document()) == BUILT_IN


@pytest.mark.parametrize("field", sorted(Policy.model_fields.keys() - LEAST.keys()))
def test_every_field_changes_the_digest(field: str) -> None:
    changed: dict[str, Any] = {
        "notes": "why",
        "adjacencies": ["zero_out"],
        "samplers": ["poisson"],
        "units": ["user"],
        "engines": ["fourier"],
        "accountants": {"pld": "0.6.0"},
        "second_opinion": "required",
        "proof": "required",
        "epsilon_cap": 8,
        "delta_cap": 1e-5,
        "mu_cap": 0.5,
        "group_cap": {"records": 2, "epsilon": 8},
        "caps": {"dart": {"epsilon": 2}},
        "allow_large_delta": True,
        "budget": "required",
        "approvals": 1,
        "valid_days": 30,
        "on_outage": "warn",
    }
    assert policy(**{field: changed[field]}).digest() != policy().digest()


def test_a_data_sets_own_cap_stands_before_the_policys() -> None:
    result = policy(epsilon_cap=8, delta_cap=1e-5, caps={"dart": {"epsilon": 2}})
    assert (result.cap("dart").epsilon, result.cap("dart").delta) == (2, 1e-5)
    assert (result.cap("e2e-nlg").epsilon, result.cap(None).epsilon) == (8, 8)


def test_a_policy_covers_what_it_names_and_a_default_everything() -> None:
    assert policy().covers("dart")
    assert not policy().covers("DART")
    assert not policy().covers(None)
    assert not policy(datasets=[]).covers("dart")
    assert policy(datasets="default").covers(None)


HOSTILE: list[tuple[bytes, str, str]] = [
    (b"", "empty", ""),
    (b"[]", "wrong_type", ""),
    (b"{", "syntax", ""),
    (b"\xff", "bad_text", ""),
    (b'{"schema_version": 1, "schema_version": 1}', "duplicate_key", "/schema_version"),
    (b'{"epsilon_cap": NaN}', "not_finite", "/epsilon_cap"),
    (b'{"epsilon_cap": 1e400}', "number_out_of_range", "/epsilon_cap"),
    (b'{"name": "\\ud800"}', "bad_text", "/name"),
    (b"[" * 100_000, "too_deep", ""),
]


@pytest.mark.parametrize(("raw", "code", "pointer"), HOSTILE)
def test_hostile_json_is_refused_by_the_reader(raw: bytes, code: str, pointer: str) -> None:
    with pytest.raises(MalformedPolicy) as caught:
        parse_policy(raw, "json")
    (reason, *_) = caught.value.reasons
    assert (reason.code, reason.pointer) == (code, pointer)
    assert reason.remedy
    assert "plan" not in reason.remedy


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"schema_version": 2}, "invalid_value", "/schema_version"),
    ({"schema_version": True}, "wrong_type", "/schema_version"),
    ({"schema_version": "1"}, "wrong_type", "/schema_version"),
    ({"name": "../etc"}, "invalid_value", "/name"),
    ({"name": "n" * 65}, "invalid_value", "/name"),
    ({"name": "nlg\n"}, "invalid_value", "/name"),
    ({"version": 0}, "invalid_value", "/version"),
    ({"version": 1.5}, "wrong_type", "/version"),
    ({"datasets": "all"}, "invalid_value", "/datasets"),
    ({"datasets": ["a", "a"]}, "invalid_value", "/datasets"),
    ({"datasets": ["a b"]}, "invalid_value", "/datasets/0"),
    ({"datasets": [f"d{n}" for n in range(1001)]}, "invalid_value", "/datasets"),
    ({"adjacencies": []}, "invalid_value", "/adjacencies"),
    ({"adjacencies": ["substitute"]}, "invalid_value", "/adjacencies/0"),
    ({"samplers": ["poison"]}, "invalid_value", "/samplers/0"),
    ({"samplers": "poisson"}, "wrong_type", "/samplers"),
    ({"group_cap": {"records": 2}}, "missing_field", "/group_cap/epsilon"),
    ({"group_cap": {"records": 0, "epsilon": 1}}, "invalid_value", "/group_cap/records"),
    ({"group_cap": {"records": 201, "epsilon": 1}}, "invalid_value", "/group_cap/records"),
    ({"units": ["group"]}, "invalid_value", "/units/0"),
    ({"engines": ["opacus"]}, "invalid_value", "/engines/0"),
    ({"accountants": {"opacus": "1.0"}}, "invalid_value", "/accountants/opacus"),
    ({"accountants": {"pld": 0.6}}, "wrong_type", "/accountants/pld"),
    ({"accountants": {"pld": ">=0.6"}}, "invalid_value", "/accountants/pld"),
    ({"accountants": {"pld": "9" * 5000}}, "invalid_value", "/accountants/pld"),
    ({"epsilon_cap": 0}, "invalid_value", "/epsilon_cap"),
    ({"epsilon_cap": "8"}, "wrong_type", "/epsilon_cap"),
    ({"epsilon_cap": True}, "wrong_type", "/epsilon_cap"),
    ({"delta_cap": 1}, "invalid_value", "/delta_cap"),
    ({"caps": {"other": {"epsilon": 1}}}, "conflict", "/caps/other"),
    ({"caps": {"dart": {"epsilom": 1}}}, "unknown_field", "/caps/dart/epsilom"),
    ({"caps": {"a/b": {"epsilon": 1}}}, "invalid_value", "/caps/a~1b"),
    ({"allow_large_delta": "yes"}, "wrong_type", "/allow_large_delta"),
    ({"allow_large_delta": 1}, "wrong_type", "/allow_large_delta"),
    ({"budget": True}, "invalid_value", "/budget"),
    ({"approvals": -1}, "invalid_value", "/approvals"),
    ({"approvals": 11}, "invalid_value", "/approvals"),
    ({"valid_days": 0}, "invalid_value", "/valid_days"),
    ({"valid_days": 100_000}, "invalid_value", "/valid_days"),
    ({"on_outage": "pass"}, "invalid_value", "/on_outage"),
    ({"epsilon_cup": 8}, "unknown_field", "/epsilon_cup"),
    ({"notes": "n" * 10_001}, "invalid_value", "/notes"),
]


@pytest.mark.parametrize(("changes", "code", "pointer"), WRONG)
def test_a_wrong_field_is_refused_where_it_stands(
    changes: dict[str, Any], code: str, pointer: str
) -> None:
    with pytest.raises(MalformedPolicy) as caught:
        policy(**changes)
    result = {(reason.code, reason.pointer) for reason in caught.value.reasons}
    assert (code, pointer) in result
    assert all(reason.remedy for reason in caught.value.reasons)


@pytest.mark.parametrize("field", sorted(LEAST))
def test_a_field_that_is_needed_is_asked_for(field: str) -> None:
    with pytest.raises(MalformedPolicy) as caught:
        policy_from({key: value for key, value in LEAST.items() if key != field})
    assert [(reason.code, reason.pointer) for reason in caught.value.reasons] == [
        ("missing_field", f"/{field}")
    ]


def test_a_misspelt_field_is_guessed_and_has_its_line() -> None:
    raw = b"schema_version: 1\nname: nlg\nversion: 1\ndatasets: default\nepsilon_cup: 8\n"
    with pytest.raises(MalformedPolicy) as caught:
        parse_policy(raw, "yaml")
    (reason,) = caught.value.reasons
    assert (reason.line, reason.remedy) == (5, "Did you mean epsilon_cap?")


def test_a_policy_cannot_be_changed_once_made() -> None:
    with pytest.raises(ValueError, match="frozen"):
        policy().epsilon_cap = 100.0
