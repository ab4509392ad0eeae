"""Clipped sums equal ``vmap(grad)``, clipped block by block and added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from affidavit.trainer.clipping import convolutions
from affidavit.trainer.clipping import ghost_norm as factors
from affidavit.trainer.clipping.convolutions import Geometry, PatchFactors, kernel_gradients
from affidavit.trainer.clipping.ghost_norm import Factors
from affidavit.trainer.clipping.private_model import PrivateModel
from affidavit.trainer.clipping.requirements import BlockSpec
from affidavit.trainer.norm_bounds import clip_weights

RECORDS = 6
CLIP_NORMS = (0.05, 2.0, 1e6)


def squared_errors(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return half the squared error of each record; its gradients, unlike cross-entropy's, grow."""
    return (model(inputs).flatten(1) - targets.flatten(1)).square().sum(1) / 2


def reference_sums(
    model: nn.Module, blocks: Sequence[BlockSpec], inputs: Tensor, targets: Tensor
) -> dict[str, Tensor]:
    """Return the clipped sums by name, from per-record gradients that are formed in full."""
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

    def record_loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        output = functional_call(model, values, (x.unsqueeze(0),))
        return (output.flatten() - y.flatten()).square().sum() / 2

    gradients = vmap(grad(record_loss), in_dims=(None, 0, 0))(trained, inputs, targets)
    result = {}
    for block in blocks:
        squares = sum(gradients[name].flatten(1).square().sum(1) for name in block.names)
        weights = (block.clip_norm / torch.as_tensor(squares).sqrt()).clamp(max=1)
        for name in block.names:
            result[name] = torch.tensordot(weights, gradients[name], dims=1)
    return result


class Sums(nn.Module):
    """Embeddings, positions, norms, a layer that runs twice and a tied head."""

    def __init__(self, *, tied: bool = True, twice: bool = True) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 6, padding_idx=3), nn.Embedding(7, 6)
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.twice = twice
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (n, T, 11)."""
        h = self.words(ids) + self.places(torch.arange(ids.shape[1]).unsqueeze(0))
        h = h + torch.tanh(self.linear(self.norm(h)))
        if self.twice:
            h = h + torch.relu(self.linear(h))
        return self.head(h)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank correction (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(9, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(9, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.then = nn.Linear(8, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, 3)."""
        return self.then(torch.tanh(self.base(x) + 4 * self.up(self.down(x))))


