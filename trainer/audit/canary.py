"""Canaries: records that sit on the clip norm of every block at once, in a known direction.

The model has six hidden matrices, each a block, and an auxiliary block of an embedding and
of a normalisation's scale and shift. A record's loss is linear in the parameters, so that its
gradient G is the same at every step whatever the parameters have become, and each block of G
is ``REACH`` times its clip norm long. Inside, each matrix's gradient is a sum over two tokens
that nearly cancel: where norms are taken in too few digits they come out far too small. A
record has an amplitude, +1 for a canary, -1 for one that contributes the opposite and 0 for
one that contributes nothing, and ``sign`` turns all of them at once: the worst data set of the
definition, chosen by whoever attacks.

>>> model = CanaryModel()
>>> {release: len(groups) for release, groups in model.blocks().items()}
{'hidden': 6, 'auxiliary': 1}
>>> [round(float(share.norm()), 2) for share in model.direction(0.5).values()]
[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.29, 0.29, 0.29]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from affidavit.trainer.adapters import Batch, Group, digest_of_tensors

HIDDEN, WIDTH, WORDS = 6, 8, 3
REACH = 50.0
"""How many times a canary's gradient is as long as what it is clipped to, for a clip norm of 1."""
CANCELLING = 100.0
"""How many times a token's part is as long as what is left of two of them."""


class _Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(HIDDEN))
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, records: int) -> Tensor:
        """The same for every record, (records, WIDTH)."""
        tokens = torch.zeros(records, 2, WIDTH)
        tokens[:, 0, 0], tokens[:, 1, 0] = CANCELLING / 2, -CANCELLING / 2
        tokens[:, :, 1] = 0.5
        result = sum(layer(tokens).sum(1) for layer in self.hidden)
        wave = torch.where(torch.arange(WIDTH) % 2 == 0, 1.0, -1.0).expand(records, -1)
        words = self.words(torch.zeros(records, 1, dtype=torch.int64)).squeeze(1)
        assert isinstance(result, Tensor)
        return result + (words + self.norm(wave)) / 3**0.5


class CanaryModel:
    """The model as the trainer sees it; a batch has the amplitudes (n,) of its records."""

    def __init__(self) -> None:
        self.module: nn.Module = _Module()
        self.sign = 1.0

    def losses(self, batch: Batch) -> Tensor:
        """Linear in every parameter; (n,)."""
        result: Tensor = self.module(len(batch))[:, 0] * batch * (REACH * self.sign)
        return result

    def blocks(self) -> Mapping[str, Sequence[Group]]:
        """A block for each matrix, one for all the rest."""
        names = [name for name, _ in self.module.named_parameters()]
        hidden = [name for name in names if name.startswith("hidden")]
        rest = tuple(name for name in names if name not in hidden)
        return {
            "hidden": tuple(Group(names=(name,)) for name in hidden),
            "auxiliary": (Group(names=rest),),
        }

    def made_up(self, records: int) -> Batch:
        """Canaries of different amplitudes."""
        return torch.linspace(0.5, 1.0, records)

    def direction(self, clip_norm: float) -> dict[str, Tensor]:
        """What a canary adds to the sum at sign 1 when each block is clipped exactly; by name.

        From plain autograd in float64 and the definition of clipping, not from the trainer.

        Each has the shape of its parameter.
        """
        trained = dict(self.module.named_parameters())
        loss = self.losses(torch.ones(1)).sum() / self.sign
        gradients = torch.autograd.grad(loss, list(trained.values()))
        of = {name: entry.double() for name, entry in zip(trained, gradients, strict=True)}
        result: dict[str, Tensor] = {}
        for group in (item for groups in self.blocks().values() for item in groups):
            joint = torch.stack([of[name].norm() for name in group.names]).norm()
            factor = min(1.0, clip_norm / float(joint))
            result |= {name: of[name] * factor for name in group.names}
        return result


@dataclass(frozen=True)
class CanaryData:
    """Records by their amplitudes, (N,)."""

    amplitudes: Tensor

    @property
    def digest(self) -> str:
        """The digest of the amplitudes."""
        return digest_of_tensors(self.amplitudes)

    def __len__(self) -> int:
        return len(self.amplitudes)

    def collate(self, indices: Tensor) -> Tensor:
        """Amplitudes of the records. Shape (n,), for indices of shape (n,)."""
        return self.amplitudes[indices]
