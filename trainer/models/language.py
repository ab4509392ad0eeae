"""A language model as the trainer sees it: the loss of a record is that of its own text.

The loss is the mean negative log-likelihood, in nats, over the tokens of the record that
count (``affidavit.trainer.data.text``: the target, not its source prefix and not padding); a
record without any has loss 0. Logits and losses are float32 or better.

docs/models-and-data.md lists the options of ``--model gpt2``. ``tie=uses`` makes the token table a
release ``tied`` of its own, and each of its uses is clipped to half of that release's clip norm.

>>> from affidavit.trainer.models.gpt2 import GPT2Config
>>> shape = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 20, "n_positions": 8}
>>> module = GPT2(GPT2Config.parsed(shape), seed=1)
>>> model = LanguageModel(module, flat(module), 20)
>>> model.losses(model.made_up(3)).shape
torch.Size([3])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from affidavit.trainer.adapters import Batch, Group
from affidavit.trainer.models.gpt2 import (
    GPT2,
    HIDDEN,
    GPT2Config,
    grow,
    hidden_matrices,
    pretrained,
)
from affidavit.trainer.models.layout import Layout, adapt, flat, hidden_and_rest
from affidavit.trainer.options import Options, WrongOption

MADE_UP_TOKENS = 8
KINDS = dict(zip(("attention-in", "attention-out", "mlp-in", "mlp-out"), HIDDEN, strict=True))
"""Releases of the layout ``kinds``, and the matrices that each has."""


@dataclass(eq=False, slots=True)
class LanguageModel:
    """Any module from ids (n, T) to logits (n, T, vocabulary), and its blocks."""

    module: nn.Module
    layout: Layout
    vocabulary: int

    def losses(self, batch: Batch) -> Tensor:
        """The mean loss of each record over its tokens that count; (n,)."""
        tokens, counted = batch
        logits = self.module(tokens[:, :-1])
        requested, counts = tokens[:, 1:], counted[:, 1:]
        item = functional.cross_entropy(
            logits.flatten(0, 1).float() if logits.dtype != torch.float64 else logits.flatten(0, 1),
            requested.flatten(),
            reduction="none",
        ).view_as(requested)
        return (item * counts).sum(1) / counts.sum(1).clamp(min=1)

    def blocks(self) -> Mapping[str, Sequence[Group]]:
        """The layout."""
        return self.layout

    def made_up(self, records: int) -> Batch:
        """Texts of consecutive tokens with different starts; all tokens count."""
        start = torch.arange(records).unsqueeze(1) * 3
        tokens = (start + torch.arange(MADE_UP_TOKENS)) % self.vocabulary
        return tokens, torch.ones_like(tokens, dtype=torch.bool)


def gpt2(argument: str, data: Any) -> LanguageModel:
    """GPT-2 from a folder with weights, or from a configuration and a seed.

    ``data`` has a ``vocabulary``, the number of its tokens, and ``longest``, the most tokens of a
    record; both are public. Raises ``WrongOption`` and ``WrongWeights``.
    """
    options = Options.of(argument, "--model gpt2")
    if not (hasattr(data, "vocabulary") and hasattr(data, "longest")):
        raise WrongOption("--model gpt2 needs text data.")
    model, tie = _loaded(options)
    grow(model, data.vocabulary)
    if data.longest - 1 > model.config.n_positions:
        raise WrongOption(
            f"--model gpt2: records have up to {data.longest} tokens, but the model has "
            f"{model.config.n_positions} positions; give the data longest="
            f"{model.config.n_positions + 1} or less."
        )
    layout = _layout(model, options, tie)
    options.require_all_read()
    return LanguageModel(model, layout, len(model.lm_head.weight))


def _loaded(options: Options) -> tuple[GPT2, str]:
    if not options.first:
        raise WrongOption("--model gpt2: name a folder with weights, or a config.json and a seed.")
    path = options.file()
    tie = options.choice("tie", ("", "exact", "uses", "untied"))
    tied = None if not tie else tie != "untied"
    if path.is_dir():
        model = pretrained(path, tied=tied)
    else:
        config = GPT2Config.read(path)
        if tied is not None:
            config = config.model_copy(update={"tie_word_embeddings": tied})
        model = GPT2(config, seed=options.integer("seed", least=0))
    return model, tie


def _layout(model: GPT2, options: Options, tie: str) -> Layout:
    blocks = options.choice("blocks", ("hidden", "kinds", "all"))
    rank = options.integer("lora", least=0, default=0)
    matrices = hidden_matrices(model)
    if rank:
        seed = options.integer("seed", least=0)
        alpha = options.integer("alpha", least=1, default=rank)
        matrices = adapt(
            model, matrices, rank=rank, alpha=alpha, generator=torch.Generator().manual_seed(seed)
        )
    if blocks == "all":
        if tie == "uses":
            raise WrongOption("--model gpt2: tie=uses needs a separate block; give blocks=hidden.")
        return flat(model, "adapters" if rank else "all")
    if tie == "uses" and rank:
        raise WrongOption("--model gpt2: lora freezes the token table; remove tie.")
    halves = {"transformer.wte": 0.5, "lm_head": 0.5}
    tied = Group(names=("transformer.wte.weight",), uses=halves)
    apart = {"tied": tied} if tie == "uses" else {}
    if blocks == "hidden":
        return hidden_and_rest(model, {"hidden": matrices}, apart)
    return hidden_and_rest(
        model, {kind: [n for n in matrices if f".{KINDS[kind]}." in n] for kind in KINDS}, apart
    )