def text(steps: int = 7) -> Tensor:
    """Ids with repetitions within a record."""
    return torch.randint(0, 11, (RECORDS, steps))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)),
        torch.randn(RECORDS, 5),
    ),
    "one step": lambda: (nn.Linear(5, 3), torch.randn(RECORDS, 1, 5)),
    "more steps than entries": lambda: (nn.Linear(3, 2), torch.randn(RECORDS, 40, 3)),
    "two inner dimensions": lambda: (nn.Linear(5, 3), torch.randn(RECORDS, 2, 4, 5)),
    "wide": lambda: (nn.Linear(40, 60), torch.randn(RECORDS, 4, 40)),
    "tied": lambda: (Sums(), text()),
    "untied": lambda: (Sums(tied=False, twice=False), text()),
    "lora": lambda: (Adapted(), torch.randn(RECORDS, 5, 9)),
    "images": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Conv2d(4, 6, (3, 2), groups=2, padding=(0, 1), dilation=(1, 2)),
            nn.GroupNorm(3, 6, affine=False),
            nn.Flatten(),
            nn.Linear(126, 5),
            nn.RMSNorm(5),
            nn.Linear(5, 2),
        ),
        torch.randn(RECORDS, 3, 9, 13),
    ),
    "signals": lambda: (
        nn.Sequential(
            nn.Conv1d(3, 4, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv1d(4, 6, 2, groups=2, dilation=2, bias=False),
            nn.Flatten(),
            nn.LayerNorm(24, bias=False),
            nn.Linear(24, 2),
        ),
        torch.randn(RECORDS, 3, 12),
    ),
    "norm over two dimensions": lambda: (nn.LayerNorm((4, 5)), torch.randn(RECORDS, 3, 4, 5)),
}


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model in float64, its inputs and targets, from a fixed seed."""
    torch.manual_seed(len(name))
    model, inputs = MODELS[name]()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    model.double()
    with torch.no_grad():
        targets = torch.randn_like(model(inputs))
    return model, inputs, targets


def trained(model: nn.Module) -> list[str]:
    """The names of the trainable tensors."""
    return [name for name, item in model.named_parameters() if item.requires_grad]


def one_each(model: nn.Module, clip_norm: float) -> list[BlockSpec]:
    """A block for each tensor."""
    return [BlockSpec(name=n, clip_norm=clip_norm, names=(n,)) for n in trained(model)]


def flat(model: nn.Module, clip_norm: float) -> list[BlockSpec]:
    """One block."""
    return [BlockSpec(name="all", clip_norm=clip_norm, names=tuple(trained(model)))]


def mixed(model: nn.Module, clip_norm: float) -> list[BlockSpec]:
    """The first tensor by itself, the others together at another norm."""
    first, *others = trained(model)
    return [BlockSpec(name="first", clip_norm=clip_norm, names=(first,))] + [
        BlockSpec(name="others", clip_norm=3 * clip_norm, names=tuple(others))
    ] * bool(others)


def require_equal(private: PrivateModel, expected: dict[str, Tensor]) -> None:
    """The sum of every named parameter within 1e-10 of its largest expected entry."""
    for name, value in expected.items():
        got = private.sums()[name]
        assert float((got - value).abs().max()) <= 1e-10 * float(value.abs().max()), name


@pytest.mark.ordinary("*-2.0", "*-mixed-0.05")
@pytest.mark.parametrize("clip_norm", CLIP_NORMS)
@pytest.mark.parametrize("blocks", [one_each, flat, mixed])
@pytest.mark.parametrize("name", MODELS)
def test_sums_of_microbatches_equal_clipped_gradients(
    name: str, blocks: Callable[[nn.Module, float], list[BlockSpec]], clip_norm: float
) -> None:
    model, inputs, targets = made(name)
    specs = blocks(model, clip_norm)
    expected = reference_sums(model, specs, inputs, targets)
    private = PrivateModel(model, specs)
    for rows in (slice(0, 1), slice(1, 1), slice(1, RECORDS)):
        x, y = inputs[rows], targets[rows]
        private.accumulate(lambda x=x, y=y: squared_errors(model, x, y), records=len(x))
    require_equal(private, expected)


@pytest.mark.parametrize("kernel", ["gram", "direct", "reuse"])
@pytest.mark.parametrize("chunk", [1, 1 << 20])
@pytest.mark.parametrize(("steps", "wide", "high"), [(1, 4, 3), (9, 4, 3), (2, 17, 30)])
def test_every_kernel_has_the_norm_and_the_sum(
    monkeypatch: pytest.MonkeyPatch, kernel: str, chunk: int, steps: int, wide: int, high: int
) -> None:
    monkeypatch.setitem(factors.CHUNK_ENTRIES, "cpu", chunk)
    torch.manual_seed(steps)
    a, b = torch.randn(5, steps, wide).double(), torch.randn(5, steps, high).double()
    item = torch.einsum("nto,nti->noi", b, a)
    norms = item.flatten(1).norm(dim=1)
    weights = (1.5 / norms).clamp(max=1)
    expected = torch.einsum("n,noi->oi", weights, item)
    of = factors.LinearFactors(a, b)

    if kernel == "reuse":
        got = of.reused_sum(1.5)
    else:
        result = of.gram_norms() if kernel == "gram" else of.direct_norms()
        assert torch.allclose(result, norms, rtol=1e-10, atol=0)
        assert bool((result >= norms * (1 - 1e-15)).all())
        got = of.weighted_sum(clip_weights(result, 1.5))
    assert float((got - expected).abs().max()) < 1e-10


def test_a_tied_tensor_may_have_each_use_clipped_by_itself() -> None:
    model, inputs, targets = made("tied")
    model.twice = False  # type: ignore[assignment]
    apart, _, _ = made("untied")
    apart.load_state_dict(model.state_dict())
    others = tuple(n for n in trained(model) if n != "words.weight")
    rest = BlockSpec(name="rest", clip_norm=1.0, names=others)
    expected = reference_sums(
        apart,
        [
            BlockSpec(name="look-up", clip_norm=0.3, names=("words.weight",)),
            BlockSpec(name="head", clip_norm=0.5, names=("head.weight",)),
            rest,
        ],
        inputs,
        targets,
    )
    expected["words.weight"] = expected["words.weight"] + expected.pop("head.weight")
    uses = {"words": 0.3, "head": 0.5}
    tied = BlockSpec(name="words", clip_norm=0.8, names=("words.weight",), uses=uses)
    private = PrivateModel(model, [tied, rest])
    private.accumulate(lambda: squared_errors(model, inputs, targets), records=RECORDS)
    require_equal(private, expected)


def test_gradients_are_added_to_what_is_there() -> None:
    model, inputs, targets = made("mlp")
    private = PrivateModel(model, flat(model, 1.0))
    private.accumulate(lambda: squared_errors(model, inputs, targets), records=RECORDS)
    once = {name: item.clone() for name, item in private.sums().items()}
    private.accumulate(lambda: squared_errors(model, inputs, targets), records=RECORDS)
    require_equal(private, {name: 2 * item for name, item in once.items()})


def test_an_empty_microbatch_adds_nothing() -> None:
    model, _, _ = made("mlp")
    private = PrivateModel(model, flat(model, 1.0))
    assert private.accumulate(lambda: pytest.fail("run"), records=0).shape == (0,)
    assert not any(bool(item.any()) for item in private.sums().values())


def test_detach_gives_the_model_back() -> None:
    model, inputs, targets = made("tied")
    private = PrivateModel(model, flat(model, 1e-3))
    inside = model(inputs)
    private.detach()
    assert torch.equal(model(inputs), inside)
    squared_errors(model, inputs, targets).sum().backward()
    assert float(model.words.weight.grad.norm()) > 1e-2  # type: ignore[union-attr,operator]


@pytest.mark.parametrize("size", [(9,), (7, 9)])
def test_kernels_of_records_with_several_rows_are_clipped_by_their_joint_norm(
    size: tuple[int, ...],
) -> None:
    records, rows, clip_norm = 3, 2, 4.0
    x, gy = (torch.randn(records * rows, n, *size).double() for n in (2, 5))
    weight, one = torch.randn(5, 2, *(3,) * len(size)).double(), (1,) * len(size)
    geometry = Geometry(one, one, one, False, (0,) * len(size), 1)
    patches = PatchFactors(x, weight, gy, geometry, records)
    assert patches.prefers_reuse
    expected = torch.zeros(5, weight[0].numel()).double()
    for row in kernel_gradients(x, weight, gy, geometry).unflatten(0, (records, rows)).sum(1):
        expected += row.flatten(1) * min(1.0, clip_norm / float(row.norm()))
    for clipped in (patches.clipped_sum(clip_norm), Factors.clipped_sum(patches, clip_norm)):
        torch.testing.assert_close(clipped, expected)


@pytest.mark.parametrize(("most", "at_once"), [(1 << 17, 1 << 20), (1 << 17, 999), (0, 1)])
def test_patches_are_formed_some_records_at_a_time(
    monkeypatch: pytest.MonkeyPatch, most: int, at_once: int
) -> None:
    monkeypatch.setattr(convolutions, "MAX_PATCHES", most)
    monkeypatch.setattr(convolutions, "PATCHES_AT_ONCE", at_once)
    monkeypatch.setattr(factors, "MOVE_COSTS", {"cpu": 0})  # so that gradients are formed
    torch.manual_seed(0)
    x, weight = torch.randn(RECORDS, 3, 7, 9).double(), torch.randn(4, 3, 2, 2).double()
    gy = torch.randn(RECORDS, 4, 6, 8).double()
    geometry = Geometry((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    each = kernel_gradients(x, weight, gy, geometry).flatten(2)
    weights = clip_weights(each.flatten(1).norm(dim=1), 9.0)
    patches = PatchFactors(x, weight, gy, geometry, RECORDS)
    expected = torch.tensordot(weights, each, dims=1).flatten()
    torch.testing.assert_close(patches.clipped_sum(9.0).flatten(), expected)
    (gradients,) = patches.formed().held
    torch.testing.assert_close(gradients.flatten(), each.flatten())


def test_layers_of_one_input_share_its_narrow_copy_until_it_is_written_to() -> None:
    torch.manual_seed(6)
    norm = nn.LayerNorm(256)
    layers = nn.ModuleList(nn.Linear(256, 4, bias=False) for _ in range(3))
    model = nn.ModuleList([norm, layers])
    names = tuple(name for name, _ in model.named_parameters())
    private = PrivateModel(model, [BlockSpec(name="all", clip_norm=0.5, names=names)])
    x = torch.randn(4, 64, 256)

    def losses(writes: bool) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = norm(x)
            total = layers[0](h).float() + layers[1](h).float()
            h = h.mul_(2) if writes else h * 2
            return (total + layers[2](h)).square().sum((1, 2))

    sums = []
    for writes in (True, False):
        private.clear_sums()
        private.accumulate(partial(losses, writes), records=4)
        sums.append({name: item.clone() for name, item in private.sums().items()})
    for name, item in sums[0].items():
        assert torch.equal(item, sums[1][name]), name
