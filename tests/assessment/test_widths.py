"""Random plans of every kind are bracketed, or refused by a code, as the bench of widths draws."""

from __future__ import annotations

import random

import pytest

from affidavit.assessment import certify
from affidavit.mechanisms.sampling_schemes import SCHEMES
from affidavit.plan import explain, plan_from
from bench.loose_corners import NOISE, cells, random_plan
from tests.support.random_seeds import examples, seeded

NARROW = {
    ("full_batch", "independent"),
    ("full_batch", "bidiagonal"),
    ("cyclic", "independent"),
    ("cyclic", "bidiagonal"),
    ("poisson", "independent"),
}
"""Schemes and noise whose theorem is attained."""


KINDS = "independent", "bidiagonal"
SLOW = "balls_in_bins", "random_allocation", "truncated_poisson"
"""Schemes some of whose bounds for users take up to a minute."""


@pytest.mark.by_turns
@pytest.mark.parametrize(
    "scheme",
    [pytest.param(s, marks=[pytest.mark.soak] * (s in SLOW)) for s in SCHEMES],
)
def test_the_ends_of_a_bracket_are_in_order(scheme: str) -> None:
    draw = random.Random(seeded(f"widths {scheme}"))
    own = [
        cell for cell in cells() if cell[0] == scheme and cell[3] in ("independent", "bidiagonal")
    ]
    for cell in draw.sample(own, examples(3)):
        result = certify(plan_from(random_plan(draw, cell)), second_opinion=False)
        if result.epsilon is None:
            assert explain(result.reasons[0].code)
            continue
        assert 0 <= result.epsilon.lower <= result.epsilon.upper
        if (scheme, cell[3]) in NARROW:
            assert result.epsilon.upper <= 1.01 * result.epsilon.lower


def test_every_scheme_and_kind_of_noise_is_drawn() -> None:
    drawn = cells()
    assert {cell[0] for cell in drawn} == set(SCHEMES)
    assert {cell[3] for cell in drawn} >= set(NOISE)
