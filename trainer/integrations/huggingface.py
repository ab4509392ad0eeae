"""Hugging Face's Trainer on the lots of a certificate.

One step of the Trainer is one certified step, whatever the number of its microbatches. So epochs,
schedules, logging, evaluation and saving count what the certificate counts, and a schedule ends at
the last step. Models are saved by the Trainer; a run is continued from its own checkpoint, which is
written with each of the Trainer's, because only that has the keys of the noise.

Guarantees
    * The run ends with its certified steps, or with ``max_steps`` if that is less.
    * Arguments that a private step cannot follow are refused, or a warning says what holds instead.
    * Losses of private records, and how many a step had, are in no log and no checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import ceil, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import TrainOutput

from affidavit.trainer.errors import RunFailure
from affidavit.trainer.private_loop import PrivateRun

LOG = logging.getLogger(__name__)

NEVER_TRUE = {"grad_norm", "total_flos", "train_samples_per_second"}
"""What the Trainer logs of batches that it does not see."""
PRIVATE = {"loss", "train_loss"}


class PrivateTrainer(Trainer):
    """A Trainer of certified steps; ``run`` is the private run from the start of ``train``.

    ``private`` makes the run from model, optimiser and loader: ``functools.partial`` of
    ``affidavit.trainer.private`` with its other arguments. ``per_device_train_batch_size`` is the
    size of a microbatch. ``train`` continues a run that was interrupted, and ends it; raises
    ``RunFailure`` for arguments that a private run cannot follow, and what ``private`` raises.
    """

    run: PrivateRun | None = None

    def __init__(
        self,
        *args: Any,
        private: Callable[[nn.Module, torch.optim.Optimizer, DataLoader[Any]], PrivateRun],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._private = private
        self.add_callback(_Steps(self))

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train like a Trainer until the last certified step, ``max_steps`` or an early stop.

        Its loss is not a number, because that of private records is in no certificate.
        """
        self._require_arguments()
        try:
            result = super().train(*args, **kwargs)
            self._end()
        finally:
            if self.run is not None:
                self.run.close()
        loss = result.training_loss if self._hidden().isdisjoint(PRIVATE) else nan
        return TrainOutput(result.global_step, loss, self._without_hidden(result.metrics))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Begin or continue the run; the loader has an empty item for each step of an epoch."""
        # The Trainer leaves a prepared model alone, so it is not wrapped once the run has it.
        model = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        self.run = run = self._private(
            model, self.create_optimizer(), super().get_train_dataloader()
        )
        if run.folder.resolve().is_relative_to(Path(str(self.args.output_dir)).resolve()):
            raise RunFailure(
                "framework_setting",
                "out: lies in output_dir, which push_to_hub uploads, and has the keys of the "
                "noise. Choose another folder.",
            )
        self._set_steps(run)
        remaining = run.step < self.args.max_steps
        steps = range(run.lots_per_epoch if remaining else 0)
        return DataLoader(steps, batch_size=1, collate_fn=_make_empty)  # type: ignore[arg-type]

    def create_scheduler(self, *args: Any, **kwargs: Any) -> LRScheduler:
        """Create the scheduler, at the step of the run; its checkpoints keep it."""
        result: LRScheduler = super().create_scheduler(*args, **kwargs)
        if self.run is not None:
            self.run.keep(scheduler=result)
            if not isinstance(result, ReduceLROnPlateau):
                while result.last_epoch < self.run.step:  # steps that were charged and lost
                    result.step()
        return result

    def training_step(self, model: nn.Module, *_: Any, **__: Any) -> Tensor:
        """Clip the gradients of the next lot; the loss, of shape (), is 0 unless it is shown."""
        assert self.run is not None
        model.train()
        optimizer: Any = self.optimizer
        optimizer.train()  # some evaluate at other weights
        return self.run.accumulate().detach()

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: the number of records of a lot is private."""
        del inputs
        return 0

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log like a Trainer, without what is private or unknown."""
        super().log(self._without_hidden(logs), *args, **kwargs)

    def _load_best_model(self) -> None:
        self._end()  # with its own weights
        super()._load_best_model()

    def _end(self) -> None:
        if self.run is not None:
            self.run.end()

    def _hidden(self) -> set[str]:
        shows = self.run is not None and self.run.shows_private
        return NEVER_TRUE if shows else NEVER_TRUE | PRIVATE

    def _without_hidden(self, values: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in values.items() if name not in self._hidden()}

    def _require_arguments(self) -> None:
        """Raise ``RunFailure`` for arguments that a private run cannot follow."""
        args = self.args
        refused = {
            "fp16": args.fp16 and "loss scaling has no effect on clipped gradients. Use bf16.",
            "model_init": self.model_init is not None
            and "a run has one model. Pass model; to search, use affidavit search.",
            "label_smoothing_factor": args.label_smoothing_factor
            and "private trains by losses. Smooth labels there.",
            "torch_compile": args.torch_compile
            and "it replaces the model. Call model.compile() before.",
            "fsdp, deepspeed": (self.is_fsdp_enabled or self.is_deepspeed_enabled)
            and "they sum gradients of batches. Use fully_shard in your own loop.",
        }
        for name, why in refused.items():
            if why:
                raise RunFailure("framework_setting", f"TrainingArguments {name}: {why}")

    def _set_steps(self, run: PrivateRun) -> None:
        """Set the arguments that count steps, and say what replaces those without effect."""
        args, steps = self.args, run.certified_steps
        if args.max_steps > steps:
            raise RunFailure(
                "framework_setting",
                f"TrainingArguments max_steps: {args.max_steps}, but {steps} steps are certified. "
                "Leave it out, or certify more steps.",
            )
        if args.max_steps <= 0:
            if (requested := ceil(args.num_train_epochs * run.lots_per_epoch)) != steps:
                LOG.warning(
                    "num_train_epochs=%g would be %d steps; all %d certified steps are taken. Set "
                    "max_steps to end earlier.", args.num_train_epochs, requested, steps,
                )  # fmt: skip
            args.max_steps = steps
        if args.gradient_accumulation_steps > 1:
            LOG.warning(
                "gradient_accumulation_steps=%d has no effect: a step takes its whole lot, %d "
                "records at a time.", args.gradient_accumulation_steps, self._train_batch_size,
            )  # fmt: skip
            args.gradient_accumulation_steps = 1
        if self.compute_loss_func is not None:
            LOG.warning("compute_loss_func evaluates, but trains nothing: private has the losses.")
        if args.max_grad_norm:
            LOG.warning(
                "max_grad_norm=%g has no effect: each record's gradient is clipped to clip_norm.",
                args.max_grad_norm,
            )
            args.max_grad_norm = 0.0
        # The states of optimiser and schedule are in the run's checkpoint. The random state would
        # tell how much was drawn for the last lot.
        args.save_only_model = True


class _Steps(TrainerCallback):
    """Has the Trainer count the steps of the run."""

    def __init__(self, trainer: PrivateTrainer) -> None:
        self._trainer = trainer

    @property
    def _run(self) -> PrivateRun:
        assert self._trainer.run is not None
        return self._trainer.run

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Begin at the step of the run."""
        del args, control
        if state.global_step > self._run.step:
            raise RunFailure(
                "later_checkpoint",
                f"resume_from_checkpoint: step {state.global_step}, but the run in "
                f"{self._run.folder} is at {self._run.step}. Resume with the out of that run.",
            )
        state.global_step = self._run.step

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Count epochs by the run's steps, also after a crash."""
        del args, control
        state.epoch = state.global_step / self._run.lots_per_epoch

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Save the run where the Trainer saves, so that it continues from there."""
        del args, state, control
        if self._run.outcome is None:
            self._run.checkpoint()


def _make_empty(_: Any) -> dict[str, Tensor]:
    """Return a batch without content; the run has the records of the step."""
    return {}
