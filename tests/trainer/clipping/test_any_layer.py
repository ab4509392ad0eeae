"""Any layer: clipped sums equal those of each record's gradient, taken by itself."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from affidavit.trainer.clipping.layer_registry import KernelRefused, find_kernel, register_kernel
from affidavit.trainer.clipping.layers import ScaleUse
from affidavit.trainer.clipping.private_model import PrivateModel
from affidavit.trainer.clipping.probe import probe
from affidavit.trainer.clipping.requirements import BlockSpec
from affidavit.trainer.errors import MixedRecords

RECORDS = 5


class Picked(nn.Module):
    """A layer whose result is a tuple, or that is called in a way of its own."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.before, self.layer, self.call = nn.Linear(4, 4), layer, call

    def forward(self, x: Tensor) -> Tensor:
        """The first of what ``call`` returns."""
        result = self.call(self.layer, torch.tanh(self.before(x)))
        return result if isinstance(result, Tensor) else result[0]


class Tokens(nn.Module):
    """A class token, positions, a scale and shared words: parameters of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.places = nn.Parameter(torch.randn(4, 4))
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
        self.inner, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        """(n, T + 1, 4)."""
        h = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return h + self.scales[0] * torch.tanh(self.inner(self.norm(h))) * self.scales[1].exp()


class Functional(nn.Module):
    """A table that is looked up by its layer and multiplied with by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        """(n, T, 7)."""
        return functional.linear(torch.tanh(self.inner(self.words(ids))), self.words.weight)


class Biased(nn.Module):
    """Attention with a bias for each distance, which no record has a row of."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.bias = nn.Linear(4, 4), nn.Embedding(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, 4)."""
        places = torch.arange(x.shape[1])
        distance = (places[:, None] - places[None, :]).abs()
        bias = self.bias(distance).squeeze(-1)
        return torch.softmax(self.query(x) @ x.mT + bias, -1) @ x


class Experts(nn.Module):
    """Tokens routed to one of three experts, over rows of all records."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.up = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, 4)."""
        rows = x.flatten(0, 1)
        weights, places = torch.softmax(self.router(rows), -1).max(-1)
        return _Routed.forward_of(self.up, rows, weights, places).view_as(x)


