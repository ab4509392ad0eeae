"""Text from JSONL files: one JSON object a line, one record for each text in it.

    --data jsonl:PATH,longest=T[,tokenizer=bytes|words|gpt2][,words=FILE]

Four forms of objects, the same on every line; the first line's keys say which:

``source``, ``target``      as they stand
``text``                    no source; every token counts
``mr``, ``ref``             E2E: ``name[Alimentum], area[city centre]`` becomes
                            ``name : Alimentum | area : city centre``
``tripleset``, and          DART: each triple ``subject : relation : object`` with the relation
``annotations`` or ``text`` in lower case, joined by `` | ``; a record for each annotation's text

The paper gives DART's form; for E2E it says "source", and what is done here is the form of
the files that its lineage of work shares (prefix tuning, arXiv:2101.00190). A line that is no
such object is refused with its number and field.

>>> texts_of({"mr": "name[Alimentum], area[city centre]", "ref": "There it is."})
[('name : Alimentum | area : city centre', 'There it is.')]
>>> texts_of({"tripleset": [["Mars Hill", "JOINED", "2008"]], "annotations": [{"text": "Yes."}]})
[('Mars Hill : joined : 2008', 'Yes.')]

Reference: arXiv:2605.12994v1, appendix D; Novikova et al., arXiv:1706.09254 (E2E); Nan et al.,
arXiv:2007.02871 (DART).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from affidavit.trainer.data.numbers import WrongData
from affidavit.trainer.data.text import Text, TextRecords, tokenizer_of
from affidavit.trainer.options import Options

SLOT = re.compile(r"\s*([^\[\],]+)\[([^\]]*)\]\s*")


class WrongField(ValueError):
    """A field that is missing or of another kind; the caller adds the line."""


def jsonl(argument: str) -> TextRecords:
    """The records of a file. Raises ``WrongOption`` and ``WrongData``."""
    options = Options.of(argument, "--data jsonl")
    path = options.file()
    longest = options.integer("longest", least=2)
    tokenizer = tokenizer_of(options)
    options.require_all_read()
    try:
        return TextRecords.of(read_jsonl(path), tokenizer, longest=longest)
    except OSError as error:
        raise WrongData(f"{path}: cannot be read ({error.strerror}).") from None


def read_jsonl(path: Path) -> Iterator[Text]:
    """Source and target of every record of a file; raises ``WrongData``."""
    form: Form | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            try:
                document = json.loads(line.decode("utf-8-sig"))
                form = form or _form_of(document)
                yield from form(document)
            except WrongField as error:
                raise WrongData(f"{where}: {error}") from None
            except (ValueError, RecursionError) as error:
                raise WrongData(f"{where}: is no JSON ({error}).") from None


def texts_of(document: Any) -> list[Text]:
    """Source and target of every record of one object; raises ``WrongField``."""
    return _form_of(document)(document)


Form = Callable[[Any], list[Text]]


def _form_of(document: Any) -> Form:
    if isinstance(document, dict):
        for key, form in FORMS.items():
            if key in document:
                return form
    raise WrongField(f"is no object with {', '.join(FORMS)}.")


def _pair(document: Any) -> list[Text]:
    return [(_string(document, "source"), _string(document, "target"))]


def _plain(document: Any) -> list[Text]:
    return [("", _string(document, "text"))]


def _e2e(document: Any) -> list[Text]:
    meaning = _string(document, "mr")
    slots, place = [], 0
    while place < len(meaning):
        result = SLOT.match(meaning, place)
        if result is None or (result.end() < len(meaning) and meaning[result.end()] != ","):
            raise WrongField(f"mr: {meaning[place : place + 40]!r} is no slot[value].")
        slots.append(f"{result[1].strip()} : {result[2].strip()}")
        place = result.end() + 1
    if not slots:
        raise WrongField("mr: there is no slot[value].")
    return [(" | ".join(slots), _string(document, "ref"))]


def _dart(document: Any) -> list[Text]:
    triples = document["tripleset"] if isinstance(document, dict) else None
    if not (
        isinstance(triples, list) and triples and all(_is_triple(triple) for triple in triples)
    ):
        raise WrongField("tripleset: is no list of [subject, relation, object].")
    source = " | ".join(f"{a} : {relation.lower()} : {b}" for a, relation, b in triples)
    if "annotations" not in document:
        return [(source, _string(document, "text"))]
    annotations = document["annotations"]
    if not (isinstance(annotations, list) and annotations):
        raise WrongField("annotations: is no list of objects with a text.")
    return [(source, _string(annotation, "text")) for annotation in annotations]


FORMS: dict[str, Form] = {"source": _pair, "mr": _e2e, "tripleset": _dart, "text": _plain}
"""By the key that tells them apart, looked for in this order."""


def _is_triple(found: Any) -> bool:
    return (
        isinstance(found, list) and len(found) == 3 and all(isinstance(item, str) for item in found)
    )


def _string(document: Any, name: str) -> str:
    result = document.get(name) if isinstance(document, dict) else None
    if not isinstance(result, str):
        raise WrongField(f"{name}: is no text.")
    if any("\ud800" <= letter <= "\udfff" for letter in result):
        raise WrongField(f"{name}: has half of a surrogate pair, which no text has.")
    return result
