"""The probe finds what mixes records only when it runs, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from affidavit.trainer.clipping.private_model import PrivateModel, evaluation_mode
from affidavit.trainer.clipping.probe import probe
from affidavit.trainer.clipping.requirements import BlockSpec
from affidavit.trainer.errors import MixedRecords, UnsupportedModel

FEATURES = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1))
Model = Callable[[nn.Module, Tensor], Tensor]


def private(model: nn.Module) -> PrivateModel:
    """One block."""
    names = tuple(name for name, item in model.named_parameters() if item.requires_grad)
    return PrivateModel(model, [BlockSpec(name="all", clip_norm=1.0, names=names)])


class Body(nn.Module):
    """A linear layer run twice, dropout, and what a test puts between."""

    def __init__(self, between: Model | None = None) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(4, 4), nn.Linear(4, 1), nn.Dropout(0.5)
        self.between = between
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        """(n, T)."""
        x = self.drop(torch.relu(self.first(torch.relu(self.first(x)))))
        x = x if self.between is None else self.between(self, x)
        return self.last(x).squeeze(-1)


def keep_mean(model: nn.Module, x: Tensor) -> Tensor:
    """Running statistics of what is seen."""
    model.mean = 0.9 * model.mean + 0.1 * x.detach().mean((0, 1))  # type: ignore[has-type,operator]
    return x


def keep_frozen(model: nn.Module, x: Tensor) -> Tensor:
    """The same in a parameter that is not trained, past autograd."""
    model.last.bias.data.add_(1e-6 * x.detach().mean())  # type: ignore[operator,union-attr]
    return x


def while_training(model: nn.Module, x: Tensor) -> Tensor:
    """Batch statistics in training mode only."""
    return x - x.mean(0) if model.training else x


def losses(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Of some made-up records."""
    return lambda rows: model(FEATURES[rows]).square().sum(1)


def test_uses_are_counted_and_nothing_changes() -> None:
    model = Body()
    model.last.eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    random = torch.get_rng_state()
    result = probe(private(model), losses(model))
    assert result == {"first.weight": 2, "first.bias": 2, "last.weight": 1, "last.bias": 1}
    assert torch.equal(random, torch.get_rng_state())
    assert model.training
    assert not model.last.training
    assert all(bool((item.grad == 1).all()) for item in model.parameters())


@pytest.mark.parametrize(
    ("between", "kind", "message"),
    [
        (lambda _, x: x - x.mean(0), MixedRecords, "mixes records"),
        (lambda _, x: x + 1e-2 * x.roll(1, 0), MixedRecords, "mixes records"),
        (
            lambda _, x: torch.where(x > 1e9, (0 * x).sqrt(), x),
            UnsupportedModel,
            "nan or infinite, though",
        ),
        (keep_mean, UnsupportedModel, "mean: changes in a forward pass"),
        (keep_frozen, UnsupportedModel, r"last\.bias: changes in a forward pass"),
    ],
)
def test_mixing_is_found(between: Model, kind: type[Exception], message: str) -> None:
    torch.manual_seed(4)
    model = Body(between)
    model.last.bias.requires_grad_(False)
    with pytest.raises(kind, match=message):
        probe(private(model), losses(model))
    assert not bool(model.mean.any())


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("last", [1.0, 0.0])
def test_mixing_in_training_mode_is_found_whatever_hides_it(rate: float, last: float) -> None:
    model = Body(while_training)
    model.drop.p = rate
    with torch.no_grad():
        model.last.weight *= last
    with pytest.raises(MixedRecords, match="mixes records"):
        probe(private(model), losses(model))


def test_rows_that_a_mask_picks_are_refused_though_each_record_has_as_many() -> None:
    def packed(rows: Tensor) -> Tensor:
        chosen = FEATURES[rows][..., 0] > -9
        values = model.last(model.first(FEATURES[rows])[chosen])
        return values.view(len(rows), -1).square().sum(1)

    model = Body()
    with pytest.raises(MixedRecords, match="a mask picked"):
        probe(private(model), packed)


