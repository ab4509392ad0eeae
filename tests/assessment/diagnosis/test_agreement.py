"""A claim agrees with the numbers that round to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest

from affidavit.assessment.diagnosis import ClaimedEpsilon
from affidavit.assessment.diagnosis.readings import Agreement
from affidavit.plan import Claim, Plan
from affidavit.service.core.wire_models import Explanation


@pytest.mark.parametrize(
    ("text", "reading", "agreement"),
    [
        ("7.98", 7.984999, Agreement.EXACTLY),
        ("7.98", 7.9751, Agreement.EXACTLY),
        ("7.98", 7.989, Agreement.CUT),
        ("7.98", 7.9701, Agreement.CUT),
        ("7.98", 7.991, None),
        ("7.9800", 7.9849, None),
        ("7.98e0", 7.984, Agreement.EXACTLY),
        ("8", 8.04, Agreement.EXACTLY),
        ("8", 8.2, None),
        ("120", 124.9, Agreement.EXACTLY),
        ("120.0", 124.9, Agreement.EXACTLY),
        ("120.00", 120.4, None),
        ("94.0", 94.45, Agreement.EXACTLY),
        ("94.00", 94.45, None),
        (94.0, 94.45, Agreement.EXACTLY),
        (7.98, 7.984, Agreement.EXACTLY),
        (1e-3, 1.004e-3, Agreement.EXACTLY),
    ],
)
def test_digits_decide(
    plan_of: Callable[..., Plan], text: str | float, reading: float, agreement: Agreement | None
) -> None:
    assert ClaimedEpsilon.of(Claim(epsilon=text), plan_of()).agreement(reading) == agreement


def test_documents_name_each_agreement_as_the_api_does() -> None:
    annotation = Explanation.model_fields["agreement"].annotation
    literal, _ = get_args(annotation)
    assert {agreement.word for agreement in Agreement} == set(get_args(literal))


def with_noise(plan_of: Callable[..., Plan], sigma: float) -> Plan:
    return plan_of(releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": sigma}])


@pytest.mark.parametrize(
    ("sigma", "agreement"),
    [(2.3395, Agreement.APPROXIMATELY), (2.5, None), (2.0, None), (2.33951234567, None)],
)
def test_a_noise_multiplier_of_four_digits_was_rounded(
    plan_of: Callable[..., Plan], sigma: float, agreement: Agreement | None
) -> None:
    judgement = ClaimedEpsilon.of(Claim(epsilon="7.9852"), with_noise(plan_of, sigma))
    assert judgement.agreement(7.98505) == agreement


def test_the_roundest_noise_of_a_plan_loosens_a_claim_by_half_of_its_last_digit(
    plan_of: Callable[..., Plan],
) -> None:
    """Three times as much as the noise, which is about how ε follows it at small noise."""
    for sigma, half in ((2.3395, 0.00005), (0.01234, 5e-6), (1234.0, 0.5), (12.3, 0.0)):
        judgement = ClaimedEpsilon.of(Claim(epsilon="8"), with_noise(plan_of, sigma))
        assert judgement.noise_uncertainty == pytest.approx(3 * half / sigma, rel=1e-12)


@pytest.mark.parametrize(
    ("reading", "agrees"), [(8.0, True), (7.9999, True), (7.985, True), (7.9, False), (8.02, False)]
)
def test_calibration_stops_short_of_its_target_and_not_beyond(
    plan_of: Callable[..., Plan], reading: float, agrees: bool
) -> None:
    judgement = ClaimedEpsilon.of(Claim(noise_multiplier="2.3395"), plan_of())
    assert (judgement.agreement(reading) is not None) is agrees
