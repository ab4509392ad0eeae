"""Edits of one value in a YAML or JSON text, leaving every other character as it is."""

from __future__ import annotations

import json
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from affidavit.gate.checking.finding import Edit

Tokens = tuple[str | int, ...]


def edit(text: str, tokens: Tokens, value: Any) -> Edit | None:
    """The edit that gives the field at ``tokens`` this value; None if it is no plain scalar.

    ``text`` is a file with all but the plan blanked out, so that offsets are the file's.
    """
    try:
        node = YAML(typ="safe", pure=True).compose(text)
    except YAMLError:
        return None
    for token in tokens:
        node = _child(node, token)
    if not isinstance(node, ScalarNode) or node.style in ("|", ">"):
        return None
    start, end = node.start_mark, node.end_mark
    return Edit(
        start=start.index,
        end=end.index,
        line=start.line + 1,
        column=start.column + 1,
        end_line=end.line + 1,
        end_column=end.column + 1,
        before=text[start.index : end.index],
        after=json.dumps(value),
    )


def applied(text: str, edits: tuple[Edit, ...]) -> str:
    """``text`` with all ``edits`` made; two of one place must be the same.

    Raises ``ValueError`` where they are not.
    """
    for item in sorted(set(edits), key=lambda one: -one.start):
        if text[item.start : item.end] != item.before:
            raise ValueError("the text is not the one that the edits were made for")
        text = text[: item.start] + item.after + text[item.end :]
    return text


def _child(node: Node | None, token: str | int) -> Node | None:
    if isinstance(node, MappingNode):
        for key, value in node.value:
            if isinstance(key, ScalarNode) and key.value == str(token):
                found: Node = value
                return found
    if isinstance(node, SequenceNode) and int(token) < len(node.value):
        item: Node = node.value[int(token)]
        return item
    return None
