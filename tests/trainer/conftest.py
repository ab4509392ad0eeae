"""The independent computation that clipping is held against: ``vmap(grad)``, then clip."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from affidavit.trainer.clipping.requirements import BlockSpec

Loss = Callable[[Tensor, Tensor], Tensor]
"""From one record's output and its target, each with a first dimension of 1, to a number."""

torch.set_num_threads(1)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Half the sum of squares: unlike cross-entropy, no gradient of it is bounded."""
    return (output.flatten(1) - target.flatten(1)).square().sum() / 2


def reference_sums(
    model: nn.Module,
    blocks: Sequence[BlockSpec],
    inputs: Tensor,
    targets: Tensor,
    loss: Loss = squared_error,
) -> dict[str, Tensor]:
    """Clipped sums by name, from per-record gradients that are formed in full."""
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

    def of_one(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(functional_call(model, values, (x.unsqueeze(0),)), y.unsqueeze(0))

    item = vmap(grad(of_one), in_dims=(None, 0, 0))(trained, inputs, targets)
    result = {}
    for block in blocks:
        squares = sum(item[name].flatten(1).square().sum(1) for name in block.names)
        weights = (block.clip_norm / torch.as_tensor(squares).sqrt()).clamp(max=1)
        for name in block.names:
            result[name] = torch.tensordot(weights, item[name], dims=1)
    return result


@pytest.fixture(scope="session")
def reference() -> Callable[..., dict[str, Tensor]]:
    """``reference_sums``."""
    return reference_sums


@pytest.fixture(scope="session")
def losses_of() -> Callable[..., Tensor]:
    """The losses of a batch, one for each record, as ``squared_error`` has them."""

    def losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return (model(inputs).flatten(1) - targets.flatten(1)).square().sum(1) / 2

    return losses
