"""Frozen batch statistics train; what is refused for a common reason names its remedy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import LongformerConfig, LongformerForTokenClassification

from affidavit.trainer.errors import MixedRecords, UnsupportedModel
from tests.trainer.loop.small_run import DEVICE, RECORDS, entropy_of
from tests.trainer.loop.test_private_loop import (
    begin_run,
    bundle,
    finish,
    require_conformant,
    take_step,
)


class Affine(nn.Module):
    """What frozen batch normalisation computes."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(of.weight.clone()), nn.Parameter(of.bias.clone())
        self.register_buffer("mean", of.running_mean.clone())
        self.register_buffer("scale", (of.running_var + of.eps).rsqrt())

    def forward(self, x: Tensor) -> Tensor:
        size = (1, -1, 1, 1)
        x = (x - self.mean.view(size)) * self.scale.view(size)
        return x * self.weight.view(size) + self.bias.view(size)


def images(middle: Any = None) -> nn.Sequential:
    """A small network for images, with batch normalisation of public statistics."""
    torch.manual_seed(4)
    norm = nn.BatchNorm2d(4)
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), norm.eval() if middle is None else middle(norm), nn.ReLU(),
        nn.Flatten(), nn.Linear(64, 1),
    ).to(DEVICE)  # fmt: skip


PICTURES = TensorDataset(
    torch.randn(RECORDS, 1, 6, 6, generator=torch.Generator().manual_seed(1)),
    torch.randn(RECORDS, generator=torch.Generator().manual_seed(2)),
)


def squares(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]).squeeze(1) - batch[1]).square()


@pytest.mark.soak
def test_batch_normalisation_with_frozen_statistics_is_an_affine_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []
    for middle in (None, Affine):
        monkeypatch.setattr(
            "affidavit.trainer.private_loop.os", SimpleNamespace(urandom=entropy_of(1))
        )
        model = images(middle)
        before = {name: item.clone() for name, item in model.named_buffers()}
        run = begin_run(
            tmp_path / str(middle), model, losses=squares, loader=DataLoader(PICTURES, batch_size=7)
        )
        for batch in run:
            model.train()  # as loops do
            take_step(run, batch)
        assert all(torch.equal(item, before[name]) for name, item in model.named_buffers())
        require_conformant(tmp_path / str(middle), bundle()[0])
        trained.append([item.detach() for item in model.parameters()])
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert images().train()[1].training


def test_statistics_that_are_no_longer_frozen_stop_the_run(tmp_path: Path) -> None:
    model = images()
    run = begin_run(tmp_path, model, losses=squares, loader=DataLoader(PICTURES, batch_size=60))
    batches = iter(run)
    take_step(run, next(batches))
    model[1].training = True
    batch = next(batches)
    with pytest.raises((MixedRecords, UnsupportedModel)):
        take_step(run, batch)
    run.close()


