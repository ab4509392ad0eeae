"""Records of text: tokens, and which of them count in the loss.

A record is ``source <bos> target <eos>``; the source and the mark after it are given, the
target and the mark that ends it count. A record longer than ``longest`` is cut on the right, and
one whose target is cut away altogether has loss 0: N does not depend on lengths. Records are
padded on the right to the longest of their batch and never share a row, so that a record's
loss is its own.

>>> from affidavit.trainer.data.tokens import Bytes
>>> data = TextRecords.of([("a", "bc"), ("de", "f")], Bytes(), longest=8)
>>> tokens, counted = data.collate(torch.tensor([0, 1]))
>>> tokens.tolist()
[[97, 257, 32, 98, 99, 258], [100, 101, 257, 32, 102, 258]]
>>> counted[0].tolist()
[False, False, True, True, True, True]

Reference: arXiv:2605.12994v1, appendix D.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from affidavit.trainer.adapters import digest_of_tensors
from affidavit.trainer.data.numbers import WrongData
from affidavit.trainer.data.tokens import Tokenizer

Text = tuple[str, str]
"""Source and target; a text without a source has an empty one."""


@dataclass(frozen=True, eq=False)
class TextRecords:
    """Tokens of all records one after another; record i has those from ``starts[i]`` on.

    ``sources`` has how many tokens of each record do not count.
    """

    tokens: Tensor
    starts: Tensor
    sources: Tensor
    vocabulary: int
    pad: int
    longest: int

    @classmethod
    def of(cls, texts: Iterable[Text], tokenizer: Tokenizer, *, longest: int) -> TextRecords:
        """Records from texts; raises ``WrongData`` where there are none."""
        pad, bos, eos = tokenizer.marks
        tokens: list[int] = []
        starts, sources = [0], []
        for source, target in texts:
            before = [*tokenizer.encode(source), bos]
            # The space belongs to the target's first word, as byte-pair vocabularies have it.
            tokens += [*before, *tokenizer.encode(f" {target}"), eos][:longest]
            sources.append(min(len(before), longest))
            starts.append(len(tokens))
        if not sources:
            raise WrongData("there is no record.")
        return cls(
            torch.tensor(tokens), torch.tensor(starts), torch.tensor(sources),
            vocabulary=tokenizer.vocabulary, pad=pad, longest=longest,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.sources)

    @cached_property
    def digest(self) -> str:
        """The digest of tokens, their borders and what counts."""
        return digest_of_tensors(self.tokens, self.starts, self.sources)

    def collate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (n, T) in int64 and whether each counts, (n, T)."""
        begin = self.starts[indices].unsqueeze(1)
        length = self.starts[indices + 1].unsqueeze(1) - begin
        place = torch.arange(int(length.max())).unsqueeze(0)
        inside = place < length
        found = self.tokens[torch.where(inside, begin + place, 0)]
        counted = inside & (place >= self.sources[indices].unsqueeze(1))
        return torch.where(inside, found, self.pad), counted
