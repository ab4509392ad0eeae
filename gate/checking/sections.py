"""Plans inside larger YAML and JSON files, and the plan field's words by which one is known.

What is around a plan is blanked out, character for character, and what is left is read as
strictly as a file of its own: every position that the reader then names is that of the
larger file, which may use anchors, tags and documents of its own around the plan.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from affidavit.plan import MAX_JSON_BYTES, MAX_YAML_BYTES, pointer_to

FIELDS = frozenset(
    {"adjacency", "dataset", "epochs", "phases", "releases", "sampling", "steps", "target"}
)
"""Fields of a plan that few other documents have."""
ENOUGH = 3
"""A mapping with so many of them is taken for a plan, even if it is not a valid one."""
NAMES = ("plan", "plans")
"""What a plan, a list of plans or a mapping of names to plans stands under in a larger file."""

_KEY = re.compile(r"""(?:^|[\s{,])["']?([a-z_]+)["']?\s*:""", re.MULTILINE)

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),  # it begins with the mark of UTF-16, which comes after it
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)


@dataclass(frozen=True, slots=True)
class Section:
    """A plan inside a text: where it begins and ends, and the pointer that leads to it."""

    pointer: str
    start: int
    end: int


def loosely_decoded(raw: bytes) -> str:
    """The text of ``raw`` for judging whether it holds a plan, whatever it is encoded in."""
    for mark, encoding in _MARKS:
        if raw.startswith(mark):
            return raw.decode(encoding, errors="replace")
    # Wide characters without a mark: a plan's words are ASCII, so that only NULs part them.
    return raw.replace(b"\0", b"").decode("utf-8", errors="replace")


def mentions_a_plan(text: str) -> bool:
    """Whether ``text`` has enough of a plan's words as keys to be worth reading."""
    return len(FIELDS & set(_KEY.findall(text))) >= ENOUGH


def sections(text: str) -> list[Section] | None:
    """The plans in ``text``: itself (pointer ""), items of a list that it is, under ``NAMES``.

    It is None if the text cannot be read even loosely. A plan that is a whole document beside
    others stands for all of the text, which the strict reader then refuses.
    """
    if len(text) > max(MAX_JSON_BYTES, MAX_YAML_BYTES):
        return None
    try:
        documents = list(YAML(typ="safe", pure=True).compose_all(text))
    except (YAMLError, ValueError, RecursionError):
        return None
    if len(documents) > 1 and any(_is_plan(root) for root in documents):
        return [Section("", 0, len(text))]
    found: list[Section] = []
    for index, root in enumerate(documents):
        if root is not None:
            prefix = (str(index),) if len(documents) > 1 else ()
            found += _under(root, prefix, awaited=True)
    return found


def alone(text: str, section: Section) -> str:
    """``text`` with all but the section blanked out, every character in its place."""
    blank = re.compile(r"[^\n]")
    return (
        blank.sub(" ", text[: section.start])
        + text[section.start : section.end]
        + blank.sub(" ", text[section.end :])
    )


def _under(node: Node, path: tuple[str, ...], *, awaited: bool) -> Iterator[Section]:
    """The plans in ``node``, which is one itself, or lists or names some, where ``awaited``."""
    if awaited and _is_plan(node):
        yield Section(pointer_to(*path), node.start_mark.index, node.end_mark.index)
    elif isinstance(node, MappingNode):
        named = bool(path) and awaited and path[-1] in NAMES
        for key, value in node.value:
            if isinstance(key, ScalarNode):
                name = str(key.value)
                yield from _under(value, (*path, name), awaited=named or name in NAMES)
    elif isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            yield from _under(item, (*path, str(index)), awaited=awaited)


def _is_plan(node: Node | None) -> bool:
    return isinstance(node, MappingNode) and len(FIELDS & _keys(node, set())) >= ENOUGH


def _keys(node: MappingNode, seen: set[int]) -> set[str]:
    """The keys of a mapping, with those that it merges (``<<``), each node once."""
    if id(node) in seen:
        return set()
    seen.add(id(node))
    found: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            continue
        found.add(str(key.value))
        if key.value == "<<":
            merged = value.value if isinstance(value, SequenceNode) else [value]
            found.update(*(_keys(item, seen) for item in merged if isinstance(item, MappingNode)))
    return found
