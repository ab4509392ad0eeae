"""Every mistake in the catalogue has an explanation, a source and a fix."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from affidavit.assessment.diagnosis import CATALOGUE, Mistake
from affidavit.assessment.diagnosis.mistake import (
    Case,
    Way,
    mistake,
)
from affidavit.plan import PHASE_FIELDS, Plan, plan_from

SPECIFIED = [
    "independent_blocks",
    "single_block",
    "injection_norm",
    "no_kappa",
    "amplified_correlated",
    "poisson_for_shuffle",
    "adjacency_factor",
    "user_as_example",
    "uncounted_release",
    "uncounted_selection",
    "filter_norm",
    "error_feedback",
    "microbatch_rate",
    "epochs_for_steps",
    "world_size",
    "sum_or_mean",
    "injected_noise",
    "identity_once",
    "single_epoch_sensitivity",
    "clip_not_joint",
    "gdp_clt",
    "loose_delta",
    "microbatch_sensitivity",
    "accountant_reset",
    "variance_or_deviation",
]


def test_every_specified_mistake_is_known() -> None:
    assert set(CATALOGUE) == set(SPECIFIED)


def test_a_new_mistake_is_one_function() -> None:
    @mistake(wrong="It is.", source="nowhere", fix="Do not.", field=("steps",))
    def forgotten_step(_: Case) -> Iterator[Way]:
        """A step is left out."""
        yield Way(text="a step was left out")

    document = {
        "version": 1,
        "adjacency": "add_remove",
        "sampling": {"scheme": "full_batch"},
        "steps": 2,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 20}],
        "target": {"delta": 1e-5},
    }
    case = Case.of(plan_from(document), 1e-5)
    assert forgotten_step.code == "forgotten_step"
    assert [way.code for way in forgotten_step.ways(case)] == ["forgotten_step"]


@pytest.mark.parametrize("item", CATALOGUE.values(), ids=lambda item: item.code)
def test_a_mistake_can_be_told_to_a_person(item: Mistake) -> None:
    for sentence in (item.wrong, item.fix):
        assert sentence[0].isupper() or not sentence[0].isascii()
        assert sentence.endswith(".")
    assert item.source
    assert not item.source.endswith(".")
    assert item.field[0] in PHASE_FIELDS | Plan.model_fields.keys()
