"""E2E and DART as their authors publish them, and the paper's model.

    --data python:examples.paper.data:e2e:FOLDER      trainset.csv
    --data python:examples.paper.data:dart:FOLDER     dart-v1.1.1-full-train.json
    --model python:examples.paper.data:gpt2:FOLDER    GPT-2, its two token tables apart

Records are ``source <bos> target <eos>``, cut to 100 tokens (E2E) or 120 (DART). No record is
left out, so that N does not depend on lengths; the paper's N is after a filter that it does not
describe.

Reference: arXiv:2605.12994v1, appendix D.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from affidavit.trainer.adapters import DataAdapter
from affidavit.trainer.sources import Options
from examples.train.gpt2 import LanguageModel
from examples.train.gpt2 import gpt2 as load_gpt2
from examples.train.text import Text, TextRecords, load_tokenizer, parse_texts

LONGEST = {"e2e": 100, "dart": 120}
"""The most tokens of a record."""
FILES = {
    "e2e": {"train": "trainset.csv", "test": "testset_w_refs.csv"},
    "dart": {"train": "dart-v1.1.1-full-train.json", "test": "dart-v1.1.1-full-test.json"},
}
TOKENIZER = load_tokenizer(Options.parse("tokenizer=gpt2", "the paper"))


def texts(row: str, folder: Path, part: str) -> Iterator[Text]:
    """Source and target of every record of a part."""
    path = folder / FILES[row][part]
    if row == "dart":
        documents: list[Any] = json.loads(path.read_text(encoding="utf-8"))
    else:
        with path.open(encoding="utf-8-sig", newline="") as file:
            documents = list(csv.DictReader(file))
    for document in documents:
        yield from parse_texts(document)


def records(row: str, folder: str, part: str = "train") -> TextRecords:
    """The tokens of a part's records."""
    return TextRecords.of(texts(row, Path(folder), part), TOKENIZER, longest=LONGEST[row])


def e2e(folder: str) -> TextRecords:
    """E2E's training records."""
    return records("e2e", folder)


def dart(folder: str) -> TextRecords:
    """DART's training records, one for each text of a set of triples."""
    return records("dart", folder)


def gpt2(argument: str, data: DataAdapter) -> LanguageModel:
    """GPT-2 of ``FOLDER`` or ``CONFIG.json,seed=1``, ``blocks=hidden`` or ``all`` behind it.

    DP-Muon orthogonalises every matrix, as the paper's does, those of the tables too: what is no
    hidden matrix is in the release ``rest``, and not in one whose name begins with ``aux``.
    """
    model = load_gpt2(f"{argument},tie=untied", data)
    names = {"auxiliary": "rest"}
    return replace(model, layout={names.get(of, of): groups for of, groups in model.layout.items()})
