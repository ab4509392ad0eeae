"""The bound on ε falsifies a true claim no more often than it says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import binom

from affidavit.trainer.clipping.private import BlockSpec, PrivateModel
from affidavit.trainer.steps.blocks import block_name
from tests.trainer.audit.attacks import lower_epsilon
from tests.trainer.audit.transcripts import REACH, CanaryData, CanaryModel


@pytest.mark.ordinary("*-60")
@pytest.mark.parametrize("runs", [20, 60, 280])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (0.0, 0.3), (0.5, 0.05), (2.0, 0.01)])
@pytest.mark.parametrize("alarm", [0.05, 1e-5])
def test_a_true_claim_is_falsified_no_more_often_than_it_says(
    runs: int, epsilon: float, delta: float, alarm: float
) -> None:
    """Over the worst mechanisms, those with P(S) = e^ε P'(S) + δ, computed exactly."""
    worst = 0.0
    for theirs in np.linspace(0, (1 - delta) / (math.exp(epsilon) + 1), 7):
        ours = math.exp(epsilon) * theirs + delta
        of_ours = binom.pmf(np.arange(runs // 2 + 1), runs // 2, ours)
        of_theirs = binom.pmf(np.arange(runs // 2 + 1), runs // 2, 1 - theirs)
        right = np.convolve(of_ours, of_theirs)
        wrong = [
            lower_epsilon(number, runs, delta=delta, alarm=alarm) > epsilon
            for number in range(runs + 1)
        ]
        worst = max(worst, float(right[wrong].sum()))
    assert worst <= alarm
    assert any(wrong) or runs < 280  # a few runs prove nothing, however right the guesses


def test_more_right_guesses_and_more_runs_prove_more() -> None:
    result = [lower_epsilon(right, 200, delta=0.1, alarm=1e-3) for right in range(0, 201)]
    assert result == sorted(result)
    assert result[100] == 0
    more = [lower_epsilon(9 * n, 10 * n, delta=0.1, alarm=1e-3) for n in (10, 100, 1000)]
    assert more == sorted(more)
    assert more[-1] < math.log((0.9 - 0.1) / 0.1)


@pytest.mark.parametrize("clip_norm", [0.5, 3.0])
def test_a_canary_adds_what_the_definition_says_to_every_block(clip_norm: float) -> None:
    """The trainer's own clipping, up to what it takes off for rounding, whatever the weights."""
    model = CanaryModel()
    direction = model.direction(clip_norm)
    for layer in model.module.parameters():
        torch.nn.init.normal_(layer.data)
    specs = [
        BlockSpec(name=block_name(release, place), clip_norm=clip_norm, names=group.names)
        for release, groups in model.blocks().items()
        for place, group in enumerate(groups)
    ]
    private = PrivateModel(model.module, specs)
    batch = CanaryData(torch.tensor([1.0, 0.0])).collate(torch.tensor([0, 1]))
    private.accumulate(lambda: model.losses(batch), records=2)
    for name, total in private.sums().items():
        difference = (total - direction[name]).norm() / direction[name].norm()
        assert difference < 0.02
        assert total.norm() <= clip_norm
    longest = torch.stack([item.norm() for item in direction.values()]).square().sum().sqrt()
    assert float(longest) == pytest.approx(clip_norm * len(specs) ** 0.5)
    assert clip_norm < REACH
