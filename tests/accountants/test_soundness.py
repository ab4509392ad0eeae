"""A fixed draw of the random plans that ``make soak`` draws without end."""

from __future__ import annotations

import numpy as np
import pytest

from affidavit.accountants.bracket import Bracket
from affidavit.plan import events
from tests.accountants import soundness
from tests.accountants.soundness import Case, broken, draw, is_narrow, ours


@pytest.mark.ordinary("1", "4")
@pytest.mark.parametrize("seed", [1, 2, 4])
def test_random_plans_keep_every_law(seed: int) -> None:
    source = np.random.default_rng(seed)
    assert [line for _ in range(3) for line in broken(draw(source))] == []


def test_nineteen_of_twenty_brackets_are_as_narrow_as_promised() -> None:
    source = np.random.default_rng(100)
    cases = (draw(source) for _ in range(60))
    result = [bracket for case in cases if (bracket := ours(case.event, case.delta)) is not None]
    assert len(result) >= 45
    assert sum(map(is_narrow, result)) >= 0.95 * len(result)


@pytest.mark.soak
def test_a_bracket_moved_by_its_width_breaks_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The laws can fail: a bound that is too low by a thousandth is found out."""
    leaf = events.PoissonSubsampledGaussian(sampling_probability=0.02, noise_multiplier=1.0)
    case = Case(leaf=leaf, steps=1, delta=1e-6)

    def moved(event: object, delta: float, width: float = 1e-4) -> Bracket:
        result = ours(event, delta, width)  # type: ignore[arg-type]
        assert result is not None
        return Bracket(lower=result.lower * 0.998, upper=result.upper * 0.999)

    assert list(broken(case)) == []
    monkeypatch.setattr(soundness, "ours", moved)
    assert any("closed form" in line for line in broken(case))
