"""Real architectures: clipped sums equal those of single records, for every tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from affidavit.trainer.clipping.private_model import PrivateModel
from affidavit.trainer.clipping.probe import probe
from affidavit.trainer.clipping.requirements import BlockSpec
from tests.trainer.clipping.architectures import CHEAP, OTHERS, RECORDS, Case

IN_FLOAT32 = {"mixtral", "qwen2-moe"}
"""Their experts are not run in float64."""

CLIP_NORM = 0.3


def require_equal_sums(name: str, case: Case) -> None:
    """One block a tensor; what no loss depends on is frozen."""
    model, inputs, losses = case
    kind = torch.float32 if name in IN_FLOAT32 else torch.float64
    model.to(kind).train()
    x = inputs.to(kind) if inputs.is_floating_point() else inputs
    drawn = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=drawn, dtype=kind)
        parameter.data.add_(0.1 * noise)
    trained = [item for item in model.parameters() if item.requires_grad]
    used = torch.autograd.grad(losses(model, x[:1]).sum(), trained, allow_unused=True)
    for parameter, gradient in zip(trained, used, strict=True):
        parameter.requires_grad_(gradient is not None)
    named = {n: item for n, item in model.named_parameters() if item.requires_grad}
    expected: dict[str, Tensor] = {n: torch.zeros_like(item) for n, item in named.items()}
    for i in range(RECORDS):
        gradients = torch.autograd.grad(losses(model, x[i : i + 1]).sum(), list(named.values()))
        for n, gradient in zip(named, gradients, strict=True):
            norm = gradient.norm()
            expected[n] += gradient * min(1.0, CLIP_NORM / (float(norm) + 1e-300))
    private = PrivateModel(
        model, [BlockSpec(name=n, clip_norm=CLIP_NORM, names=(n,)) for n in named]
    )
    probe(private, lambda rows: losses(model, x[rows]))
    private.accumulate(lambda: losses(model, x), records=RECORDS)
    # Some normalisations are in float32 whatever the parameters are in.
    tolerance = 1e-4 if name in IN_FLOAT32 else 2e-6
    for n, total in private.sums().items():
        gap = float((total - expected[n]).abs().max())
        assert gap <= tolerance * float(expected[n].abs().max()) + 1e-12, n


@pytest.mark.by_turns
@pytest.mark.ordinary("not llama", "not gemma2", "not mixtral", "not vit")
@pytest.mark.parametrize("name", CHEAP)
def test_sums_equal_those_of_single_records(name: str) -> None:
    torch.manual_seed(0)
    require_equal_sums(name, CHEAP[name]())


@pytest.mark.soak
@pytest.mark.parametrize("name", OTHERS)
def test_sums_of_more_architectures(name: str) -> None:
    torch.manual_seed(0)
    require_equal_sums(name, OTHERS[name]())
