"""Layouts: which trainable tensors are clipped together, and under which release's name.

hidden   the release ``hidden`` has a block for each hidden matrix, ``auxiliary`` one block
         for all the rest (DP-Muon; what the paper calls 48 + 1 releases for GPT-2 small)
kinds    as ``hidden``, with a release for each kind of matrix, so that each can have a clip
         norm and a share of the noise of its own
all      one block of every trainable tensor: flat clipping

The names are those that a plan's ``releases`` must have, and ``count`` is the number of
blocks. A layout changes what is released, so it has to be the plan's; the trainer refuses
the two where they differ.

>>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
>>> found = hidden_and_rest(model, {"hidden": ["0.weight"]})
>>> {name: len(groups) for name, groups in found.items()}
{'hidden': 1, 'auxiliary': 1}
>>> found["auxiliary"][0].names
('0.bias', '2.weight', '2.bias')
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from affidavit.trainer.adapters import Group

Layout = dict[str, tuple[Group, ...]]


def hidden_and_rest(
    model: nn.Module,
    matrices: Mapping[str, Sequence[str]],
    apart: Mapping[str, Group] | None = None,
) -> Layout:
    """A block for each of ``matrices``, by release; ``apart`` has releases of one block.

    What is trained and named by neither is ``auxiliary``; there is none where nothing is left.
    """
    result: Layout = {
        release: tuple(Group(names=(name,)) for name in names)
        for release, names in matrices.items()
        if names
    }
    result |= {release: (group,) for release, group in (apart or {}).items()}
    named = {name for groups in result.values() for group in groups for name in group.names}
    rest = tuple(name for name in trained(model) if name not in named)
    return {**result, "auxiliary": (Group(names=rest),)} if rest else result


def flat(model: nn.Module, release: str = "all") -> Layout:
    """One block of everything that is trained."""
    return {release: (Group(names=tuple(trained(model))),)}


def trained(model: nn.Module) -> list[str]:
    """Names of the trainable tensors; a tied one has the name of its first use."""
    return [name for name, item in model.named_parameters() if item.requires_grad]
