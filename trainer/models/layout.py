"""Layouts: which tensors are trained, and which are clipped together under which release.

The names are those of the plan's ``releases``, and ``count`` is the number of blocks. A
layout changes what is released, so it must match the plan (docs/how-to/models-and-data.md).

>>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
>>> layout = group_hidden_matrices(model, {"hidden": ["0.weight"]})
>>> {name: len(groups) for name, groups in layout.items()}
{'hidden': 1, 'auxiliary': 1}
>>> layout["auxiliary"][0].names
('0.bias', '2.weight', '2.bias')

LoRA trains a product of two thin matrices, which is added to a frozen one:

    y = W x + b + (α / r) B A x,   A (r, in),  B (out, r), initially zero

``add_lora`` freezes everything else, so that the trainable tensors are A and B of
each named matrix and nothing else needs noise.

>>> add_lora(model, ["0.weight"], rank=2, alpha=2, generator=torch.Generator().manual_seed(1))
['0.down.weight', '0.up.weight']
>>> [name for name, tensor in model.named_parameters() if tensor.requires_grad]
['0.down.weight', '0.up.weight']

Reference: Hu et al., arXiv:2106.09685 (LoRA).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from affidavit.trainer.adapters import Group

Layout = dict[str, tuple[Group, ...]]


def group_hidden_matrices(
    model: nn.Module,
    matrices: Mapping[str, Sequence[str]],
    apart: Mapping[str, Group] | None = None,
) -> Layout:
    """Return a block for each of ``matrices``, by release, and the releases ``apart`` of one block.

    The remaining trainable tensors are the release ``auxiliary``, if there are any.
    """
    result: Layout = {
        release: tuple(Group(names=(name,)) for name in names)
        for release, names in matrices.items()
        if names
    }
    result |= {release: (group,) for release, group in (apart or {}).items()}
    named = {name for groups in result.values() for group in groups for name in group.names}
    rest = tuple(name for name in trainable_names(model) if name not in named)
    return {**result, "auxiliary": (Group(names=rest),)} if rest else result


def single_block(model: nn.Module, release: str = "all") -> Layout:
    """Return one block of all trainable tensors."""
    return {release: (Group(names=tuple(trainable_names(model))),)}


def trainable_names(model: nn.Module) -> list[str]:
    """Return the names of the trainable tensors; a tied tensor has the name of its first use."""
    return [name for name, item in model.named_parameters() if item.requires_grad]


class LoRALinear(nn.Module):
    """A frozen layer ``base`` plus its low-rank update."""

    def __init__(
        self, base: nn.Linear, *, rank: int, alpha: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.base = base
        device = base.weight.device
        self.down = nn.Linear(base.in_features, rank, bias=False, device=device)
        self.up = nn.Linear(rank, base.out_features, bias=False, device=device)
        self.scale = alpha / rank
        with torch.no_grad():
            self.down.weight.normal_(0, base.in_features**-0.5, generator=generator)
            self.up.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, ..., in) to (n, ..., out)."""
        return self.base(x) + self.scale * self.up(self.down(x))


def add_lora(
    model: nn.Module,
    matrices: Sequence[str],
    *,
    rank: int,
    alpha: float,
    generator: torch.Generator,
) -> list[str]:
    """Freeze ``model``, adapt the linear layers of ``matrices``, and return the trained tensors.

    Raises ``TypeError`` for a name that belongs to no linear layer.
    """
    model.requires_grad_(False)
    trained = []
    for name in matrices:
        path = name.removesuffix(".weight")
        parent_path, _, child = path.rpartition(".")
        parent, base = model.get_submodule(parent_path), model.get_submodule(path)
        if not isinstance(base, nn.Linear):
            raise TypeError(f"{path} is not a linear layer")
        setattr(parent, child, LoRALinear(base, rank=rank, alpha=alpha, generator=generator))
        trained += [f"{path}.down.weight", f"{path}.up.weight"]
    return trained
