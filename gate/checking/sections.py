"""Plans inside larger YAML and JSON files, and the plan field's words by which one is known.

What is around a plan is blanked out, character for character, and what is left is read as
strictly as a file of its own: every position that the reader then names is that of the
larger file, which may use anchors, tags and documents of its own around the plan.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class Section:
    """A plan inside a text: where it begins and ends, and the pointer that leads to it."""

    pointer: str
    start: int
    end: int


def mentions_a_plan(text: str) -> bool:
    """Whether ``text`` has enough of a plan's words as keys to be worth reading."""
    return len(FIELDS & set(_KEY.findall(text))) >= ENOUGH


def sections(text: str) -> list[Section] | None:
    """The plans in ``text``, itself (pointer "") or under keys called ``plan``; None if it
    cannot be read even loosely."""
    if len(text) > max(MAX_JSON_BYTES, MAX_YAML_BYTES):
        return None
    try:
        documents = list(YAML(typ="safe", pure=True).compose_all(text))
    except (YAMLError, ValueError, RecursionError):
        return None
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
        keys = {key.value for key, _ in node.value if isinstance(key, ScalarNode)}
        named = bool(path) and path[-1] == "plan"
        if (itself or named) and len(FIELDS & keys) >= ENOUGH:
            yield Section(pointer_to(*path), node.start_mark.index, node.end_mark.index)
            return
        for key, value in node.value:
            if isinstance(key, ScalarNode):
                yield from _under(value, (*path, str(key.value)), itself=False)
    elif isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            yield from _under(item, (*path, str(index)), itself=False)
