"""The audit passes the trainer and falsifies each fault, at two low-ε plans."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from affidavit.certificate import Assessment, curves
from affidavit.trainer.steps.training_state import TrainingState
from tests.trainer.audit import faults
from tests.trainer.audit.attacks import STAGES, Claim, Finding, Sizes, Stage, audit, plan_of_stage
from tests.trainer.audit.transcripts import Build, training_of

Claims = Mapping[str, tuple[Claim, ...]]
SILENT, OPPOSED = STAGES
FEW = Sizes(calibration=30, counted=70)
"""Enough for faults that are plain to see."""
FEWER = Sizes(calibration=12, counted=28)
"""Enough for one that is plainer, by the keys of these tests."""

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def claims() -> Claims:
    """Points of each stage's certified curve, as upper bounds."""
    result = {}
    for stage in STAGES:
        curve = curves(plan_of_stage(stage))
        assert not isinstance(curve, Assessment)
        result[stage.name] = tuple((e, d.upper) for e, d in curve.delta_of if e <= 1)
    return result


def attacked(stage: Stage, claims: Claims, build: Build, sizes: Sizes | None = None) -> Finding:
    """A stage of the audit, with keys of its own."""
    key = bytes([20 + STAGES.index(stage)]) * 32
    return audit(stage, claims[stage.name], key=key, build=build, sizes=sizes)


@pytest.mark.soak
@pytest.mark.parametrize(
    "stage", [SILENT, pytest.param(OPPOSED, marks=pytest.mark.soak)], ids=lambda stage: stage.name
)
def test_the_trainer_passes(stage: Stage, claims: Claims) -> None:
    result = attacked(stage, claims, training_of, FEWER)
    assert not result.falsified
    assert result.epsilon <= result.certified


@pytest.mark.soak
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_low_epsilon(stage: Stage, claims: Claims) -> None:
    """Both plans are certified to mean something: the best guess is right 68 times in 100."""
    epsilon, delta = claims[stage.name][0]
    assert epsilon == 0
    assert (1 + delta) / 2 < 0.68


@pytest.mark.soak
@pytest.mark.parametrize(
    ("fault", "sizes"),
    [
        (faults.RealisedLot, FEWER),
        pytest.param(faults.Reseeded, FEW, marks=pytest.mark.soak),
        pytest.param(faults.LeftOut, FEW, marks=pytest.mark.soak),
    ],
)
def test_a_plain_fault_is_falsified(
    fault: type[TrainingState], sizes: Sizes, claims: Claims
) -> None:
    result = attacked(SILENT, claims, faults.build_of(fault), sizes)
    assert result.falsified, result


@pytest.mark.soak
def test_noise_of_every_block_as_if_it_were_alone_is_falsified(claims: Claims) -> None:
    """Each block by itself has what it was certified for: σ/√K shows jointly or not at all."""
    result = attacked(SILENT, claims, faults.build_of(faults.RootK))
    assert result.falsified, result


@pytest.mark.soak
def test_shuffled_lots_under_a_poisson_certificate_are_falsified(claims: Claims) -> None:
    result = attacked(OPPOSED, claims, faults.build_of(faults.Shuffled), FEW)
    assert result.falsified, result


@pytest.mark.soak
def test_norms_in_bfloat16_are_falsified(claims: Claims) -> None:
    with faults.norms_in_bfloat16():
        result = attacked(SILENT, claims, training_of, FEW)
    assert result.falsified, result


@pytest.mark.soak
def test_an_audit_can_be_repeated(claims: Claims) -> None:
    def once() -> Finding:
        return attacked(SILENT, claims, training_of, Sizes(calibration=4, counted=6))

    assert once() == once()