class _Routed:
    @staticmethod
    def forward_of(up: Tensor, rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        """Dense, so that it has no control flow that depends on data."""
        outputs = torch.einsum("rd,edh->reh", rows, up)
        chosen = functional.one_hot(places, up.shape[0]).to(outputs)
        return (outputs * chosen.unsqueeze(-1)).sum(1) * weights.unsqueeze(-1)


class DataDependent(nn.Module):
    """Control flow by values, which ``vmap`` cannot run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, 4)."""
        return x * self.weight if float(x.detach().sum()) > 0 else x * self.weight.square()


class AttendedByValues(nn.Module):
    """The same with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, 4)."""
        h = x * self.weight if float(x.detach().sum()) > 0 else x * self.weight.square()
        return functional.scaled_dot_product_attention(*(h.unsqueeze(1) for _ in range(3)))


class RoutedRows(nn.Module):
    """Each expert is called with the tokens, of any record, that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, 4)."""
        rows = x.flatten(0, 1)
        weights, places = torch.softmax(self.router(rows), -1).topk(2)
        result = torch.zeros_like(rows)
        for place, expert in enumerate(self.experts):
            at, choice = (places == place).nonzero(as_tuple=True)
            result = result.index_add(0, at, expert(rows[at]) * weights[at, choice].unsqueeze(1))
        return result.view_as(x)


class Packed(nn.Module):
    """A recurrent layer on packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, 3)."""
        lengths = torch.full((len(x),), x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


class Transposed(nn.Module):
    """A layer that is called with another weight than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, 4)."""
        return functional_call(self.inner, {"weight": self.inner.weight.mT}, (x,))


class Prompted(nn.Module):
    """Learned tokens before each record's, looked up once and repeated (PEFT's prompts)."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.inner = nn.Embedding(2, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(n, T + 2, 4)."""
        learned = self.prompt(torch.arange(2).unsqueeze(0)).repeat(len(x), 1, 1)
        return self.inner(torch.cat([learned, x], 1)).cumsum(1)


class Rewritten(nn.Module):
    """Writes into what a layer made of positions, which no record has a row of (Swin V2)."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.scale = nn.Linear(1, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, 4)."""
        places = torch.arange(x.shape[1]).to(x).view(1, -1, 1)
        return x * self.scale * self.places(places).relu_()


class ByItself(torch.autograd.Function):
    """The identity, whose gradient is divided by its own norm; ``vmap`` has no rule for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """As it is."""
        ctx.set_materialize_grads(True)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Of norm 1."""
        assert ctx.needs_input_grad[0]
        return grads[0] / grads[0].norm()


class GemmaRMSNorm(nn.Module):
    """The scale is 1 + w."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, 4)."""
        return functional.rms_norm(x, (4,)) * (1 + self.weight)


class GatedRMSNorm(nn.Module):
    """The scale's use depends on a second input (Mamba-2, Qwen3-Next)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """(n, T, 4)."""
        scaled = functional.rms_norm(x, (4,)) * self.weight
        return scaled if gate is None else scaled.sin() * gate


class Rows(nn.Module):
    """Rows of all records in one dimension."""

    def __init__(self, *, time_first: bool = False) -> None:
        super().__init__()
        self.linear, self.norm, self.time_first = nn.Linear(4, 4), nn.LayerNorm(4), time_first

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, 4)."""
        if self.time_first:
            return self.norm(self.linear(x.transpose(0, 1))).transpose(0, 1)
        return self.norm(self.linear(x.flatten(0, 1))).view_as(x)


def picked(layer: nn.Module, call: Callable[[nn.Module, Tensor], Any] | None = None) -> nn.Module:
    """``layer`` after a linear one."""
    return Picked(layer, call or (lambda module, x: module(x)))


def volumes(*layers: nn.Module) -> nn.Module:
    """A linear layer, a reshape to (n, 2, 2, 3, 4), and ``layers``."""
    return nn.Sequential(nn.Linear(4, 16), nn.Flatten(), nn.Unflatten(1, (2, 2, 3, 4)), *layers)


def images(*layers: nn.Module) -> nn.Module:
    """The same to (n, 4, 3, 4)."""
    return nn.Sequential(nn.Linear(4, 16), nn.Flatten(), nn.Unflatten(1, (4, 3, 4)), *layers)


def attended(module: nn.Module, x: Tensor) -> Tensor:
    """Self-attention; records are in the second dimension unless ``batch_first``."""
    if not module.batch_first:
        x = x.transpose(0, 1)
    result = module(x, x, x, need_weights=False)[0]
    return result if module.batch_first else result.transpose(0, 1)


class Recomputed(nn.Module):
    """Activations that are recomputed below a parameter of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, 4)."""
        return checkpoint(self.inner, x * self.scale, use_reentrant=False).tanh()  # type: ignore[no-any-return,union-attr]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tokens": Tokens,
    "lstm": lambda: picked(nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True)),
    "lstm with projections": lambda: picked(nn.LSTM(4, 5, proj_size=2, batch_first=True)),
    "gru, time first": lambda: picked(
        nn.GRU(4, 3, bias=False), lambda layer, x: layer(x.transpose(0, 1))[0].transpose(0, 1)
    ),
    "rnn": lambda: picked(nn.RNN(4, 3, nonlinearity="relu", batch_first=True)),
    "attention": lambda: picked(nn.MultiheadAttention(4, 2, batch_first=True), attended),
    "attention, time first": lambda: picked(nn.MultiheadAttention(4, 2), attended),
    "attention with keys of its own": lambda: picked(
        nn.MultiheadAttention(4, 2, kdim=4, vdim=4, add_bias_kv=True, batch_first=True), attended
    ),
    "encoder layer": lambda: picked(nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True)),
    "transposed": lambda: images(
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)
    ),
    "transposed in one dimension": lambda: picked(nn.ConvTranspose1d(3, 2, 2)),
    "volumes": lambda: volumes(nn.Conv3d(2, 3, 2, padding=1), nn.ConvTranspose3d(3, 2, 2)),
    "paddings": lambda: images(
        nn.Conv2d(4, 4, 3, padding="same"), nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect")
    ),
    "instance norm": lambda: images(nn.InstanceNorm2d(4, affine=True)),
    "weight norm": lambda: picked(parametrizations.weight_norm(nn.Linear(4, 3))),
    "PReLU": lambda: picked(nn.PReLU()),
    "bilinear": lambda: picked(nn.Bilinear(4, 4, 3), lambda layer, x: layer(x, x)),
    "biases of positions": Biased,
    "experts": Experts,
    "by values": lambda: picked(DataDependent()),
    "attention by values": lambda: picked(AttendedByValues()),
    "routed rows": lambda: picked(RoutedRows()),
    "packed": lambda: picked(Packed()),
    "prompted": lambda: picked(Prompted()),
    "another weight": lambda: picked(Transposed()),
    "a function of its own": lambda: picked(nn.Identity(), lambda _, x: ByItself.apply(x)),
    "1 + w": lambda: picked(GemmaRMSNorm()),
    "gated norm": lambda: picked(GatedRMSNorm(), lambda layer, x: layer(x, x)),
    "norm over two dimensions": lambda: picked(nn.RMSNorm((3, 4))),
    "recomputed": Recomputed,
    "rows": Rows,
    "time first": lambda: Rows(time_first=True),
}


