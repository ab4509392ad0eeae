"""A loop with Accelerate takes the certified steps, as docs/how-to/train.md shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import CosineAnnealingLR

from affidavit.trainer import LoopError
from tests.trainer.integrations.test_lightning import own_loop, weights
from tests.trainer.loop.small_run import STEPS
from tests.trainer.loop.test_private_loop import begin_run, network


def prepare(out: Path, **changes: Any) -> tuple[Any, Any, Any, Any, Any]:
    accelerator = Accelerator(cpu=True, **changes)
    model = accelerator.prepare_model(network(), evaluation_mode=True)
    run = begin_run(out, model)
    schedule = CosineAnnealingLR(run.optimizer, STEPS)
    optimizer, scheduler = accelerator.prepare(run.optimizer, schedule)
    run.keep(scheduler=scheduler)
    return accelerator, model, run, optimizer, scheduler


@pytest.mark.ordinary("4")
@pytest.mark.parametrize("paused", [0, 4])
def test_it_ends_at_the_certified_step_with_the_weights_of_an_own_loop(
    tmp_path: Path, paused: int
) -> None:
    for _ in range(2 if paused else 1):
        accelerator, model, run, optimizer, scheduler = prepare(tmp_path)
        for _ in range(len(run)):
            accelerator.backward(run.accumulate())
            accelerator.clip_grad_norm_(model.parameters(), 1e-9)  # there is no gradient
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if run.step == paused:
                run.pause()
                break
        else:
            run.end()
    assert (run.outcome.ended, run.outcome.charged) == ("completed", STEPS)
    assert optimizer.param_groups[0]["lr"] == 0
    assert torch.equal(weights(model), own_loop(paused=paused)[-1])


@pytest.mark.soak
def test_bfloat16_trains(tmp_path: Path) -> None:
    accelerator, model, run, optimizer, scheduler = prepare(tmp_path, mixed_precision="bf16")
    for _ in range(len(run)):
        accelerator.backward(run.accumulate())
        optimizer.step()
        scheduler.step()
    run.end()
    torch.testing.assert_close(weights(model), own_loop(bf16=True)[-1], rtol=1e-3, atol=1e-3)


def test_accumulation_that_skips_steps_is_stopped(tmp_path: Path) -> None:
    accelerator, model, run, optimizer, _ = prepare(tmp_path, gradient_accumulation_steps=2)

    def go() -> None:
        for _ in range(3):
            with accelerator.accumulate(model):
                accelerator.backward(run.accumulate())
                optimizer.step()

    with pytest.raises(LoopError, match="accumulation"):
        go()
    run.close()
