"""Each structural mistake has its code, names its field and says what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from affidavit.plan import plan_from, syntax_of
from affidavit.plan.diagnostics import MalformedPlan, PlanError, Reason

Make = Callable[..., dict[str, Any]]
RELEASE = {"name": "all", "clip_norm": 1, "noise_multiplier": 5}


def findings(data: Any) -> list[Reason]:
    """Every reason for which ``data`` is not a plan."""
    with pytest.raises(MalformedPlan) as caught:
        plan_from(data)
    return list(caught.value.reasons)


@pytest.mark.parametrize(
    ("changes", "pointer", "meant"),
    [
        ({"step": 1}, "/step", "steps"),
        ({"targets": {}}, "/targets", "target"),
        (
            {"releases": [{**RELEASE, "noise_multiplyer": 1}]},
            "/releases/0/noise_multiplyer",
            "noise_multiplier",
        ),
        ({"sampling": {"scheme": "full_batch", "lotsize": 1}}, "/sampling/lotsize", "lot_size"),
        ({"optimizer": {"momentun": 0.9}}, "/optimizer/momentun", "momentum"),
        ({"noise": {"kind": "bidiagonal", "lamda": 1}}, "/noise/lamda", "lambda"),
    ],
)
def test_a_misspelt_field_is_answered_with_the_one_meant(
    document: Make, changes: dict[str, Any], pointer: str, meant: str
) -> None:
    unknown = [r for r in findings(document(**changes)) if r.code == "unknown_field"]
    assert [(r.pointer, r.remedy) for r in unknown] == [(pointer, f"Did you mean {meant}?")]


def test_a_field_like_no_other_is_to_be_removed(document: Make) -> None:
    (reason,) = findings(document(zzzzzzzz=1))
    assert reason.remedy.startswith("Remove it")


def release(**changes: Any) -> dict[str, Any]:
    """The releases of a plan, the only one changed."""
    return {"releases": [{**RELEASE, **changes}]}


@pytest.mark.parametrize(
    ("changes", "code", "pointer"),
    [
        ({"version": ...}, "missing_field", "/version"),
        ({"version": "1"}, "wrong_type", "/version"),
        ({"version": None}, "wrong_type", "/version"),
        ({"adjacency": "substitute"}, "invalid_value", "/adjacency"),
        ({"steps": 0}, "invalid_value", "/steps"),
        ({"steps": -1}, "invalid_value", "/steps"),
        ({"steps": ..., "epochs": 0}, "invalid_value", "/epochs"),
        ({"releases": []}, "invalid_value", "/releases"),
        ({"releases": {}}, "wrong_type", "/releases"),
        (release(clip_norm=0), "invalid_value", "/releases/0/clip_norm"),
        (release(clip_norm=1e101), "invalid_value", "/releases/0/clip_norm"),
        (release(clip_norm=float("inf")), "invalid_value", "/releases/0/clip_norm"),
        (release(clip_norm=float("nan")), "invalid_value", "/releases/0/clip_norm"),
        (release(count=0), "invalid_value", "/releases/0/count"),
        (release(count=1_000_001), "invalid_value", "/releases/0/count"),
        (release(count=True), "wrong_type", "/releases/0/count"),
        (release(name="two words"), "invalid_value", "/releases/0/name"),
        (release(name="line\n"), "invalid_value", "/releases/0/name"),
        (release(name="a" * 65), "invalid_value", "/releases/0/name"),
        (release(name=""), "invalid_value", "/releases/0/name"),
        (release(name=7), "wrong_type", "/releases/0/name"),
        ({"notes": "a" * 10_001}, "invalid_value", "/notes"),
        ({"target": {"delta": 0}}, "invalid_value", "/target/delta"),
        ({"target": {"delta": 1}}, "invalid_value", "/target/delta"),
        ({"target": {"epsilon": -1, "delta": 0.1}}, "invalid_value", "/target/epsilon"),
        ({"dataset": {"size": 0}}, "invalid_value", "/dataset/size"),
        ({"noise": {"kind": "pink"}}, "invalid_value", "/noise/kind"),
        ({"noise": {"bands": 3}}, "missing_field", "/noise/kind"),
        ({"noise": {"kind": "bidiagonal", "lambda": 1.5}}, "invalid_value", "/noise/lambda"),
        ({"noise": {"kind": "tree", "restart": 1}}, "wrong_type", "/noise/restart"),
        ({"trajectory": "last_iterate"}, "invalid_value", "/trajectory"),
        ({"allow_large_delta": ""}, "invalid_value", "/allow_large_delta"),
        ({"phases": [], "steps": 1}, "conflict", "/releases"),
        (
            {"extra": [{"kind": "gaussian", "name": "m", "noise_multiplier": 1, "count": 0}]},
            "invalid_value",
            "/extra/0/count",
        ),
    ],
)
def test_a_value_out_of_its_range_is_refused_at_its_field(
    document: Make, changes: dict[str, Any], code: str, pointer: str
) -> None:
    (reason,) = findings(document(**changes))
    assert reason.code == code
    assert reason.pointer == pointer
    assert reason.message.endswith(".")
    assert reason.remedy.endswith(".")


def test_a_phase_among_several_is_named_by_its_place(document: Make) -> None:
    phase = {"sampling": {"scheme": "full_batch"}, "steps": 1, "releases": [RELEASE]}
    whole = document(sampling=..., steps=..., releases=...)
    (reason,) = findings({**whole, "phases": [phase, {**phase, "steps": "1"}]})
    assert reason.pointer == "/phases/1/steps"


@pytest.mark.parametrize("field", ["sampling", "steps", "epochs", "releases", "noise", "clipping"])
def test_a_field_beside_phases_that_belongs_in_them_is_refused(field: str) -> None:
    (reason,) = findings({"phases": [], field: 1, "version": 1})
    assert (reason.code, reason.pointer) == ("conflict", f"/{field}")


def test_a_plan_never_changes(document: Make) -> None:
    plan = plan_from(document())
    with pytest.raises(ValueError, match="frozen"):
        plan.version = 2  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        plan.phases[0].steps = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "raw", "syntax"),
    [
        ("a.yaml", b"{}", "yaml"),
        ("a.yml", b"{}", "yaml"),
        ("a.json", b"version: 1", "json"),
        ("-", b'  {"version": 1}', "json"),
        ("-", b"version: 1", "yaml"),
        ("plan", b"\n[1]", "json"),
        ("plan", b"", "yaml"),
    ],
)
def test_the_syntax_of_a_file(name: str, raw: bytes, syntax: str) -> None:
    assert syntax_of(name, raw) == syntax


def test_a_refusal_without_a_reason_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="reason"):
        PlanError()


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"target": {"eps": 2, "delta": 1e-5}}, "epsilon"),
        ({"adjacency": "substitute"}, "replace_one"),
        ({"adjacency": "replace"}, "replace_one"),
        ({"adjacency": "add_or_remove"}, "add_remove"),
    ],
)
def test_words_of_other_libraries_are_understood(
    document: Make, changes: dict[str, Any], hint: str
) -> None:
    (reason,) = [item for item in findings(document(**changes)) if "Did you mean" in item.remedy]
    assert f"Did you mean {hint}?" in reason.remedy
