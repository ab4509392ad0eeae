"""Pages use the words of the glossary and of the API: in marks, labels, headings and buttons."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from affidavit.gate.cli import COMMANDS
from affidavit.service.web.pages.plan_form import RELEASE, SECTIONS
from affidavit.service.web.pages.runs import EVENTS, RUN_FIELDS
from affidavit.service.web.pages.templating import GROUPS
from affidavit.service.web.pages.text import TONES, words

TEMPLATES = sorted(Path("service/web/pages/templates").glob("*.html"))
GLOSSARY = Path("docs/reference/glossary.md").read_text(encoding="utf-8")
COLOURS = {"good", "warn", "bad", "plain"}
EVERYDAY = re.findall(
    r"\w+",
    """
    activate administrators all another back claim clear choose continue correlated create csv
    current decline delete digits download draft filters finished first fix happened hash json
    label last latest more new next none notebook options other overview page person protects
    public quarter question revoke root run save say script search set sign source started stop
    subject table this topic until up use utc waiting weeks yaml yet your
    """,
)
"""Words that name nothing of the product."""


@cache
def glossary() -> set[str]:
    """The terms, in lower case."""
    rows = re.findall(r"^\| ([^|]+) \|", GLOSSARY, re.MULTILINE)
    return {term.strip().lower() for row in rows for term in row.split(",")}


@cache
def api() -> set[str]:
    """The names of fields and the values of enumerations."""
    result: set[str] = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            result.update(node.get("properties", ()))
            result.update(str(value) for value in (*node.get("enum", ()), node.get("const")))
        for child in node.values() if isinstance(node, dict) else node:
            if isinstance(child, dict | list):
                walk(child)

    walk(json.loads(Path("docs/openapi.json").read_text(encoding="utf-8")))
    return result


def marks() -> Iterator[str]:
    """The words of every badge that a template writes itself."""
    for template in TEMPLATES:
        text = template.read_text(encoding="utf-8")
        for match in re.finditer(r"badge\(", text):
            depth, end = 1, match.end()
            while depth:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            for compared, string, key in re.findall(
                r'(== )?"([^"]*)"(:?)', text[match.end() : end]
            ):
                if not compared and not key and string.strip(", +"):
                    yield string
        yield from re.findall(r'\("(?:good|warn|bad|plain)", "([^"]+)"\)', text)


def labels() -> Iterator[str]:
    """Headings of pages and columns, names of facts and fields, and what buttons say."""
    for template in TEMPLATES:
        text = re.sub(r"{#.*?#}", "", template.read_text(encoding="utf-8"), flags=re.DOTALL)
        for element in re.findall(
            r"<(?:th scope=.col|dt|h[123]|legend|label|summary|button)\b[^>]*>(.*?)</",
            text,
            re.DOTALL,
        ):
            yield re.sub(r"{%.*?%}|{{.*?}}|<[^>]*>", " ", element)
        for columns in re.findall(r"parts\.table\([^[]*\[(.*?)\]", text):
            yield from re.findall(r'"([^"]*)"', columns)
    yield from (place.label for group in GROUPS for place in group.places)
    yield from (field.label for section in SECTIONS for field in section.fields)
    yield from (field.label for field in RELEASE)
    yield from (label for _, label, _ in RUN_FIELDS)


def stem(word: str) -> str:
    """A word without its ending: the plural and the verb of one noun are one word."""
    return re.sub(r"(ie|ied|ing|ed|er|e|y)$", "", word.removesuffix("s"))


def test_marks_are_states_of_the_api_or_in_the_glossary() -> None:
    known = glossary() | {words(code) for code in api()} | {words(code) for code in EVENTS}
    assert not {words(state) for state in TONES} - known
    # A number and a word, such as "3 waiting", is the word; a sentence is no mark.
    shown = {re.sub(r"^%d %% ", "", mark.strip()).lower() for mark in marks() if mark[-1:] != "."}
    assert not {mark for mark in shown - COLOURS if words(mark) not in known}


def test_labels_use_words_of_the_glossary_and_of_the_api() -> None:
    text = f"{GLOSSARY} {' '.join(api())}".lower()
    known = {stem(word) for word in (*re.findall(r"[^\W\d_]+", text), *EVERYDAY)}
    shown = {word for label in labels() for word in re.findall(r"[^\W\d_]+", label.lower())}
    assert not {word for word in shown if stem(word) not in known and len(word) > 1}


def test_every_command_that_a_page_names_exists() -> None:
    named = {
        name
        for template in TEMPLATES
        for name in re.findall(
            r"(?:<code>|\(\"|;)affidavit ([a-z-]+)", template.read_text(encoding="utf-8")
        )
    }
    assert len(named) > 4
    assert not named - set(COMMANDS)
