"""A law: whatever changed since the probe, each sum is that of single records, or the pass fails.

Random models take random microbatches in float64, and between them their state is changed at
random: weights, modes, attributes, frozen statistics, masks. What each microbatch adds is
compared with the clipped gradients of its records, each taken by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from affidavit.trainer.clipping.invariants import Reprobing
from affidavit.trainer.clipping.private_model import PrivateModel
from affidavit.trainer.clipping.probe import probe
from affidavit.trainer.clipping.requirements import BlockSpec
from affidavit.trainer.errors import MixedRecords
from tests.support.random_seeds import examples, seeded

RECORDS, STEPS, WIDTH = 12, 3, 4
CLIP = 0.7


class Scaled(nn.Module):
    """A parameter of a module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        """(n, T, d)."""
        return h * self.scale


class AbsoluteNorm(nn.Module):
    """A normalisation that is no plain scale where weights are negative."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        """(n, T, d)."""
        return functional.rms_norm(h, (WIDTH,)) * self.weight.abs()


class Recurrent(nn.Module):
    """A layer with time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        """(n, T, d)."""
        return self.layer(h)[0]


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.LayerNorm(WIDTH),
    lambda: nn.RMSNorm(WIDTH),
    Scaled,
    AbsoluteNorm,
    Recurrent,
]
ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [torch.tanh, functional.silu, functional.relu]


class Model(nn.Module):
    """Words, some layers and a head, with a loss of each record."""

    def __init__(self, drawn: random.Random) -> None:
        super().__init__()
        self.words = nn.Embedding(9, WIDTH)
        self.layers = nn.ModuleList(drawn.choice(LAYERS)() for _ in range(drawn.randint(1, 3)))
        self.head = nn.Linear(WIDTH, 9)
        self.drop = nn.Dropout(0.0)
        self.act: Any = torch.tanh
        self.depth, self.packs = len(self.layers), drawn.random() < 0.3
        if drawn.random() < 0.3:
            self.head.weight = self.words.weight

    def losses(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Of ids and masks (n, T), shape (n,)."""
        h = self.words(ids)
        for layer in self.layers[: self.depth]:
            h = h + self.drop(self.act(layer(h)))
        if self.packs:
            h, ids_of = h[mask], ids[mask]
            picked = functional.cross_entropy(self.head(h), ids_of, reduction="none")
            return torch.zeros(len(ids), dtype=h.dtype).index_add(0, mask.nonzero()[:, 0], picked)
        return (functional.cross_entropy(self.head(h).mT, ids, reduction="none") * mask).sum(1)


def change(model: Model, drawn: random.Random) -> None:
    """Change some of the model's state."""
    with torch.no_grad():
        for item in model.parameters():
            if drawn.random() < 0.5:
                item.add_(torch.randn_like(item))
    model.act = drawn.choice(ACTIVATIONS)
    model.depth = drawn.randint(0, len(model.layers))
    model.train(drawn.random() < 0.7)
    model.drop.p = 0.0


def clipped_sum(model: Model, ids: Tensor, mask: Tensor) -> Tensor:
    """The sum of the gradients of all records, each clipped by itself."""
    trained = [item for item in model.parameters() if item.requires_grad]
    total = 0.0
    for ids_of, mask_of in zip(ids.split(1), mask.split(1), strict=True):
        grads = torch.autograd.grad(model.losses(ids_of, mask_of).sum(), trained, allow_unused=True)
        flat = torch.cat(
            [
                torch.zeros(item.numel()).double() if grad is None else grad.flatten()
                for item, grad in zip(trained, grads, strict=True)
            ]
        )
        total = total + flat * min(1.0, CLIP / max(float(flat.norm()), 1e-30))
    assert isinstance(total, Tensor)
    return total


@pytest.mark.by_turns
@pytest.mark.parametrize("seed", range(examples(60)))
def test_each_microbatch_adds_what_its_records_add_alone(seed: int) -> None:
    drawn = random.Random(seeded(seed))
    torch.manual_seed(drawn.randrange(2**31))
    model = Model(drawn).double()
    ids = torch.randint(0, 9, (RECORDS, STEPS))
    mask = torch.zeros(RECORDS, STEPS, dtype=torch.bool)
    mask[:, 0] = True
    names = tuple(name for name, item in model.named_parameters() if item.requires_grad)
    private = PrivateModel(model, [BlockSpec(name="all", clip_norm=CLIP, names=names)])
    private._reprobing = Reprobing(_random=random.Random(seed))
    try:
        probe(private, lambda rows: model.losses(ids[rows], mask[rows]))
    except (MixedRecords, ValueError):
        return  # refused before the first step
    fails = 0
    for _ in range(8):
        change(model, drawn)
        if drawn.random() < 0.5:
            mask = torch.rand(RECORDS, STEPS) < 0.5
            mask[:, 0] |= ~mask.any(1)
        rows = torch.tensor(drawn.sample(range(RECORDS), drawn.randint(1, RECORDS)))
        batch = ids[rows], mask[rows]
        private.clear_sums()
        try:
            private.accumulate(
                lambda batch=batch: model.losses(*batch),  # type: ignore[misc]
                records=len(rows),
                losses_of=lambda at, batch=batch: model.losses(batch[0][at], batch[1][at]),  # type: ignore[misc]
            )
        except (MixedRecords, ValueError):
            fails += 1
            continue
        sums = private.sums()
        got = torch.cat([sums[name].flatten() for name in names])
        expected = clipped_sum(model, *batch)
        assert float((got - expected).norm()) <= 1e-6 * (1e-3 + float(expected.norm()))
    assert model.packs or not fails
    private.detach()
