"""On a device, the uses of many matrices are clipped together; each record adds what it should.

A processor takes the same way here, with exact products.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from affidavit.trainer.clipping import ghost_norm, hooks
from affidavit.trainer.clipping.private_model import PrivateModel
from affidavit.trainer.clipping.requirements import BlockSpec

RECORDS, STEPS, WIDTH = 5, 4, 12


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghost_norm, "PROCESSORS", frozenset())
    monkeypatch.setattr(ghost_norm, "MAX_STACKED", 0)
    for kind in ("MOVE_COSTS", "CHUNK_ENTRIES"):
        monkeypatch.setattr(ghost_norm, kind, {})


class Block(nn.Module):
    """Two matrices and a norm around a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build() -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(Block(), Block(), Block(), nn.Linear(WIDTH, 2)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum((1, 2))


def blocks(model: nn.Module, *, is_joint: bool) -> list[BlockSpec]:
    """Each matrix is a block and the rest another, or all are one; most records are clipped."""
    names = [name for name, _ in model.named_parameters()]
    matrices = [] if is_joint else [(n,) for n in names if n.endswith(("up.weight", "down.weight"))]
    rest = tuple(name for name in names if (name,) not in matrices)
    return [
        BlockSpec(name=str(i), clip_norm=2.0, names=of) for i, of in enumerate([*matrices, rest])
    ]


def one_by_one(model: nn.Module, specs: list[BlockSpec], x: Tensor) -> dict[str, Tensor]:
    of = dict(model.named_parameters())
    result = {name: torch.zeros_like(item) for name, item in of.items()}
    for row in x:
        gradients = torch.autograd.grad(losses(model, row[None]).sum(), list(of.values()))
        named = dict(zip(of, gradients, strict=True))
        for spec in specs:
            norm = torch.stack([named[name].norm() for name in spec.names]).norm()
            for name in spec.names:
                result[name] += named[name] * min(1.0, spec.clip_norm / float(norm))
    return result


@pytest.mark.parametrize("is_joint", [False, True])
@pytest.mark.parametrize("most", [0, 1 << 31])
@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("is_formed", [False, True])
def test_sums_equal_those_of_single_records(
    monkeypatch: pytest.MonkeyPatch, is_joint: bool, most: int, is_lost: bool, is_formed: bool
) -> None:
    monkeypatch.setattr(hooks, "MAX_HELD", most)
    taken: list[int] = []
    right = ghost_norm.bounds_from_grams
    monkeypatch.setattr(
        ghost_norm,
        "bounds_from_grams",
        lambda uses: taken.append(len(uses)) or right(uses),
    )
    if is_formed:
        monkeypatch.setattr(ghost_norm, "ACCELERATOR_MOVE_COST", 0)
    formed: list[ghost_norm.Factors] = []
    form = ghost_norm.LinearFactors.formed
    monkeypatch.setattr(
        ghost_norm.LinearFactors, "formed", lambda self: formed.append(form(self)) or formed[-1]
    )
    model = build()
    specs = blocks(model, is_joint=is_joint)
    x = torch.randn(RECORDS, STEPS, WIDTH, dtype=torch.float64)
    expected = one_by_one(model, specs, x)
    given = torch.cat([x[:2], torch.full_like(x[:1], torch.nan), x[2:]]) if is_lost else x
    private = PrivateModel(model, specs)
    for _ in range(2):
        private.accumulate(lambda: losses(model, given), records=len(given))
    for name, item in private.sums().items():
        assert torch.allclose(item, 2 * expected[name], rtol=1e-9, atol=1e-12)
    if is_formed and not is_joint:
        assert {type(item) for item in formed} == {ghost_norm.DenseFactors}
    elif not is_formed:
        assert max(taken) >= (6 if most or is_joint else 1)


@pytest.mark.parametrize("records", [1, 3])
def test_narrow_products_pass_no_clip_norm(monkeypatch: pytest.MonkeyPatch, records: int) -> None:
    """Weights are narrowed at once from the second microbatch on, and are what autocast takes."""
    monkeypatch.setattr(ghost_norm, "BFLOAT16_DEVICES", frozenset({"cpu"}))
    model = build().float()
    specs = blocks(model, is_joint=False)
    x = torch.randn(records, STEPS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        plain = losses(model, x).detach()
    private = PrivateModel(model, specs)
    for times in range(1, 4):
        with torch.autocast("cpu", torch.bfloat16):
            seen = private.accumulate(lambda: losses(model, x), records=records)
        assert torch.equal(seen, plain)
        for spec in specs:
            added = torch.stack([private.sums()[name].double().norm() for name in spec.names])
            assert float(added.norm()) <= times * records * spec.clip_norm
            if records == 1:
                assert float(added.norm()) >= 0.99 * times * spec.clip_norm
        with torch.no_grad():
            assert model[0].up.weight.dtype == torch.float32


def test_weights_are_narrowed_again_after_an_update() -> None:
    model = build().float()
    private = PrivateModel(model, blocks(model, is_joint=False))
    x = torch.randn(RECORDS, STEPS, WIDTH)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            expected = losses(model, x).detach()
            seen = private.accumulate(lambda: losses(model, x), records=RECORDS)
        assert torch.equal(seen, expected)
        with torch.no_grad():
            model[1].up.weight.mul_(1.5)
