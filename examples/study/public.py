"""What public text decides: the tokenizer, the first weights, and the learning rates."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from affidavit.assessment import certify
from affidavit.gate import app as gate
from affidavit.plan import plan_from
from affidavit.trainer import app as trainer
from examples.paper.__main__ import command
from examples.paper.generation import nll
from examples.study.data import PARTS, choice, learn_tokenizer, prepared, public_texts
from examples.study.rows import GRIDS, ROWS, SIZES, Size, plan
from examples.train.gpt2 import (
    GPT2,
    GPT2Config,
    LanguageModel,
    gpt2,
    transpose_conv1d,
)
from examples.train.text import TextRecords, verses

PUBLIC_RATE = 0.003
PUBLIC_BATCH = 48
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def prepare(data: Path, folder: Path, name: str) -> None:
    """Learn the tokenizer and train the public model, once."""
    if (folder / "model.safetensors").exists():
        return
    size = SIZES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "about.json").write_text(json.dumps({"data": str(data.resolve()), "size": name}))
    learn_tokenizer(data, folder / "tokenizer.json", vocabulary=size.vocabulary)
    of = prepared(str(folder))
    texts = [*(("", verse) for verse in verses()), *public_texts(data, PARTS[0])]
    records = of.records(texts)
    config = GPT2Config.parsed({**size.config, "vocab_size": records.vocabulary})
    model = GPT2(config, seed=1)
    adapter = LanguageModel(model, {}, records.vocabulary)
    train(adapter, records, steps=size.public_steps, lot=PUBLIC_BATCH, rate=PUBLIC_RATE, seed=1)
    (folder / "config.json").write_text(config.model_dump_json())
    weights = {name: transpose_conv1d(name, item) for name, item in model.state_dict().items()}
    save_file(
        {name: item.contiguous() for name, item in weights.items()}, folder / "model.safetensors"
    )


def train(
    model: LanguageModel, data: TextRecords, *, steps: int, lot: int, rate: float, seed: int
) -> None:
    """Train without privacy: AdamW on random lots, with a linear decay."""
    model.module.to(DEVICE)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=rate)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        lots = torch.randint(len(data), (lot,), generator=generator)
        tokens, counted = data.collate(lots.sort().values)
        loss = model.losses((tokens.to(DEVICE), counted.to(DEVICE))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
    model.module.cpu()


def blocks_of(folder: Path, layout: str) -> list[tuple[str, int, int]]:
    """Name, count and entries of a block of each release of the model."""
    model = gpt2(f"{folder},blocks={layout}", choice(str(folder)))
    sizes = {name: item.numel() for name, item in model.module.named_parameters()}
    return [
        (name, len(groups), sum(sizes[of] for of in groups[0].names))
        for name, groups in model.blocks().items()
    ]


def weights_at(folder: Path, path: Path | None) -> LanguageModel:
    """The model with the weights of a file, or the public ones."""
    model = gpt2(f"{folder},blocks=all", choice(str(folder)))
    if path is not None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.module.load_state_dict(state)
    model.module.to(DEVICE).eval()
    return model


def rates(folder: Path, size: Size, epsilon: float, end: float) -> dict[str, float] | None:
    """The learning rate of each family with the least loss on held-out public text.

    Each rate is tried by a private training on public records with the noise, relative to the lot,
    of the private run. What was tried is kept, so that an interrupted choice goes on; None after
    ``end`` of the monotonic clock.
    """
    kept = folder / "rates.json"
    losses: dict[str, dict[str, float]] = json.loads(kept.read_text()) if kept.exists() else {}
    of = prepared(str(folder))
    held_out = of.records(public_texts(of.data, PARTS[2]))
    for family, grid in GRIDS.items():
        for rate in grid:
            if str(rate) in losses.setdefault(family, {}):
                continue
            if time.monotonic() > end:
                return None
            auxiliary = best(losses["dp-adam"]) if ROWS[family].blocks != "all" else rate
            blocks = blocks_of(folder, ROWS[family].blocks)
            document = plan(family, size, epsilon, blocks, rate, auxiliary)
            weights = tried(folder, size, document, ROWS[family].blocks)
            losses[family][str(rate)] = nll(
                weights_at(folder, weights), held_out, device=DEVICE, batch=64
            )
            kept.write_text(json.dumps(losses, indent=1))
            sys.stdout.write(f"{family} at {rate:g}: {losses[family][str(rate)]:.4f}\n")
            sys.stdout.flush()
    return {family: best(tried) for family, tried in losses.items()}


def best(losses: Mapping[str, float]) -> float:
    """The rate with the least loss."""
    return float(min(losses, key=lambda rate: losses[rate]))


def tried(folder: Path, size: Size, document: dict[str, Any], layout: str) -> Path:
    """The weights of a short training on public records with a plan's noise."""
    place = folder / "tried" / f"{document['name']}-{document['optimizer']['learning_rate']:g}"
    place.mkdir(parents=True, exist_ok=True)
    noise = [of.required for of in certify(plan_from(document), second_opinion=False).releases]
    records = len(choice(str(folder)))
    public = {
        **document,
        "dataset": {"name": "public", "size": records},
        "steps": size.choice_steps,
        "target": {"delta": document["target"]["delta"]},
        "allocation": "uniform",
        "releases": [
            {**of, "noise_multiplier": sigma}
            for of, sigma in zip(document["releases"], noise, strict=True)
        ],
    }
    (place / "plan.json").write_text(json.dumps(public, indent=1))
    command(gate, "certify", place / "plan.json", "--out", place / "bundle.json")
    run = place / "run"
    command(
        trainer, "--certificate", place / "bundle.json", "--plan", place / "plan.json",
        "--data", f"python:examples.study.data:choice:{folder}",
        "--model", f"python:examples.train.gpt2:gpt2:{folder},blocks={layout}",
        "--out", run, "--microbatch", str(size.microbatch), "--device", DEVICE,
    )  # fmt: skip
    return run / "weights.pt"
