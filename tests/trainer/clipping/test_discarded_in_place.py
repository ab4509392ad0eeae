"""On a device with kernels, discarded records are overwritten in place; here with operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from affidavit.trainer.clipping import ghost_norm
from affidavit.trainer.clipping.ghost_norm import LinearFactors
from affidavit.trainer.clipping.hooks import norm_of_uses
from affidavit.trainer.clipping.private_model import PrivateModel
from affidavit.trainer.clipping.requirements import BlockSpec
from affidavit.trainer.norm_bounds import clip_weights

N, STEPS, WIDTH = 6, 5, 4


@pytest.fixture(params=[False, True], ids=["copies", "in place"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run as on a device, whose records are copied, or overwritten by the kernel's operations."""
    monkeypatch.setattr(ghost_norm, "PROCESSORS", frozenset())
    monkeypatch.setattr(ghost_norm, "has_kernels", lambda _: request.param)
    return bool(request.param)


class Branches(nn.Module):
    """Layers that share inputs and output gradients, behind one that saves its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.relu(self.first(x)))
        return self.left(h) + self.right(h) + self.left(torch.sigmoid(h))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("blocks", ["each alone", "all together"])
def test_a_discarded_record_adds_nothing_and_changes_no_other(blocks: str) -> None:
    torch.manual_seed(1)
    model = Branches().double()
    names = [name for name, _ in model.named_parameters()]
    groups = [(name,) for name in names] if blocks == "each alone" else [tuple(names)]
    specs = [BlockSpec(name=str(n), clip_norm=0.5, names=of) for n, of in enumerate(groups)]
    x = torch.randn(N, STEPS, WIDTH, dtype=torch.double)
    scales = torch.ones(N, dtype=torch.double)

    def sums(kept: list[int]) -> dict[str, Tensor]:
        private = PrivateModel(model, specs)
        data, of = x[kept].clone(), scales[kept]
        before = data.clone()
        private.accumulate(lambda: model(data).square().sum((1, 2)) * of, records=len(kept))
        assert torch.equal(data, before)
        found = {name: item.clone() for name, item in private.sums().items()}
        private.detach()
        return found

    expected = sums([0, 1, 3, 4, 5])
    scales[2] = 2.0**900
    for name, found in sums(list(range(N))).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-9, atol=1e-12)


def test_a_record_discarded_elsewhere_still_has_at_most_its_norm(device: bool) -> None:
    """Two uses cancel, and a third, which shares the memory of one, discards the record."""
    a, b = torch.randn(2, N, STEPS, WIDTH)
    uses = [LinearFactors(a, b, owned=(True, True)), LinearFactors(a.clone(), -b)]
    weights = clip_weights(norm_of_uses([*uses]), 1.0)
    wide = torch.full((N, STEPS, WIDTH - 1), torch.inf)
    third = LinearFactors(a, wide, owned=(True, True))
    third.norms()
    third.weighted_sum(torch.zeros(N))
    total = sum(use.weighted_sum(weights.where(torch.arange(N) == 0, 0.0)) for use in uses)
    assert isinstance(total, Tensor)
    assert float(total.norm()) <= 1
    assert bool(a.any()) is not device  # it was overwritten
