"""Train LoRA adapters of GPT-2 with Hugging Face's Trainer and PEFT.

affidavit certify examples/train/generated-lora.yaml --out bundle.json
python examples/train/hf_trainer_lora.py bundle.json run
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from affidavit.trainer import PrivateRun, private

PLAN = Path(__file__).with_name("generated-lora.yaml")


def losses(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The mean loss of each text's own tokens."""
    (ids,) = batch
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].mT
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:], reduction="none").mean(1)


class PrivateTrainer(Trainer):
    """A Trainer whose batches and losses are those of a private run."""

    run: PrivateRun

    def get_train_dataloader(self) -> PrivateRun:
        """The certified lots."""
        return self.run

    def compute_loss(self, _: object, inputs: object, **__: object) -> torch.Tensor:
        """One loss for each record, before any mean."""
        return self.run.loss(inputs)


def main(certificate: Path, out: Path) -> PrivateRun:
    """Train the adapters; everything else is frozen."""
    torch.manual_seed(1)  # public: in practice, load weights that are
    base = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    loader = DataLoader(TensorDataset(torch.randint(0, 64, (200, 12))), batch_size=16)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    run = private(
        model, optimizer, loader, losses=losses, certificate=certificate, plan=PLAN, out=out
    )
    how = TrainingArguments(out / "hf", max_steps=10**9, use_cpu=True, save_strategy="no")
    trainer = PrivateTrainer(model, how, optimizers=(run.optimizer, None))
    trainer.run = run
    trainer.train()
    return run


if __name__ == "__main__":
    sys.stdout.write(main(Path(sys.argv[1]), Path(sys.argv[2])).guarantee + "\n")
