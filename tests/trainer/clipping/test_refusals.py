"""What cannot be clipped record by record is refused by name, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from affidavit.trainer.clipping.private_model import PrivateModel
from affidavit.trainer.clipping.probe import probe
from affidavit.trainer.clipping.requirements import BlockSpec
from affidavit.trainer.errors import MixedRecords, UnsupportedModel


def private(model: nn.Module, **changes: float) -> PrivateModel:
    """One block for all that is trained."""
    names = tuple(name for name, item in model.named_parameters() if item.requires_grad)
    return PrivateModel(model, [BlockSpec(name="all", clip_norm=1.0, names=names, **changes)])


class Counting(nn.Identity):
    """Has more to save than tensors."""

    def get_extra_state(self) -> Tensor:
        """What it saw."""
        return torch.ones(())


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(3),
    "BatchNorm2d": lambda: nn.BatchNorm2d(3, affine=False),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(3),
    "keeps running statistics": lambda: nn.InstanceNorm1d(3, track_running_stats=True),
    "get_extra_state": Counting,
    "max_norm": lambda: nn.Embedding(3, 2, max_norm=1.0),
    "scale_grad_by_freq": lambda: nn.Embedding(3, 2, scale_grad_by_freq=True),
    "TorchScript": lambda: torch.jit.trace(nn.Linear(3, 2), torch.ones(1, 3)),
    "no values": lambda: nn.Linear(3, 2, device="meta"),
    "no values yet": lambda: nn.LazyLinear(2),
    "no entries": lambda: nn.LayerNorm(0),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("what", LAYERS)
def test_a_layer_is_refused_by_name(what: str) -> None:
    with pytest.raises(UnsupportedModel, match=what):
        private(nn.Sequential(nn.Linear(2, 2), LAYERS[what]()))


def test_frozen_layers_of_any_kind_are_left_alone() -> None:
    model = nn.Sequential(nn.LSTM(3, 3).requires_grad_(False), nn.Linear(3, 1))
    assert private(model)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([("a", 1.0, ("weight",))], "bias: trainable, but in no block"),
        ([("a", 1.0, ("weight", "bias")), ("b", 1.0, ("bias",))], "bias: named twice"),
        ([("a", 1.0, ("weight", "bias", "gain"))], "gain: no trainable tensor"),
        ([("a", 1.0, ("weight",)), ("a", 1.0, ("bias",))], "two blocks have one name"),
        ([("a", 1.0, ("weight", "bias")), ("b", 1.0, ())], "block b: names no tensor"),
        ([("a", 0.0, ("weight", "bias"))], "clip_norm 0 lies outside"),
        ([("a", float("nan"), ("weight", "bias"))], "clip_norm nan lies outside"),
        ([("a", float("inf"), ("weight", "bias"))], "clip_norm inf lies outside"),
    ],
)
def test_every_trainable_tensor_is_in_exactly_one_block(
    blocks: list[tuple[str, float, tuple[str, ...]]], message: str
) -> None:
    specs = [BlockSpec(name=name, clip_norm=norm, names=names) for name, norm, names in blocks]
    with pytest.raises(UnsupportedModel, match=message):
        PrivateModel(nn.Linear(2, 2), specs)


class Tied(nn.Module):
    """A look-up and a head that share a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        """(n, T, 5)."""
        return self.head(self.words(ids))


@pytest.mark.parametrize(
    ("uses", "message"),
    [
        ({"words": 0.5}, "head uses words.weight too"),
        ({"words": 0.5, "head": 0.3, "tail": 0.2}, "tail is not a layer"),
        ({"words": 0.7, "head": 0.5}, "clipped to 1.2 together, above its clip_norm 1"),
        ({"words": 1.0, "head": 0.0}, "clip_norm 0 lies outside"),
    ],
)
def test_uses_that_are_not_those_of_the_tensor_are_refused(
    uses: dict[str, float], message: str
) -> None:
    spec = BlockSpec(name="tied", clip_norm=1.0, names=("words.weight",), uses=uses)
    with pytest.raises(UnsupportedModel, match=message):
        PrivateModel(Tied(), [spec])


def test_a_model_that_was_not_detached_is_refused() -> None:
    model = nn.Linear(2, 2)
    first = private(model)
    with pytest.raises(UnsupportedModel, match="not detached"):
        private(model)
    first.detach()
    assert private(model)


class Outside(nn.Module):
    """A weight that is used by its layer and by a function as well."""

    def __init__(self, *, layer: bool, function: bool) -> None:
        super().__init__()
        self.linear, self.layer, self.function = nn.Linear(3, 3), layer, function

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3)."""
        result = self.linear(x) if self.layer else x
        return result + functional.linear(x, self.linear.weight) if self.function else result


class Folded(nn.Module):
    """Time in the first dimension, records in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, 3)."""
        return self.linear(x.transpose(0, 1)).transpose(0, 1)


class RunningCenter(nn.Module):
    """A frozen tensor that follows what is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.center = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3)."""
        with torch.no_grad():
            self.center.lerp_(x.mean(0), 0.1)
        return self.linear(x)


RUNS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], type[Exception], str]] = {
    "outside too": (
        lambda: Outside(layer=True, function=True),
        (4, 3),
        UnsupportedModel,
        "linear.weight: used outside its layer as well",
    ),
    "outside only": (
        lambda: Outside(layer=False, function=True),
        (4, 3),
        UnsupportedModel,
        "linear.weight: used outside",
    ),
    "time first": (Folded, (4, 5, 3), MixedRecords, "sees 5 rows for 4 records"),
    "no records": (lambda: nn.Linear(3, 3), (3,), MixedRecords, "without a dimension of records"),
    "statistics": (RunningCenter, (4, 3), UnsupportedModel, "center: changes in a forward pass"),
    "ids of one dimension": (lambda: nn.Embedding(5, 3), (4,), MixedRecords, "one dimension"),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_shows_in_a_step_is_refused_and_adds_nothing(name: str) -> None:
    make, shape, kind, message = RUNS[name]
    model = make()
    held = private(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    x = torch.zeros(shape).long() if isinstance(model, nn.Embedding) else torch.randn(shape)
    with pytest.raises(kind, match=message):
        held.accumulate(lambda: model(x).reshape(4, -1).sum(1), records=4)
    assert all(bool((item.grad == 7).all()) for item in model.parameters())


def test_a_tensor_that_is_not_used_is_refused() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "idle": nn.Linear(3, 1)})
    with pytest.raises(UnsupportedModel, match=r"received for idle\.weight, idle\.bias"):
        probe(private(model), lambda rows: model["used"](torch.ones(3, 3)[rows])[:, 0])


@pytest.mark.parametrize("reduce", [torch.mean, torch.sum])
def test_a_loss_over_the_lot_is_refused(reduce: Callable[[Tensor], Tensor]) -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(MixedRecords, match="one value for each of the 4 records"):
        private(model).accumulate(lambda: reduce(model(torch.ones(4, 3))), records=4)


@pytest.mark.parametrize("mode", [nullcontext, torch.enable_grad])
def test_losses_that_take_a_gradient_are_refused(
    mode: Callable[[], AbstractContextManager[None]],
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def penalised(rows: Tensor) -> Tensor:
        x = torch.arange(9.0).view(3, 3)[rows].requires_grad_()
        with mode():
            result = model(x).sum(1)
            (slope,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        return result + slope.square().sum(1)

    with pytest.raises(UnsupportedModel, match="the losses take a gradient themselves"):
        probe(private(model), penalised)
