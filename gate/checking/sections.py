"""Find plans inside larger YAML and JSON files, by the names of their fields.

The text around a plan is replaced by blanks, and the rest is read as strictly as a separate file.
Positions therefore stay those of the larger file, which may use anchors, tags and several
documents around the plan.
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
MIN_FIELDS = 3
"""A mapping with this many of them is taken as a plan, even if it is invalid."""
NAMES = ("plan", "plans")
"""Keys of a plan, a list of plans or a mapping of plans in a larger file."""

_KEY = re.compile(r"""(?:^|[\s{,])["']?([a-z_]+)["']?\s*:""", re.MULTILINE)

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark is a prefix of it
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)


@dataclass(frozen=True, slots=True)
class Section:
    """A plan inside a text: start, end, and JSON pointer."""

    pointer: str
    start: int
    end: int


def decode_leniently(raw: bytes) -> str:
    """The text of ``raw`` in any encoding, to decide whether it contains a plan."""
    for mark, encoding in _MARKS:
        if raw.startswith(mark):
            return raw.decode(encoding, errors="replace")
    # Wide characters without a mark: the field names are ASCII, separated only by NULs.
    return raw.replace(b"\0", b"").decode("utf-8", errors="replace")


def mentions_a_plan(text: str) -> bool:
    """Whether ``text`` has enough plan fields as keys to be worth parsing."""
    return len(FIELDS & set(_KEY.findall(text))) >= MIN_FIELDS


def sections(text: str) -> list[Section] | None:
    """The plans in ``text``: the whole (pointer ""), elements of a list, or values of ``NAMES``.

    None if the text cannot be parsed. If one of several documents is a plan, the result is the
    whole text, which the strict parser then refuses.
    """
    if len(text) > max(MAX_JSON_BYTES, MAX_YAML_BYTES):
        return None
    try:
        documents = list(YAML(typ="safe", pure=True).compose_all(text))
    except (YAMLError, ValueError, RecursionError):
        return None
    if len(documents) > 1 and any(_is_plan(root) for root in documents):
        return [Section("", 0, len(text))]
    result: list[Section] = []
    for index, root in enumerate(documents):
        if root is not None:
            prefix = (str(index),) if len(documents) > 1 else ()
            result += _under(root, prefix, expected=True)
    return result


def isolate(text: str, section: Section) -> str:
    """``text`` with everything but the section replaced by blanks."""
    blank = re.compile(r"[^\n]")
    return (
        blank.sub(" ", text[: section.start])
        + text[section.start : section.end]
        + blank.sub(" ", text[section.end :])
    )


def _under(node: Node, path: tuple[str, ...], *, expected: bool) -> Iterator[Section]:
    """The plans in ``node``; if ``expected`` it may be a plan, a list or a mapping of plans."""
    if expected and _is_plan(node):
        yield Section(pointer_to(*path), node.start_mark.index, node.end_mark.index)
    elif isinstance(node, MappingNode):
        named = bool(path) and expected and path[-1] in NAMES
        for key, value in node.value:
            if isinstance(key, ScalarNode):
                name = str(key.value)
                yield from _under(value, (*path, name), expected=named or name in NAMES)
    elif isinstance(node, SequenceNode):
        for index, element in enumerate(node.value):
            yield from _under(element, (*path, str(index)), expected=expected)


def _is_plan(node: Node | None) -> bool:
    return isinstance(node, MappingNode) and len(FIELDS & _keys(node, set())) >= MIN_FIELDS


def _keys(node: MappingNode, seen: set[int]) -> set[str]:
    """The keys of a mapping, including merged ones (``<<``); visits each node once."""
    if id(node) in seen:
        return set()
    seen.add(id(node))
    keys: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            continue
        keys.add(str(key.value))
        if key.value == "<<":
            merged = value.value if isinstance(value, SequenceNode) else [value]
            keys.update(*(_keys(part, seen) for part in merged if isinstance(part, MappingNode)))
    return keys
