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

from affidavit.plan.loading import MAX_JSON_BYTES, MAX_YAML_BYTES
from affidavit.plan.reasons import pointer_to

FIELDS = frozenset(
    {"adjacency", "dataset", "epochs", "phases", "releases", "sampling", "steps", "target"}
)
"""Fields of a plan that few other documents have."""
ENOUGH = 3
"""A mapping with so many of them is taken for a plan, even if it is not a valid one."""

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
    """The plans in ``text``, itself (pointer "") or under keys called ``plan``.

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
            found += _under(root, prefix, itself=len(documents) == 1)
    return found


def alone(text: str, section: Section) -> str:
    """``text`` with all but the section blanked out, every character in its place."""
    blank = re.compile(r"[^\n]")
    return (
        blank.sub(" ", text[: section.start])
        + text[section.start : section.end]
        + blank.sub(" ", text[section.end :])
    )


def _under(node: Node, path: tuple[str, ...], *, itself: bool) -> Iterator[Section]:
    if isinstance(node, MappingNode):
        named = bool(path) and path[-1] == "plan"
        if (itself or named) and _is_plan(node):
            yield Section(pointer_to(*path), node.start_mark.index, node.end_mark.index)
            return
        for key, value in node.value:
            if isinstance(key, ScalarNode):
                yield from _under(value, (*path, str(key.value)), itself=False)
    elif isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            yield from _under(item, (*path, str(index)), itself=False)


def _is_plan(node: Node | None) -> bool:
    if not isinstance(node, MappingNode):
        return False
    keys = {key.value for key, _ in node.value if isinstance(key, ScalarNode)}
    return len(FIELDS & keys) >= ENOUGH
