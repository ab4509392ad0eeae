"""LoRA: a frozen matrix plus a trained product of two thin ones.

    y = W x + b + (α / r) B A x,   A (r, in),  B (out, r) zero at the start

Everything that ``adapt`` does not add is frozen, so that the trainable tensors are A and B of
each named matrix and nothing else needs noise.

>>> model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
>>> adapt(model, ["0.weight"], rank=2, alpha=2, generator=torch.Generator().manual_seed(1))
['0.down.weight', '0.up.weight']
>>> [name for name, each in model.named_parameters() if each.requires_grad]
['0.down.weight', '0.up.weight']

Reference: Hu et al., arXiv:2106.09685.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class LoRALinear(nn.Module):
    """``base``, frozen, plus its low-rank update."""

    def __init__(
        self, base: nn.Linear, *, rank: int, alpha: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.scale = alpha / rank
        with torch.no_grad():
            self.down.weight.normal_(0, base.in_features**-0.5, generator=generator)
            self.up.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """(n, ..., in) to (n, ..., out)."""
        return self.base(x) + self.scale * self.up(self.down(x))


def adapt(
    model: nn.Module,
    matrices: Sequence[str],
    *,
    rank: int,
    alpha: float,
    generator: torch.Generator,
) -> list[str]:
    """Freeze ``model`` and adapt the linear layers of ``matrices``; the trained tensors' names.

    Raises ``TypeError`` for a name that is of no linear layer.
    """
    model.requires_grad_(False)
    trained = []
    for name in matrices:
        path = name.removesuffix(".weight")
        parent_path, _, own = path.rpartition(".")
        parent, base = model.get_submodule(parent_path), model.get_submodule(path)
        if not isinstance(base, nn.Linear):
            raise TypeError(f"{path} is no linear layer")
        setattr(parent, own, LoRALinear(base, rank=rank, alpha=alpha, generator=generator))
        trained += [f"{path}.down.weight", f"{path}.up.weight"]
    return trained