def inputs_of(name: str) -> tuple[nn.Module, Tensor]:
    """A model in float64 and inputs that differ, from a fixed seed."""
    torch.manual_seed(len(name))
    if name == "table as a function":
        return Functional().double(), torch.randint(0, 7, (RECORDS, 3))
    return MODELS[name]().double(), torch.randn(RECORDS, 3, 4, dtype=torch.float64)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    """Of each record by itself; no gradient of it is bounded."""
    return model(x).flatten(1).square().sum(1) / 2


def expected_sums(model: nn.Module, specs: list[BlockSpec], x: Tensor) -> dict[str, Tensor]:
    """By plain autograd on one record at a time, clipped block by block and added."""
    named = {name: item for name, item in model.named_parameters() if item.requires_grad}
    total = {name: torch.zeros_like(item) for name, item in named.items()}
    for i in range(len(x)):
        grads = torch.autograd.grad(loss(model, x[i : i + 1]).sum(), list(named.values()))
        of = dict(zip(named, grads, strict=True))
        for spec in specs:
            norm = torch.stack([of[name].square().sum() for name in spec.names]).sum().sqrt()
            for name in spec.names:
                total[name] += of[name] * (spec.clip_norm / norm).clamp(max=1)
    return total


@pytest.mark.by_turns
@pytest.mark.ordinary("*-False", "tokens-True", "lstm-True")
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", [*MODELS, "table as a function"])
def test_sums_equal_those_of_single_records(name: str, joint: bool) -> None:
    model, x = inputs_of(name)
    names = tuple(n for n, item in model.named_parameters() if item.requires_grad)
    groups = [names] if joint else [(n,) for n in names]
    specs = [BlockSpec(name=str(group), clip_norm=0.3, names=group) for group in groups]
    expected = expected_sums(model, specs, x)
    private = PrivateModel(model, specs)
    probe(private, lambda rows: loss(model, x[rows]))
    for rows in (slice(0, 3), slice(3, RECORDS)):
        private.accumulate(lambda rows=rows: loss(model, x[rows]), records=len(x[rows]))
    for parameter_name, total in private.sums().items():
        want = expected[parameter_name]
        gap = float((total - want).abs().max())
        assert gap <= 1e-10 * float(want.abs().max()) + 1e-13, (parameter_name, gap)
    private.detach()
    assert not any("forward" in layer.__dict__ for layer in model.modules())