class Scaled(nn.Module):
    """A network with a temperature, which it uses or not."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.net, self.t, self._inside = nn.Linear(3, 2), nn.Parameter(torch.zeros(())), inside

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.t.exp() if self._inside else self.net(x)


def scaled(model: Any, batch: Any) -> Tensor:
    scale = 1 if model._inside else model.t.exp()
    return (model(batch[0]) * scale).square().sum(1)


def one_after_the_other(model: nn.Module, batch: Any) -> Tensor:
    a, b = model(torch.cat(list(batch))).chunk(2)
    return (a - b).square().sum(1)


def interleaved(model: nn.Module, batch: Any) -> Tensor:
    a, b = model(torch.stack(list(batch), 1).flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
    return (a - b).square().sum(1)


def ctc(first: bool) -> Any:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        x, targets = batch
        out = model(x.transpose(0, 1)) if first else model(x).transpose(0, 1)
        size = len(targets)
        lengths = torch.full((size,), 5), torch.full((size,), 2)
        return functional.ctc_loss(out.log_softmax(-1), targets, *lengths, reduction="none")

    return losses


def layers(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), *more, nn.Tanh(), nn.Linear(4, 2))


PAIRS = TensorDataset(*torch.randn(2, RECORDS, 3, generator=torch.Generator().manual_seed(1)))
SOUNDS = TensorDataset(
    torch.randn(RECORDS, 5, 3, generator=torch.Generator().manual_seed(1)),
    torch.randint(1, 4, (RECORDS, 2), generator=torch.Generator().manual_seed(2)),
)
REFUSED: dict[str, tuple[Any, Any, Any, str]] = {
    "spectral norm": (
        lambda: layers(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))),
        interleaved, PAIRS, "remove_parametrizations",
    ),
    "pairs": (layers, one_after_the_other, PAIRS, r"torch\.stack"),
    "a temperature": (lambda: Scaled(inside=False), scaled, PAIRS, "forward"),
    "time first": (lambda: nn.Linear(3, 4), ctc(True), SOUNDS, "ctc_loss"),
    "batch statistics": (lambda: layers(nn.BatchNorm1d(4)), interleaved, PAIRS, r"eval\(\)"),
    "data parallel": (lambda: nn.DataParallel(layers()), interleaved, PAIRS, r"model\.module"),
}  # fmt: skip
REMEDIES: dict[str, tuple[Any, Any, Any]] = {
    "pairs": (layers, interleaved, PAIRS),
    "a temperature": (lambda: Scaled(inside=True), scaled, PAIRS),
    "time first": (lambda: nn.Linear(3, 4), ctc(False), SOUNDS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_its_remedy(tmp_path: Path, name: str) -> None:
    build, losses, data, remedy = REFUSED[name]
    with pytest.raises((MixedRecords, UnsupportedModel), match=remedy):
        begin_run(tmp_path, build(), losses=losses, loader=DataLoader(data, batch_size=5))


@pytest.mark.by_turns
@pytest.mark.parametrize("name", REMEDIES)
def test_the_remedy_trains(tmp_path: Path, name: str) -> None:
    build, losses, data = REMEDIES[name]
    run = begin_run(
        tmp_path, build().to(DEVICE), losses=losses, loader=DataLoader(data, batch_size=60)
    )
    finish(run)
    require_conformant(tmp_path, bundle()[0])


def longformer(dtype: torch.dtype) -> nn.Module:
    """A small one, whose texts are padded to a multiple of its window."""
    torch.manual_seed(2)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    config = LongformerConfig(
        attention_window=8, intermediate_size=8, vocab_size=16, max_position_embeddings=40,
        num_labels=2, **size, **ids,
    )  # fmt: skip
    model = LongformerForTokenClassification(config).to(dtype)
    for name, item in model.named_parameters():
        item.requires_grad_("_global" not in name)  # no token attends to all
    return model


def tagged(model: nn.Module, batch: Any) -> Tensor:
    ids, targets = batch
    logits = model(input_ids=ids).logits.mT
    return functional.cross_entropy(logits, targets, reduction="none").mean(1)


TEXTS = TensorDataset(
    torch.randint(3, 16, (RECORDS, 3), generator=torch.Generator().manual_seed(1)),
    torch.randint(0, 2, (RECORDS, 3), generator=torch.Generator().manual_seed(2)),
)


@pytest.mark.soak
@pytest.mark.ordinary("float64")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_longformer_trains_in_float32_where_its_masks_are_finite(
    tmp_path: Path, dtype: str
) -> None:
    model = longformer(getattr(torch, dtype)).to(DEVICE)
    arguments: dict[str, Any] = {
        "losses": tagged, "loader": DataLoader(TEXTS, batch_size=60)
    }  # fmt: skip
    if dtype == "float64":
        with pytest.raises(UnsupportedModel, match="float32"):
            begin_run(tmp_path, model, **arguments)
    else:
        finish(begin_run(tmp_path, model, **arguments))
        require_conformant(tmp_path, bundle()[0])


def test_closing_does_not_raise_what_stopped_the_run_again(tmp_path: Path) -> None:
    run = begin_run(tmp_path, batch_size=60)
    batches = iter(run)
    take_step(run, next(batches))
    with torch.no_grad():
        run._model.module[0].bias.add_(1)
    with pytest.raises(UnsupportedModel, match="changed since"):
        next(batches)
    run.close()
