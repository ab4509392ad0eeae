"""A synthetic corpus: restaurants by slots, and a sentence that says them.

    --data generated:SIZE,seed=S[,longest=T]

Every record is made by a program from ``seed`` and its own number; nobody wrote or measured
any of it, and nothing should be concluded from it but that training runs. It has the shape of
E2E (``name : … | food : …`` to one sentence) and a vocabulary of its own that is closed, so
that it needs no download and no tokenizer of others. Two corpora of one seed share their
records up to the smaller size.

>>> data = generated("3,seed=1")
>>> len(data), data.vocabulary < 128
(3, True)
>>> sentence(1, 0)[0]
'name : cobalt | eatType : tearoom | food : lebanese | area : centre | rating : low'
"""

from __future__ import annotations

import hashlib
from itertools import chain
from typing import TypeVar

from affidavit.trainer.data.text import MARKS, Text, TextRecords, Words
from affidavit.trainer.options import Options, WrongOption

Choice = TypeVar("Choice")

SLOTS: dict[str, tuple[str, ...]] = {
    "name": ("alder", "bistro", "cobalt", "dune", "ember", "fable", "grove", "harbour"),
    "eatType": ("pub", "restaurant", "diner", "tearoom"),
    "food": ("french", "thai", "indian", "english", "lebanese", "fish"),
    "priceRange": ("cheap", "moderate", "expensive"),
    "area": ("riverside", "centre", "suburb"),
    "rating": ("low", "average", "high"),
}
ALWAYS = ("name", "eatType", "food")
"""Slots that every record has; each of the others is there in half of them."""

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
    """``SIZE`` records from a seed. Raises ``WrongOption``."""
    options = Options.of(argument, "--data generated")
    if not (options.first.isascii() and options.first.isdigit() and int(options.first) > 0):
        raise WrongOption("--data generated: give how many records, generated:2000,seed=1 say.")
    seed = options.integer("seed", least=0)
    longest = options.integer("longest", least=2, default=64)
    options.require_all_read()
    texts = (sentence(seed, number) for number in range(int(options.first)))
    return TextRecords.of(texts, Words(word_list()), longest=longest)


def sentence(seed: int, number: int) -> Text:
    """Slots and sentence of one record."""
    draw = _Draw(seed, number)
    stated = {
        slot: draw.one_of(values)
        for slot, values in SLOTS.items()
        if slot in ALWAYS or draw.one_of((True, False))
    }
    parts = [draw.one_of(SENTENCES)]
    parts += [draw.one_of(CLAUSES[slot]) for slot in stated if slot not in ALWAYS]
    source = " | ".join(f"{slot} : {value}" for slot, value in stated.items())
    return source, " ".join(parts).format(**stated) + " ."


def word_list() -> list[str]:
    """The marks, then every word that can occur, in alphabetical order."""
    phrases = chain(SENTENCES, *CLAUSES.values(), SLOTS, *SLOTS.values(), (": | .",))
    words = {word for phrase in phrases for word in phrase.split() if not word.startswith("{")}
    return [*MARKS, *sorted(words)]


class _Draw:
    """Choices from the digest of seed and number: the same on every machine."""

    def __init__(self, seed: int, number: int) -> None:
        self._rest = int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest(), "big")

    def one_of(self, choices: tuple[Choice, ...]) -> Choice:
        self._rest, place = divmod(self._rest, len(choices))
        return choices[place]
