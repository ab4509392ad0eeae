"""What a newcomer's editor, notebook and typing errors show of the library."""

from __future__ import annotations

import inspect

import pytest

import affidavit

PLAN = affidavit.Plan.dp_sgd(
    notes="<b>", adjacency="add_remove", sampling="full_batch", steps=10, epsilon=2, delta=1e-5
)


@pytest.mark.parametrize("name", ["dp_sgd", "dp_adam", "dp_muon"])
def test_a_signature_names_the_fields_and_what_has_to_be_given(name: str) -> None:
    parameters = inspect.signature(getattr(affidavit.Plan, name)).parameters
    assert {"noise_multiplier", "lot_size", "delta"} <= set(parameters)
    required = {key for key, each in parameters.items() if each.default is inspect.Parameter.empty}
    assert required - {"blocks"} == {"adjacency", "sampling"}


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
