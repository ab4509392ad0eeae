"""The study's texts: public ones to train on first and to choose rates by, E2E as private records.

    --data python:examples.study.data:e2e:FOLDER       4,672 records of E2E's development set
    --data python:examples.study.data:choice:FOLDER    public records to choose rates with

FOLDER is that of ``prepare``, with the public tokenizer and the path of the data folder. Public
are the Bible and the part of DART's development set that comes from Wikipedia and WebNLG. E2E's
test references have other meanings than its development set, so none is trained on.

References: Novikova et al., arXiv:1706.09254 (E2E); Nan et al., arXiv:2007.02871 (DART).
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import ByteLevelBPETokenizer, Tokenizer

from examples.train.text import Text, TextRecords, parse_texts, verses

LONGEST = 120
"""The most tokens of a record."""
SLOTS = (
    "name", "eatType", "food", "priceRange", "customer rating", "area", "familyFriendly", "near",
)  # fmt: skip
"""E2E's slots, which its task description publishes."""
PARTS = ("first", "choice", "held-out")
"""Public meanings in turn: to train the public model on, to train on while rates are chosen, and to
choose them by."""


@dataclass(frozen=True)
class PublicTokenizer:
    """Byte pairs learned from public text, then the marks."""

    path: Path

    @cached_property
    def pairs(self) -> Tokenizer:
        """The pairs."""
        return Tokenizer.from_file(str(self.path))

    @property
    def vocabulary(self) -> int:
        """The number of tokens, marks included."""
        return self.pairs.get_vocab_size() + 3

    @property
    def marks(self) -> tuple[int, int, int]:
        """Padding, beginning and end."""
        first = self.pairs.get_vocab_size()
        return first, first + 1, first + 2

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return list(self.pairs.encode(text).ids)

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens without marks."""
        return str(self.pairs.decode(tokens))


def learn_tokenizer(data: Path, out: Path, *, vocabulary: int) -> None:
    """Learn byte pairs from the Bible and the public records; a slot's name is one token."""
    pairs = ByteLevelBPETokenizer()
    pairs.train_from_iterator(
        [*verses(), *(part for text in public_texts(data) for part in text)],
        vocab_size=vocabulary,
        show_progress=False,
    )
    pairs.add_tokens([*(f"{slot} : " for slot in SLOTS), " | "])
    pairs.save(str(out))


def public_texts(data: Path, *parts: str) -> list[Text]:
    """The texts of some or all parts of DART that are not E2E's; a meaning is in one part."""
    documents: list[Any] = json.loads((data / "dart" / "dev.json").read_text(encoding="utf-8"))
    meanings: dict[str, list[Text]] = defaultdict(list)
    for document in documents:
        others = [item for item in document["annotations"] if item["source"] != "e2e"]
        if others:
            for source, target in parse_texts(document | {"annotations": others}):
                meanings[source].append((source, target))
    return [
        text
        for place, texts in enumerate(meanings.values())
        if not parts or PARTS[place % len(PARTS)] in parts
        for text in texts
    ]


def e2e_texts(data: Path, name: str) -> list[Text]:
    """The texts of a file of E2E."""
    with (data / "e2e" / name).open(encoding="utf-8-sig", newline="") as file:
        return [text for row in csv.DictReader(file) for text in parse_texts(row)]


@dataclass(frozen=True)
class Prepared:
    """A folder with the tokenizer and the public model."""

    folder: Path

    @property
    def data(self) -> Path:
        """The data folder."""
        return Path(json.loads((self.folder / "about.json").read_text())["data"])

    @cached_property
    def tokenizer(self) -> PublicTokenizer:
        """The public tokenizer."""
        return PublicTokenizer(self.folder / "tokenizer.json")

    def records(self, texts: Iterable[Text]) -> TextRecords:
        """The tokens of texts."""
        return TextRecords.of(texts, self.tokenizer, longest=LONGEST)


@lru_cache
def prepared(folder: str) -> Prepared:
    """The folder."""
    return Prepared(Path(folder))


def e2e(folder: str) -> TextRecords:
    """The private records."""
    of = prepared(folder)
    return of.records(e2e_texts(of.data, "devset.csv"))


def choice(folder: str) -> TextRecords:
    """The public records to train on while rates are chosen."""
    of = prepared(folder)
    return of.records(public_texts(of.data, "choice"))
