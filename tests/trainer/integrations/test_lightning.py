"""Lightning takes the certified steps, and trains what a loop of one's own trains."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as lightning
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from affidavit.trainer import PrivateRun
from affidavit.trainer.errors import RunFailure
from affidavit.trainer.integrations.lightning import PrivateSteps
from tests.trainer.loop.small_run import STEPS, entropy_of
from tests.trainer.loop.test_private_loop import (
    begin_run,
    bundle,
    losses,
    network,
    require_conformant,
)

# Of Lightning, about loaders without workers and the like.
pytestmark = pytest.mark.filterwarnings("ignore")


def weights(model: nn.Module) -> Tensor:
    return torch.cat([item.detach().flatten() for item in model.parameters()])


@cache
def own_loop(*, bf16: bool = False, paused: int = 0) -> list[Tensor]:
    """The weights after each step of a loop of one's own."""

    def amp(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return losses(model, batch)

    result: list[Tensor] = []
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("affidavit.trainer.private_loop.os", SimpleNamespace(urandom=entropy_of(1)))
        while len(result) < STEPS:
            model = network()
            run = begin_run(Path(folder), model, losses=amp)
            scheduler = CosineAnnealingLR(run.optimizer, STEPS)
            run.keep(scheduler=scheduler)
            for _ in range(len(run)):
                run.accumulate().backward()  # type: ignore[no-untyped-call]
                run.optimizer.step()
                scheduler.step()
                result.append(weights(model))
                if len(result) == paused:
                    run.pause()
                    break
            else:
                run.end()
    return result


class Module(lightning.LightningModule):
    """Two layers."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.model = network()
        self.run: PrivateRun = begin_run(out, self.model)

    def configure_optimizers(self) -> Any:
        scheduler = CosineAnnealingLR(self.run.optimizer, STEPS)
        return {
            "optimizer": self.run.optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def training_step(self, _: Any) -> Tensor:
        return self.run.accumulate()

    def validation_step(self, batch: Any) -> None:
        self.log("loss", losses(self.model, batch).mean())


PUBLIC = TensorDataset(torch.ones(4, 3), torch.ones(4))


def fit(module: Module, *callbacks: Any, **changes: Any) -> lightning.Trainer:
    arguments: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "accelerator": "cpu",
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "val_check_interval": 3,
        "callbacks": [PrivateSteps(module.run), *callbacks],
    }
    result = lightning.Trainer(**{**arguments, **changes})
    result.fit(module, range(len(module.run)), DataLoader(PUBLIC, batch_size=2))
    return result


@pytest.mark.ordinary("32-true")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_ends_at_the_certified_step_with_the_weights_of_an_own_loop(
    tmp_path: Path, precision: str
) -> None:
    module = Module(tmp_path)
    assert fit(module, precision=precision).global_step == STEPS
    assert module.run.outcome is not None
    assert module.run.outcome.ended == "completed"
    assert module.run.optimizer.param_groups[0]["lr"] == 0
    assert torch.equal(weights(module.model), own_loop(bf16=precision != "32-true")[-1])
    require_conformant(tmp_path, bundle()[0])


class Crash(lightning.Callback):
    """Fails where a model was saved."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            raise RuntimeError("crash")


def test_a_saved_run_continues_where_it_was(tmp_path: Path) -> None:
    saving = lightning.callbacks.ModelCheckpoint(tmp_path / "models", every_n_train_steps=2)
    with pytest.raises(RuntimeError, match="crash"):
        fit(Module(tmp_path / "run"), saving, Crash(), enable_checkpointing=True)
    module = Module(tmp_path / "run")
    assert module.run.step == 4
    assert fit(module).global_step == STEPS - 4
    assert torch.equal(weights(module.model), own_loop(paused=4)[-1])


@pytest.mark.soak
def test_it_stops_early_on_public_data(tmp_path: Path) -> None:
    module = Module(tmp_path)
    stop = lightning.callbacks.EarlyStopping("loss", patience=1, min_delta=1e9)
    assert fit(module, stop).global_step == 6
    assert module.run.outcome is not None
    assert (module.run.outcome.ended, module.run.outcome.charged) == ("stopped", 6)
    assert torch.equal(weights(module.model), own_loop()[5])


@pytest.mark.parametrize(
    "changes",
    [{"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_a_private_run_cannot_follow_is_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    module = Module(tmp_path)
    with pytest.raises(RunFailure, match=next(iter(changes))):
        fit(module, **changes)
    assert module.run.step == 0
