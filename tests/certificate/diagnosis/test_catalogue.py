"""The catalogue's words: every mistake says what is wrong, where it was seen, and what to do."""

from __future__ import annotations

import pytest

from affidavit.certificate.diagnosis.case import Mistake
from affidavit.certificate.diagnosis.catalogue import CATALOGUE
from affidavit.plan import PHASE_FIELDS, Plan

SPECIFIED = [
    "independent_blocks",
    "single_block",
    "injection_norm",
    "no_kappa",
    "amplified_correlated",
    "poisson_for_shuffle",
    "adjacency_factor",
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
]


def test_every_specified_mistake_is_known() -> None:
    assert set(CATALOGUE) == set(SPECIFIED)


@pytest.mark.parametrize("mistake", CATALOGUE.values(), ids=lambda item: item.code)
def test_a_mistake_can_be_told_to_a_person(mistake: Mistake) -> None:
    for sentence in (mistake.wrong, mistake.fix):
        assert sentence[0].isupper() or not sentence[0].isascii()
        assert sentence.endswith(".")
    assert mistake.source
    assert not mistake.source.endswith(".")
    assert mistake.field[0] in PHASE_FIELDS | Plan.model_fields.keys()