def test_records_that_displace_each_other_in_a_full_microbatch_are_found() -> None:
    def in_turn(_: nn.Module, x: Tensor) -> Tensor:
        return x * (torch.arange(len(x)) < 8)[:, None, None]  # an expert with a capacity of 8

    model = Body(in_turn)
    held = private(model)
    probe(held, losses(model), max_records=8)
    with pytest.raises(MixedRecords, match="displace each other"):
        probe(held, losses(model), max_records=9)


@pytest.mark.parametrize("least", range(3))
def test_records_that_are_ranked_in_a_full_microbatch_are_found(least: int) -> None:
    def without_half(rows: Tensor) -> Tensor:
        values = losses(model)(rows) + 9.0 * (rows != least)
        return values * (values >= values.kthvalue(max(1, len(values) // 2)).values)

    model = Body()
    model.drop.p = 0.0
    with pytest.raises(MixedRecords, match="displace each other"):
        probe(private(model), without_half, max_records=5)


def test_dropout_that_shows_in_a_full_microbatch_alone_is_not_taken_for_mixing() -> None:
    model = Body()
    model.drop.p = 0.001
    assert probe(private(model), losses(model), max_records=2048)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_what_is_drawn_is_not_taken_for_mixing(scale: float) -> None:
    """A step of diffusion, and bits that depend on the record."""

    def noisy(_: nn.Module, x: Tensor) -> Tensor:
        noise, steps = torch.randn_like(x), torch.randint(0, 10, (len(x),))
        x = torch.lerp(x, noise, (steps / 10)[:, None, None].to(x))
        return x * torch.bernoulli(x.sigmoid()) * scale ** (len(x) - 3)

    model = Body(noisy)
    if scale == 1:
        assert probe(private(model), losses(model), max_records=9)
    else:
        with pytest.raises(MixedRecords, match="left out"):
            probe(private(model), losses(model))


def test_narrow_types_are_not_taken_for_mixing() -> None:
    model = Body()

    def narrow(rows: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return losses(model)(rows).float()

    assert probe(private(model), narrow)


@pytest.mark.parametrize(("layer", "enabled"), [(nn.LSTM(3, 4), False), (nn.Linear(3, 4), True)])
def test_recurrent_layers_are_evaluated_without_cudnn(layer: nn.Module, enabled: bool) -> None:
    """It has no backward pass for them in evaluation mode, and the probe takes one."""
    before = torch.backends.cudnn.enabled
    with evaluation_mode(nn.Sequential(layer)):
        assert torch.backends.cudnn.enabled == (enabled and before)
    assert torch.backends.cudnn.enabled == before


WHOLE = torch.ones(3, 2, dtype=torch.bool)
"""The records have equally many tokens, so that replacing one changes no count of them."""


@pytest.mark.parametrize(
    "tokens",
    [
        lambda mask: mask.sum() / len(mask),
        lambda mask: mask.float().sum(1).mean(),
        lambda mask: mask.sum(0).sum() / len(mask),
        lambda mask: int(mask.count_nonzero()) / len(mask),
        lambda mask: mask.count_nonzero(0).sum() / len(mask),
    ],
)
def test_losses_over_the_tokens_of_a_batch_are_refused(tokens: Callable[[Tensor], Tensor]) -> None:
    model = Body()
    with pytest.raises(MixedRecords, match="a sum or count over the batch"):
        probe(private(model), lambda rows: losses(model)(rows) / tokens(WHOLE[rows]))


@pytest.mark.parametrize(
    "scale",
    [
        lambda _, mask: mask.sum(1),
        lambda _, mask: mask.sum(-1, keepdim=True)[:, 0],
        lambda model, _: model.last.weight.abs().mean().detach(),
        lambda model, _: model.first.weight.square().sum().detach(),
        lambda _, mask: 1.0 if mask.sum() else 0.0,
    ],
)
def test_other_totals_are_not_taken_for_those_of_a_batch(
    scale: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    model = Body()
    probe(private(model), lambda rows: losses(model)(rows) / scale(model, WHOLE[rows]))
