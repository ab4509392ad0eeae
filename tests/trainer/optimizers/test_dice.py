"""The error state of DP-Dice: the algorithm's own lines, and the bounds that are certified."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from affidavit.plan import Plan
from affidavit.trainer.steps.gradients import ErrorFeedback
from tests.support.random_seeds import examples

B, C1, C2 = 10.0, 1.0, 0.05
SHAPES = {"w": torch.Size([3, 2]), "b": torch.Size([2])}


def state(clip_norm: float = C2) -> ErrorFeedback:
    return ErrorFeedback(SHAPES, clip_norm=clip_norm, divisor=B, device="cpu")


def lots(steps: int, seed: int = 0, scale: float = 3.0) -> list[tuple[Tensor, Tensor]]:
    """Clipped and raw sums of ``steps`` lots of four records, flat (8,)."""
    generator, result = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        raw = scale * torch.randn(4, 8, generator=generator, dtype=torch.float64)
        norms = raw.norm(dim=1, keepdim=True)
        result.append(((raw * (C1 / norms).clamp(max=1)).sum(0), raw.sum(0)))
    return result


def split(flat: Tensor) -> dict[str, Tensor]:
    return {"w": flat[:6].clone().view(3, 2), "b": flat[6:].clone()}


def joined(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors["w"].flatten(), tensors["b"]])


@pytest.mark.parametrize("clip_norm", [1e-3, 0.05, 10.0])
def test_it_equals_algorithm_3(clip_norm: float) -> None:
    feedback, error = state(clip_norm), torch.zeros(8).double()
    for clipped, raw in lots(20):
        sums = split(clipped)
        feedback.feed_back(sums, split(raw))

        # lines 11 to 18 of the thesis' Algorithm 3, before the noise
        fed = error * min(1.0, clip_norm / max(float(error.norm()), 1e-300))
        released = clipped / B + fed
        error = error + raw / B - released
        # C₂ is taken a millionth smaller, so that it holds after rounding.
        torch.testing.assert_close(joined(sums) / B, released, rtol=0, atol=4e-6 * clip_norm)


@settings(max_examples=examples(60))
@given(
    exponent=st.integers(-30, 30),
    clip_norm=st.floats(1e-6, 1e6),
    seed=st.integers(0, 1000),
    steps=st.integers(1, 4),
)
def test_what_is_fed_back_never_passes_its_clip_norm(
    exponent: int, clip_norm: float, seed: int, steps: int
) -> None:
    feedback = state(clip_norm)
    for clipped, raw in lots(steps, seed, scale=10.0**exponent):
        feedback.feed_back(split(clipped), split(raw))
    nothing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    feedback.feed_back(nothing, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    norm = math.sqrt(sum(float(item.double().square().sum()) for item in nothing.values()))
    assert norm / B <= clip_norm


def test_a_clipped_state_moves_a_run_by_no_more_than_theorem_1() -> None:
    """Two data sets that differ in one record: each later release by at most 2 C₂."""
    mine, theirs = state(), state()
    for step, (clipped, raw) in enumerate(lots(15)):
        one, other = split(clipped), split(clipped)
        mine.feed_back(one, split(raw))
        extra = torch.zeros(8).double()
        extra[0] = 1e3 if step == 0 else 0.0
        theirs.feed_back(other, split(raw + extra))
        assert float((joined(one) - joined(other)).norm()) / B <= 2 * C2
        if step == 0:
            assert torch.equal(joined(one), joined(other))


def test_sums_that_overflowed_leave_the_state_finite() -> None:
    feedback = state()
    for value in (math.inf, -math.inf, math.nan):
        feedback.feed_back(split(torch.ones(8)), split(torch.full((8,), value)))
    sums = split(torch.zeros(8))
    feedback.feed_back(sums, split(torch.zeros(8)))
    assert joined(sums).tolist() == [0.0] * 8


def test_the_state_goes_on_from_a_private_checkpoint() -> None:
    whole, first, second = state(), state(), state()
    sums = [(split(clipped), split(raw)) for clipped, raw in lots(6)]
    again = [(split(clipped), split(raw)) for clipped, raw in lots(6)]
    for clipped, raw in sums:
        whole.feed_back(clipped, raw)
    for clipped, raw in again[:3]:
        first.feed_back(clipped, raw)
    second.load_private_state_dict(first.private_state_dict())
    for clipped, raw in again[3:]:
        second.feed_back(clipped, raw)
    for (one, _), (other, _) in zip(sums, again, strict=True):
        assert torch.equal(joined(one), joined(other))
    with pytest.raises(ValueError, match="error state"):
        second.feed_back({"w": torch.zeros(3, 2)}, split(torch.zeros(8)))


def test_it_is_made_from_a_certified_plan(plan_with: Callable[..., Plan]) -> None:
    plan = plan_with("dp_dice")
    feedback = ErrorFeedback.from_plan(plan, SHAPES, device="cpu")
    for _ in range(2):
        sums = split(torch.zeros(8))
        feedback.feed_back(sums, split(torch.full((8,), 1e9)))
    expected = plan.optimizer.error_clip_norm * 1000
    assert float(joined(sums).norm()) == pytest.approx(expected, rel=2e-6)