def test_a_layer_may_be_written_into_in_a_microbatch_of_one() -> None:
    torch.manual_seed(1)
    model, x = picked(Rewritten()).double(), torch.randn(RECORDS, 3, 4, dtype=torch.float64)
    names = tuple(name for name, _ in model.named_parameters())
    spec = BlockSpec(name="all", clip_norm=0.3, names=names)
    expected = expected_sums(model, [spec], x[:1])
    private = PrivateModel(model, [spec])
    probe(private, lambda rows: loss(model, x[rows]))
    private.accumulate(lambda: loss(model, x[:1]), records=1)
    for name, total in private.sums().items():
        assert torch.allclose(total, expected[name], rtol=1e-9)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_sums_of_narrow_parameters_are_in_float32(kind: torch.dtype) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2)).to(kind)
    x = torch.randn(RECORDS, 3, 4).to(kind)
    names = tuple(name for name, _ in model.named_parameters())
    private = PrivateModel(model, [BlockSpec(name="all", clip_norm=0.5, names=names)])
    for rows in (slice(0, 2), slice(2, RECORDS)):
        private.accumulate(lambda rows=rows: loss(model, x[rows]).float(), records=len(x[rows]))
    sums = private.sums()
    assert {item.dtype for item in sums.values()} == {torch.float32}
    total = torch.cat([item.flatten() for item in sums.values()]).norm()
    assert 0.2 < float(total) <= 0.5 * RECORDS
    private.detach()
    block = BlockSpec(name="all", clip_norm=0.5, names=names)
    exact = expected_sums(model.double(), [block], x.double())
    for name, want in exact.items():
        assert float((sums[name] - want).abs().max()) < 0.05 * float(want.abs().max()) + 1e-3


class Scale(nn.Module):
    """y = x ⊙ w."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, 4)."""
        return x * self.weight


def run_scale(layer: Any, hooks: Any, records: int, x: Tensor) -> Tensor:
    """Its kernel."""
    return ScaleUse.apply(x, layer.weight, None, -1, (hooks["weight"], None), records)


def run_wrong(layer: Any, hooks: Any, records: int, x: Tensor) -> Tensor:
    """Of every record the gradient of the next."""
    return run_scale(layer, hooks, records, x + 0 * x.sum()) + 0.1 * x.detach().roll(1, 0)


def run_shifted(layer: Any, hooks: Any, records: int, x: Tensor) -> Tensor:
    """Rows in another order inside, where the gradient is caught."""
    return run_scale(layer, hooks, records, x.roll(1, 0)).roll(-1, 0)


def run_silent(layer: Any, hooks: Any, records: int, x: Tensor) -> Tensor:
    """Catches nothing."""
    del hooks, records
    return x * layer.weight.detach() + 0 * x.requires_grad_()


@pytest.mark.parametrize("kernel", [run_wrong, run_shifted, run_silent])
def test_a_kernel_with_other_gradients_is_not_registered(kernel: Callable[..., Any]) -> None:
    with pytest.raises(KernelRefused, match="weight"):
        register_kernel(Scale, kernel, Scale(), torch.randn(3, 2, 4))


def test_a_registered_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from affidavit.trainer.clipping import layer_registry

    monkeypatch.setattr(layer_registry, "KERNELS", dict(layer_registry.KERNELS))
    register_kernel(Scale, run_scale, Scale(), torch.randn(3, 2, 4))
    assert layer_registry.find_kernel(Scale()) is run_scale


class Bundled(nn.Module):
    """Its output is in an object whose tensors nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=x * self.scale)


def test_tensors_that_are_returned_in_an_object_are_refused_by_name() -> None:
    model, x = Bundled(), torch.randn(3, 3)
    private = PrivateModel(model, [BlockSpec(name="all", clip_norm=1.0, names=("scale",))])
    with pytest.raises(MixedRecords, match="returns a SimpleNamespace"):
        probe(private, lambda rows: model(x[rows]).logits.sum(1))


class OddNorm(nn.Module):
    """A normalisation that is scaled by some function of its weight."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(8)), function

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, d)."""
        return functional.rms_norm(x, (8,)) * self.function(self.weight)


class OddWords(nn.Embedding):
    """A table whose rows are scaled by its own size."""

    def forward(self, ids: Tensor) -> Tensor:
        """(n, T, d)."""
        return super().forward(ids) / self.weight.norm()


@pytest.mark.parametrize(
    ("layer", "is_plain"),
    [
        (OddNorm(lambda weight: weight), True),
        (OddNorm(lambda weight: 1 + weight), True),
        (OddNorm(torch.abs), False),
        (OddNorm(torch.relu), False),
        (OddNorm(lambda weight: weight.clamp(max=5)), False),
        (OddNorm(lambda weight: torch.where(weight == 0, 1.0, weight)), False),
        (OddWords(5, 4), False),
    ],
)
def test_only_plain_scales_have_the_kernel_of_a_scale(layer: nn.Module, is_plain: bool) -> None:
    assert (find_kernel(layer) is not None) == is_plain
