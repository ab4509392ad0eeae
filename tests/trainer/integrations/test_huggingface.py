"""Hugging Face's Trainer takes the certified steps, and trains what a loop of one's own trains."""

from __future__ import annotations

import logging
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
)

from affidavit.certificate import verify
from affidavit.evidence import check_conformance
from affidavit.trainer import PrivateRun, private
from affidavit.trainer.errors import RunFailure
from affidavit.trainer.integrations.huggingface import PrivateTrainer
from tests.support.trust import trusting
from tests.trainer.loop.small_run import KEY, bundle_of, entropy_of, plan_with

# Of PEFT, which asks transformers under an old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")

RECORDS, STEPS, MICROBATCH = 40, 8, 5


@cache
def certified() -> tuple[bytes, Any]:
    plan = plan_with(
        dataset={"name": "texts", "size": RECORDS},
        sampling={"scheme": "poisson", "lot_size": 10},
        steps=STEPS,
        releases=[{"name": "all", "clip_norm": 0.5, "noise_multiplier": 2.0}],
    )
    return bundle_of(plan), plan


class Texts(Dataset[dict[str, Tensor]]):
    """Texts of eight tokens."""

    def __init__(self, seed: int, records: int = RECORDS) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 16, (records, 8), generator=drawn)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[place], "labels": self.ids[place]}


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean loss of each text's own tokens."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].mT
    return nn.functional.cross_entropy(logits, batch["labels"][:, 1:], reduction="none").mean(1)


