"""A reason points at the very line and column of its field, however the text is laid out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affidavit.plan.diagnostics import MalformedPlan, Reason, pointer_to
from affidavit.plan.parse import locate_in_text, parse_plan
from affidavit.plan.strict_parsing import Syntax, load_json, load_yaml

KEYS = st.text(st.sampled_from('abz09/~"\\ é😀:,{[#-'), min_size=1, max_size=6)
TREES = st.recursive(
    st.sampled_from([1, 2.5, True, None, "text", "a: b # c", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


def fields(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every field of a tree and the JSON text that begins where the field does."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield (*path, key), json.dumps(key, ensure_ascii=False)
            yield from fields(value, (*path, key))
    if isinstance(node, list):
        for index, value in enumerate(node):
            yield (*path, str(index)), json.dumps(value, ensure_ascii=False)[:1]
            yield from fields(value, (*path, str(index)))


@given(
    st.dictionaries(KEYS, TREES, max_size=4),
    st.sampled_from([None, 0, 1, 4, "\t"]),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,", " : ")]),
)
def test_every_field_of_a_json_text_is_found_where_it_stands(
    tree: dict[str, Any], indent: int | str | None, separators: tuple[str, str]
) -> None:
    text = json.dumps(tree, indent=indent, separators=separators, ensure_ascii=False)
    positions = load_json(text.encode()).positions
    lines = text.split("\n")
    for path, begins in fields(tree):
        line, column = positions[path]
        assert lines[line - 1][column - 1 :].startswith(begins), path


BLOCK = """\
# a comment first

version: 1
adjacency: add_remove
sampling:
    scheme: poisson
    lot_size: 10
dataset: {size: 100,
          sise: 7}
steps: 5
releases:
  - name: one
    clip_norm: 1
    noise_multiplier: 2
  -
    name: two
    clip_norm: -1
    "noise_multiplier": 2
target: {delta: 0.5}
"""


def test_every_field_of_a_block_yaml_text_is_found_where_it_stands() -> None:
    positions = load_yaml(BLOCK.encode()).positions
    assert positions[()] == (3, 1)
    assert positions["sampling", "lot_size"] == (7, 5)
    assert positions["dataset", "sise"] == (9, 11)
    assert positions["releases", "0"] == (12, 5)
    assert positions["releases", "1"] == (16, 5)
    assert positions["releases", "1", "noise_multiplier"] == (18, 5)


def test_all_reasons_of_a_yaml_text_come_at_once_with_their_places() -> None:
    with pytest.raises(MalformedPlan) as caught:
        parse_plan(BLOCK.encode(), "yaml")
    assert {(reason.pointer, reason.line, reason.column) for reason in caught.value.reasons} == {
        ("/dataset/sise", 9, 11),
        ("/releases/1/clip_norm", 17, 5),
    }


def test_a_missing_field_is_placed_at_what_lacks_it() -> None:
    raw = BLOCK.replace("    lot_size: 10\n", "").replace("sise: 7", "").replace("-1", "1").encode()
    with pytest.raises(MalformedPlan) as caught:
        parse_plan(raw, "yaml")
    (reason,) = caught.value.reasons
    assert (reason.pointer, reason.line, reason.column) == ("/sampling/lot_size", 5, 1)


@pytest.mark.parametrize("syntax", ["json", "yaml"])
def test_a_reason_about_an_accepted_plan_is_placed_in_its_text(
    document: Callable[..., dict[str, Any]], syntax: Syntax
) -> None:
    raw = json.dumps(document(), indent=2).encode()
    reason = Reason(code="any", pointer="/target/epsilon", message="", remedy="")
    (result,) = locate_in_text((reason,), raw, syntax)
    line = raw.decode().split("\n")[(result.line or 0) - 1]
    assert line[(result.column or 0) - 1 :].startswith('"epsilon"')


def test_syntax_errors_are_placed_in_both_syntaxes() -> None:
    for syntax, raw, line, column in (
        ("json", b'{"version": 1,\n "steps" 10}', 2, 10),
        ("yaml", b"version: 1\nsteps: [1\nname: x", 3, 5),
        ("yaml", b"version: 1\n\tsteps: 1", 2, 1),
    ):
        with pytest.raises(MalformedPlan) as caught:
            parse_plan(raw, syntax)  # type: ignore[arg-type]
        (reason,) = caught.value.reasons
        assert (reason.code, reason.line, reason.column) == ("syntax", line, column)


@given(st.lists(st.text(), max_size=4))
def test_a_pointer_keeps_its_tokens_apart(tokens: list[str]) -> None:
    pointer = pointer_to(*tokens)
    read = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
    assert read == tokens
