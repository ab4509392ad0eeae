"""PyTorch Lightning on the lots of a certificate: a callback.

The training step returns ``run.accumulate()``, and ``fit`` gets ``range(len(run))`` as its loader.
One batch of Lightning is then one certified step, whatever the number of its microbatches.
"""

from __future__ import annotations

from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from affidavit.trainer.errors import RunFailure
from affidavit.trainer.private_loop import PrivateRun


class PrivateSteps(Callback):
    """Has Lightning keep, save and end ``run``, which continues an interrupted one.

    A model of Lightning is saved wherever it says. The run's checkpoint is written with it, and is
    what ``private`` resumes from.
    """

    def __init__(self, run: PrivateRun) -> None:
        self._run = run

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse arguments that a private run cannot follow; raises ``RunFailure``."""
        del pl_module
        refused = {
            "gradient_clip_val": trainer.gradient_clip_val
            and "each record's gradient is clipped to the plan's clip_norm. Leave it out.",
            "accumulate_grad_batches": trainer.accumulate_grad_batches > 1
            and "a step accumulates its whole lot in microbatches. Leave it out.",
            "precision": trainer.precision == "16-mixed"
            and "loss scaling has no effect on clipped gradients. Use bf16-mixed.",
            "devices": trainer.world_size > 1
            and "Lightning sums gradients of batches. Use a loop of your own under torchrun.",
            "ckpt_path": trainer.ckpt_path
            and "weights that a run has not released. Call private with the same out to resume.",
        }
        for name, why in refused.items():
            if why:
                raise RunFailure("framework_setting", f"{name}: {why}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue the schedules where the run is."""
        del pl_module
        for number, config in enumerate(trainer.lr_scheduler_configs):
            self._run.keep(**{f"scheduler {number}": config.scheduler})

    def on_save_checkpoint(self, *_: Any) -> None:
        """Save the run where Lightning saves the model."""
        if self._run.outcome is None:
            self._run.checkpoint()

    def on_train_end(self, *_: Any) -> None:
        """End the run, which an early stop has stopped."""
        self._run.end()

    def on_exception(self, *_: Any) -> None:
        """Leave the run, to be resumed."""
        self._run.close()
