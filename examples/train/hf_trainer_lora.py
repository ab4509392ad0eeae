"""Train LoRA adapters of GPT-2 with Hugging Face's Trainer and PEFT.

affidavit certify examples/train/generated-lora.yaml --out bundle.json
python examples/train/hf_trainer_lora.py bundle.json run
"""

import sys
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from affidavit.trainer import PrivateRun, private
from affidavit.trainer.integrations.huggingface import PrivateTrainer

PLAN = Path(__file__).with_name("generated-lora.yaml")


def losses(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean loss of each text's own tokens."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].mT
    targets = batch["labels"][:, 1:]
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none").mean(1)


def texts(number: int) -> list[dict[str, torch.Tensor]]:
    """Random texts of twelve tokens."""
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (number, 12))]


def main(certificate: Path, out: Path) -> PrivateRun | None:
    """Train the adapters; everything else is frozen."""
    torch.manual_seed(1)  # public: in practice, load weights that are
    base = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    trainer = PrivateTrainer(
        model,
        TrainingArguments(
            out / "hf",
            per_device_train_batch_size=16,  # a microbatch; a step takes its whole lot
            num_train_epochs=5,
            learning_rate=1e-2,
            lr_scheduler_type="cosine",
            max_grad_norm=0.0,
            eval_strategy="epoch",  # a schedule that is public, on data that is
            save_strategy="epoch",
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=texts(200),
        eval_dataset=texts(50),
        private=partial(private, losses=losses, certificate=certificate, plan=PLAN, out=out),
    )
    trainer.train()
    return trainer.run


if __name__ == "__main__":
    run = main(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.write(f"{run.guarantee if run else ''}\n")
