"""A multilayer perceptron for numeric features and classes.

    --model mlp:32-32,seed=1[,blocks=hidden|all]        two hidden layers of 32
    --model mlp:linear,seed=1                           none: multinomial logistic regression

Hidden layers end in tanh, which bounds their outputs and suits clipped training better
than rectifiers (Papernot et al., arXiv:2007.14191). The loss of a record is its
cross-entropy in nats. With ``blocks=hidden``, the matrices of the hidden layers are the
release ``hidden``, and biases and the output layer are ``auxiliary``; ``all`` is one block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from affidavit.trainer.adapters import Batch, Group
from affidavit.trainer.models.layout import Layout, group_hidden_matrices, single_block
from affidavit.trainer.sources import Options, WrongOption


@dataclass(eq=False, slots=True)
class Classifier:
    """Any module from features (n, f) to logits (n, classes), and its blocks."""

    module: nn.Module
    layout: Layout
    features: int
    classes: int

    def losses(self, batch: Batch) -> Tensor:
        """Return the cross-entropy of each record; (n,)."""
        inputs, labels = batch
        return functional.cross_entropy(self.module(inputs), labels, reduction="none")

    def blocks(self) -> Mapping[str, Sequence[Group]]:
        """Return the layout."""
        return self.layout

    def made_up(self, records: int) -> Batch:
        """Return features on a wave, and labels in turn."""
        wave = torch.arange(records * self.features, dtype=torch.float32)
        inputs = torch.sin(wave + 1).view(records, self.features)
        return inputs, torch.arange(records) % self.classes


def perceptron(features: int, hidden: Sequence[int], classes: int, *, seed: int) -> nn.Sequential:
    """Return the module; its initial weights depend only on ``seed``, which is public."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for wide in hidden:
        layers += [nn.Linear(features, wide), nn.Tanh()]
        features = wide
    layers.append(nn.Linear(features, classes))
    with torch.no_grad():
        for layer in layers:
            if isinstance(layer, nn.Linear):
                layer.weight.normal_(0, layer.in_features**-0.5, generator=generator)
                layer.bias.zero_()
    return nn.Sequential(*layers)


def mlp(argument: str, data: Any) -> Classifier:
    """Return a perceptron with the widths in ``argument``.

    ``data`` has the numbers of its ``features`` and ``classes``, which are public. Raises
    ``WrongOption``.
    """
    options = Options.parse(argument, "--model mlp")
    if not (hasattr(data, "features") and hasattr(data, "classes")):
        raise WrongOption("--model mlp needs data with features and classes.")
    if options.value != "linear" and not re.fullmatch(
        r"[1-9]\d{0,5}(-[1-9]\d{0,5})*", options.value
    ):
        raise WrongOption("--model mlp: give layer widths, like 32-32, or linear.")
    hidden = [] if options.value == "linear" else [int(wide) for wide in options.value.split("-")]
    seed = options.integer("seed", minimum=0)
    blocks = options.choice("blocks", ("hidden", "all"))
    options.require_all_read()
    if blocks == "hidden" and not hidden:
        raise WrongOption("--model mlp: linear has no hidden matrices; give blocks=all.")
    module = perceptron(data.features, hidden, data.classes, seed=seed)
    matrices = [f"{2 * place}.weight" for place in range(len(hidden))]
    layout = (
        single_block(module)
        if blocks == "all"
        else group_hidden_matrices(module, {"hidden": matrices})
    )
    return Classifier(module, layout, data.features, data.classes)
