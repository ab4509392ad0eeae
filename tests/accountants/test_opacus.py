"""The noise of Opacus' calibration is what Opacus' own function returns."""

from __future__ import annotations

import pytest
from opacus.accountants.utils import get_noise_multiplier

from affidavit.accountants import opacus_noise_multiplier

RUNS = (
    (0.9, 1e-3, 1 / 20, 20, "prv"),
    (2.0, 1e-5, 1 / 50, 100, "rdp"),
    (4.0, 1e-5, 1 / 10, 20, "gdp"),
)
"""ε, δ, sampling probability, steps, and the accountant."""


@pytest.mark.ordinary("told2")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("told", RUNS)
def test_it_is_the_number_that_opacus_returns(
    told: tuple[float, float, float, int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    epsilon, delta, rate, steps, mechanism = told
    theirs = get_noise_multiplier(
        target_epsilon=epsilon,
        target_delta=delta,
        sample_rate=rate,
        steps=steps,
        accountant=mechanism,
    )
    for share in (2e-5, 0.02):  # what lies further apart leaves more to Opacus
        monkeypatch.setattr("affidavit.accountants.opacus.FLAT_ERROR", share)
        opacus_noise_multiplier.cache_clear()
        ours = opacus_noise_multiplier(
            epsilon=epsilon,
            delta=delta,
            sampling_probability=rate,
            steps=steps,
            mechanism=mechanism,
        )
        assert ours == theirs


def test_a_budget_below_what_any_noise_reaches_is_refused() -> None:
    with pytest.raises(ValueError, match="too low"):
        opacus_noise_multiplier(
            epsilon=0.001, delta=1e-5, sampling_probability=0.5, steps=10, mechanism="prv"
        )
