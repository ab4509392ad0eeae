"""What a newcomer's editor, notebook and typing errors show of the library."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import affidavit
import affidavit.trust

PLAN = affidavit.Plan.dp_sgd(
    notes="<b>", adjacency="add_remove", sampling="full_batch", steps=10, epsilon=2, delta=1e-5
)


@pytest.mark.parametrize("name", ["dp_sgd", "dp_adam", "dp_muon"])
def test_a_signature_names_the_fields_and_what_has_to_be_given(name: str) -> None:
    parameters = inspect.signature(getattr(affidavit.Plan, name)).parameters
    assert {"noise_multiplier", "lot_size", "delta"} <= set(parameters)
    required = {key for key, each in parameters.items() if each.default is inspect.Parameter.empty}
    assert required - {"blocks"} == {"adjacency", "sampling"}


def test_a_question_names_the_fields_and_needs_none() -> None:
    for name in ("load", "certify", "check", "epsilon", "delta", "noise_multiplier", "steps"):
        parameters = inspect.signature(getattr(affidavit, name)).parameters
        assert {"noise_multiplier", "lot_size", "delta"} <= set(parameters), name
        required = [key for key, each in parameters.items() if each.default is each.empty]
        assert required == ["source"], name


def test_what_a_call_lacks_is_named_as_its_keyword() -> None:
    known = {"adjacency": "add_remove", "sampling": "poisson", "size": 600, "lot_size": 6}
    with pytest.raises(affidavit.MalformedPlan) as lacking:
        affidavit.Plan.dp_sgd(**known, epochs=1, noise_multiplier=1)
    assert [reason.message for reason in lacking.value.reasons] == ["delta= is missing."]
    with pytest.raises(affidavit.MalformedPlan) as lacking:
        affidavit.Plan.dp_sgd(
            **{**known, "sampling": None}, epochs=1, noise_multiplier=1, delta=1e-5
        )
    assert any("sampling=" in reason.message for reason in lacking.value.reasons)
    with pytest.raises(affidavit.MalformedPlan) as lacking:
        affidavit.epsilon({"version": 1}, adjacency="add_remove", size="60_000")
    assert any("sampling=" in reason.message for reason in lacking.value.reasons)
    assert not any("`affidavit" in reason.remedy for reason in lacking.value.reasons)


@pytest.mark.parametrize("written", ["60_000", "60,000", "60000"])
def test_a_number_that_is_a_text_says_how_to_write_it(written: str) -> None:
    with pytest.raises(affidavit.MalformedPlan) as error:
        affidavit.load(PLAN, size=written)
    (reason,) = error.value.reasons
    assert (reason.pointer, reason.code) == ("/dataset/size", "wrong_type")
    assert "60000" in reason.remedy.split(",")[0]


def test_a_key_is_made_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path))
    new = affidavit.keys.new("laptop", roles={"certificate"})
    with pytest.raises(ValueError, match="status"):
        affidavit.keys.new(roles={"certify"})
    assert affidavit.keys.stored_keys() == [new]
    assert affidavit.trust.KeyStore(tmp_path / "keys").find(new) is not None


def test_a_plan_is_short_in_a_prompt_and_whole_in_a_notebook() -> None:
    assert len(repr(PLAN)) < 100
    assert "full_batch" in repr(PLAN)
    page = PLAN._repr_html_()
    assert "&lt;b&gt;" in page
    assert "clip_norm" in page


def test_an_unknown_attribute_suggests_a_known_one() -> None:
    with pytest.raises(AttributeError, match="Did you mean epsilon"):
        _ = affidavit.epsilom
    assert not hasattr(affidavit, "nothing_like_it")
    with pytest.raises(AttributeError, match="Did you mean dp_sgd"):
        _ = affidavit.Plan.dp_sdg
    assert not hasattr(affidavit.Plan, "nothing_like_it")
    with pytest.raises(AttributeError, match=r"steps= to Plan\."):
        _ = affidavit.Plan.steps
    for name in ("sigma", "lot_size", "epsilon", "epochs"):
        with pytest.raises(AttributeError) as error:
            getattr(PLAN, name)
        (place,) = re.findall(r"See (plan\S+)\.$", str(error.value))
        eval(place, {"plan": PLAN})