def small_model(*, lora: bool = False) -> nn.Module:
    torch.manual_seed(3)
    config = GPT2Config(
        n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    if not lora:
        return model
    adapters = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(model, adapters)  # type: ignore[no-any-return]


def arguments(out: Path) -> dict[str, Any]:
    content, plan = certified()
    return {"certificate": content, "plan": plan, "trusted": trusting(KEY.public), "out": out}


def adam_w(model: nn.Module) -> torch.optim.Optimizer:
    trained = [item for item in model.parameters() if item.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)


def trained_of(model: Any) -> list[Tensor]:
    return [item.detach().clone() for item in model.parameters() if item.requires_grad]


@cache
def own_loop(*, bf16: bool = False, lora: bool = False, paused: int = 0) -> list[list[Tensor]]:
    """The weights after each step of a loop of one's own."""

    def amp(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits.float()
        targets = batch["labels"][:, 1:]
        return nn.functional.cross_entropy(logits[:, :-1].mT, targets, reduction="none").mean(1)

    result: list[list[Tensor]] = []
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("affidavit.trainer.private_loop.os", SimpleNamespace(urandom=entropy_of(1)))
        while len(result) < STEPS:
            model = small_model(lora=lora)
            optimizer = adam_w(model)
            loader = DataLoader(Texts(1), batch_size=MICROBATCH)
            run = private(model, optimizer, loader, losses=amp, **arguments(Path(folder)))
            scheduler = get_scheduler("cosine", optimizer, 0, STEPS)
            run.keep(scheduler=scheduler)
            for batch in run:
                run.loss(batch).backward()  # type: ignore[no-untyped-call]
                before = run.step
                optimizer.step()
                if run.step > before:
                    scheduler.step()
                    result.append(trained_of(model))
                    if run.step == paused:
                        run.pause()
    return result


class Crash(TrainerCallback):
    """Fails after step 4."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        if state.global_step == 4:
            raise KeyboardInterrupt


def trainer(folder: Path, model: nn.Module, callbacks: Any = (), **changes: Any) -> PrivateTrainer:
    args: dict[str, Any] = {
        "per_device_train_batch_size": MICROBATCH,
        "learning_rate": 1e-2,
        "num_train_epochs": 2,
        "max_grad_norm": 0.0,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "optim": "adamw_torch",
        "lr_scheduler_type": "cosine",
    }
    return PrivateTrainer(
        model,
        TrainingArguments(folder / "hf", **{**args, **changes}),
        train_dataset=Texts(1),
        eval_dataset=Texts(2),
        callbacks=list(callbacks),
        private=partial(private, losses=losses, **arguments(folder / "run")),
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 4},
    "epochs": {"num_train_epochs": 1},
    "steps": {"max_steps": STEPS},
    "bf16": {"bf16": True},
    "lora": {"gradient_accumulation_steps": 4, "dataloader_num_workers": 1},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 3},
    "push_to_hub": {"push_to_hub": False, "save_strategy": "epoch"},
}


def require_same(here: list[Tensor], there: list[Tensor]) -> None:
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one, other)


@pytest.mark.ordinary("lora")
@pytest.mark.parametrize("name", SETTINGS)
def test_it_ends_at_the_certified_step_with_the_weights_of_an_own_loop(
    name: str, tmp_path: Path
) -> None:
    here = trainer(tmp_path, small_model(lora=name == "lora"), **SETTINGS[name])
    done = here.train()
    expected = own_loop(bf16=name == "bf16", lora=name == "lora")
    require_same(trained_of(here.model), expected[-1])
    assert here.run is not None
    assert here.run.outcome is not None
    assert (done.global_step, here.run.outcome.ended) == (STEPS, "completed")
    assert here.state.epoch == 2
    predicate = verify(certified()[0], trusting(KEY.public)).predicate
    record = (tmp_path / "run" / "record.jsonl").read_bytes()
    assert check_conformance(record, predicate).conformant
    history = here.state.log_history
    rates = [entry["learning_rate"] for entry in history if "learning_rate" in entry]
    assert (len(rates), rates[0]) == (STEPS, 0.01)
    assert not any({"loss", "train_loss", "grad_norm"} & entry.keys() for entry in history)
    evaluations = [entry["step"] for entry in history if "eval_loss" in entry]
    assert evaluations == ([3, 6, 8] if name == "evaluation" else [])
    saved = sorted(path.name for path in (tmp_path / "hf").glob("checkpoint-*"))
    assert saved == (["checkpoint-4", "checkpoint-8"] if name == "push_to_hub" else [])


@pytest.mark.soak
def test_a_model_that_was_saved_is_that_of_the_step(tmp_path: Path) -> None:
    trainer(tmp_path, small_model(), save_strategy="steps", save_steps=4).train()
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "hf" / "checkpoint-4")
    require_same(trained_of(loaded), own_loop()[3])
    names = {path.name for path in (tmp_path / "hf").rglob("*") if path.is_file()}
    assert not names & {"rng_state.pth", "optimizer.pt", "checkpoint.pt", "opening.json"}


@pytest.mark.soak
@pytest.mark.parametrize("from_checkpoint", [True, False])
def test_it_continues_after_a_crash(from_checkpoint: bool, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, small_model(), [Crash()], **saving).train()
    # ``Crash`` came before the save of step 4, whose release the run itself recorded.
    here = trainer(tmp_path, small_model(), **saving)
    done = here.train(resume_from_checkpoint=from_checkpoint)
    assert done.global_step == STEPS
    assert here.state.epoch == 2
    assert here.optimizer.param_groups[0]["lr"] == 0
    assert here.run is not None
    assert here.run.outcome is not None
    assert here.run.outcome.charged == STEPS


@pytest.mark.soak
def test_a_pause_between_steps_changes_no_weight(tmp_path: Path) -> None:
    class Later(TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    saving = {"save_strategy": "steps", "save_steps": 4}
    here = trainer(tmp_path, small_model(), **saving)
    here.add_callback(Later())
    with pytest.raises(KeyboardInterrupt):
        here.train()
    here = trainer(tmp_path, small_model(), **saving)
    here.train(resume_from_checkpoint=True)
    require_same(trained_of(here.model), own_loop(paused=4)[-1])


@pytest.mark.soak
def test_it_stops_early_on_public_data_and_loads_the_best_model(tmp_path: Path) -> None:
    here = trainer(
        tmp_path,
        small_model(),
        [EarlyStoppingCallback(early_stopping_patience=1)],
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
    )
    done = here.train()
    assert here.run is not None
    outcome = here.run.outcome
    assert outcome is not None
    assert (outcome.ended, outcome.charged) == ("stopped", done.global_step)
    assert 1 < done.global_step < STEPS
    assert here.state.best_global_step is not None
    require_same(trained_of(here.model), own_loop()[here.state.best_global_step - 1])
    last = torch.load(tmp_path / "run" / "weights.pt")
    names = [name for name, _ in small_model().named_parameters()]
    require_same([last[name] for name in names], own_loop()[done.global_step - 1])


@pytest.mark.soak
def test_what_has_no_effect_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "affidavit"):
        here = trainer(
            tmp_path, small_model(), num_train_epochs=3, max_grad_norm=1.0,
            gradient_accumulation_steps=2,
        )  # fmt: skip
        here.compute_loss_func = nn.functional.cross_entropy
        here.train()
    said = " ".join(record.getMessage() for record in caplog.records)
    effectless = "num_train_epochs", "max_grad_norm", "gradient_accumulation_steps"
    for name in (*effectless, "compute_loss_func"):
        assert name in said


@pytest.mark.soak
def test_fewer_steps_than_certified_are_a_stop(tmp_path: Path) -> None:
    here = trainer(tmp_path, small_model(), max_steps=5)
    assert here.train().global_step == 5
    assert here.run is not None
    assert here.run.outcome is not None
    assert (here.run.outcome.ended, here.run.outcome.charged) == ("stopped", 5)


@pytest.mark.by_turns
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": STEPS + 1}, "max_steps"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing"),
        ({"output_dir": ""}, "output_dir"),
    ],
)
def test_what_a_private_run_cannot_follow_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    here = trainer(tmp_path, small_model(), **{k: v for k, v in changes.items() if v})
    if "output_dir" in changes:
        here.args.output_dir = str(tmp_path)
    with pytest.raises(RunFailure, match=message):
        here.train()


@pytest.mark.soak
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, small_model(), save_strategy="steps", save_steps=4).train()
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(RunFailure, match="resume_from_checkpoint"):
        trainer(tmp_path, small_model()).train(
            resume_from_checkpoint=str(tmp_path / "hf" / "checkpoint-4")
        )


@pytest.mark.soak
def test_losses_are_shown_only_on_request(tmp_path: Path) -> None:
    from affidavit.trainer.settings import Settings

    here = trainer(tmp_path, small_model())
    shown = Settings(device="cpu", microbatch=MICROBATCH, show_private=True)
    here._private = partial(here._private, settings=shown)
    done = here.train()
    assert done.training_loss > 1
    assert isinstance(here.run, PrivateRun)
    assert isinstance(here.model, GPT2LMHeadModel | PeftModel)
