"""Fixes for a plan that misses its target: more noise, fewer steps or other lots, each certified.

A fix is proposed only if a copy of the document with exactly its decimals is certified. It edits
single values in YAML or JSON, and numbers in a script, and keeps every other character.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from affidavit.accountants import decimal_up
from affidavit.assessment import Assessment, certify
from affidavit.gate.checking.finding import Edit, Fix
from affidavit.gate.checking.source import Source
from affidavit.plan import Plan, PlanError, plan_from, pointer_to

SIGNIFICANT_DIGITS = 7
TRUNCATION_PERCENTS = (1, 2, 4, 8, 16)
"""Increases of ``max_lot_size`` that are tried as a fix."""

LEAST_SHARE = 4
"""A fix leaves at least one in so many of the steps, or of a lot's records."""

Tokens = tuple[str | int, ...]
Change = tuple[Tokens, Any, Any]
"""Path, value before and value after."""
Mark = tuple[int, int, int]
"""Index, line and column, from 0."""


def find_fixes(source: Source, plan: Plan, assessment: Assessment) -> tuple[Fix, ...]:
    """Return the certified fixes of an under-noised plan."""
    if plan.target.epsilon is None or plan.target.delta is None:
        return ()
    fixes = (_build_fix(source, *proposal) for proposal in _proposals(source, assessment))
    return tuple(fix for fix in fixes if fix is not None)


def _proposals(source: Source, assessment: Assessment) -> Iterator[tuple[str, list[Change]]]:
    if more := list(_more_noise(source, assessment)):
        yield "raise " + ", ".join(_descriptions(source, more)), more
    if len(_phases(source.data)) == 1:
        base = _phases(source.data)[0]
        if larger := assessment.verdict == "unproved" and _larger_truncation(source, base):
            yield "truncate fewer lots: " + ", ".join(_descriptions(source, [larger])), [larger]
        if (fewer := _fewer_steps(source, base)) and _is_similar(fewer):
            yield "or train for fewer steps: " + ", ".join(_descriptions(source, [fewer])), [fewer]
        if (smaller := _smaller_lots(source, base)) and _is_similar(smaller):
            yield "or draw smaller lots: " + ", ".join(_descriptions(source, [smaller])), [smaller]


def _more_noise(source: Source, assessment: Assessment) -> Iterator[Change]:
    paths = [
        (*base, "releases", index)
        for base in _phases(source.data)
        for index in range(len(_value_at(source.data, (*base, "releases"))))
    ]
    if len(paths) != len(assessment.releases):
        return
    for path, noise in zip(paths, assessment.releases, strict=True):
        if noise.required is None:
            continue
        release = _value_at(source.data, path)
        field, needed = "noise_multiplier", noise.required
        if release.get("noise_std") is not None:
            std = noise.required * float(release["clip_norm"])
            field, needed = "noise_std", float(decimal_up(std * (1 + 1e-15), SIGNIFICANT_DIGITS))
        if needed > float(release[field]):
            yield (*path, field), release[field], needed


def _larger_truncation(source: Source, base: Tokens) -> Change | None:
    """Return a larger ``max_lot_size``, because truncation widens the bracket."""
    sampling = _value_at(source.data, (*base, "sampling"))
    cap = sampling.get("max_lot_size")
    if not isinstance(cap, int):
        return None
    document = copy.deepcopy(source.data)
    for percent in TRUNCATION_PERCENTS:
        digits = len(str(cap)) - 3
        larger = round(cap * (100 + percent) // 100, -digits if digits > 0 else 0)
        _value_at(document, (*base, "sampling"))["max_lot_size"] = larger
        answer = _certify_document(document) if larger > cap else None
        if answer is not None and answer.verdict == "certified":
            return ((*base, "sampling", "max_lot_size"), cap, larger)
    return None


def _fewer_steps(source: Source, base: Tokens) -> Change | None:
    phase = _value_at(source.data, base)
    document = copy.deepcopy(source.data)
    unsolved = _value_at(document, base)
    before = unsolved.pop("epochs", None)
    unsolved["steps"] = None
    answer = _certify_document(document)
    if answer is None or not answer.sampling or answer.verdict != "certified":
        return None
    steps = answer.sampling[0].get("steps")
    if not steps:
        return None
    if before is None:
        return ((*base, "steps"), phase.get("steps"), int(steps))
    # Reduce epochs in proportion, rounded down; the result is certified afterwards.
    unchanged = _certify_document(source.data)
    steps_now = None
    if unchanged is not None and unchanged.sampling:
        steps_now = unchanged.sampling[0].get("steps")
    if not steps_now:
        return None
    epochs = math.floor(float(before) * int(steps) / int(steps_now) * 1000) / 1000
    return ((*base, "epochs"), before, epochs) if epochs > 0 else None


def _smaller_lots(source: Source, base: Tokens) -> Change | None:
    sampling = _value_at(source.data, (*base, "sampling"))
    if sampling.get("lot_size") is None or sampling.get("probability") is not None:
        return None
    document = copy.deepcopy(source.data)
    _value_at(document, (*base, "sampling"))["lot_size"] = None
    answer = _certify_document(document)
    if answer is None or not answer.sampling or answer.verdict != "certified":
        return None
    lot = answer.sampling[0].get("lot_size")
    return ((*base, "sampling", "lot_size"), sampling["lot_size"], int(lot)) if lot else None


def _is_similar(change: Change) -> bool:
    """Return whether the run would still be much like the one that was planned."""
    _, before, after = change
    return bool(after * LEAST_SHARE >= before)


def _build_fix(source: Source, description: str, changes: list[Change]) -> Fix | None:
    document = copy.deepcopy(source.data)
    for tokens, _, after in changes:
        _value_at(document, tokens[:-1])[tokens[-1]] = after
    fixed = _certify_document(document)
    if fixed is None or fixed.verdict != "certified" or fixed.epsilon is None:
        return None
    edits = [_edit(source, tokens, after) for tokens, _, after in changes]
    usable = tuple(edit for edit in edits if edit is not None)
    if source.imported is not None and usable:
        changed = source.find_same(apply_edits(source.text, usable).encode())
        if changed is None or changed.data != document:
            usable = ()  # the script derives another value from this number
    return Fix(
        description=f"{description} (ε ≤ {decimal_up(fixed.epsilon.upper, 6)})",
        changes=tuple((pointer_to(*tokens), before, after) for tokens, before, after in changes),
        epsilon=fixed.epsilon.upper,
        edits=usable if len(usable) == len(changes) else (),
    )


def _certify_document(document: Any) -> Assessment | None:
    try:
        return certify(plan_from(document), second_opinion=False)
    except PlanError:
        return None


def _descriptions(source: Source, changes: list[Change]) -> list[str]:
    return [_description(source, tokens, before, after) for tokens, before, after in changes]


def _description(source: Source, tokens: Tokens, before: Any, after: Any) -> str:
    owner = ""
    if "releases" in tokens:
        name = _value_at(source.data, tokens[:-1]).get("name", tokens[-2])
        owner = f" of {name}"
    return f"{tokens[-1]}{owner} from {before} to {after}"


def _phases(data: Any) -> list[Tokens]:
    return [("phases", index) for index in range(len(data["phases"]))] if "phases" in data else [()]


def _value_at(data: Any, tokens: Tokens) -> Any:
    for token in tokens:
        data = data[token]
    return data


def _edit(source: Source, tokens: Tokens, value: Any) -> Edit | None:
    if not source.text:
        return None
    if source.imported is None:
        return build_edit(source.text, tokens, value)
    span = dict(source.literals).get(pointer_to(*tokens))
    if span is None or "\r" in source.text or span[0] != span[2]:
        return None
    line, first, _, last = span
    lines = source.text.split("\n")
    columns = [len(lines[line - 1].encode()[:column].decode()) for column in (first, last)]
    line_start = sum(len(text) + 1 for text in lines[: line - 1])
    start, end = ((line_start + column, line - 1, column) for column in columns)
    return _replacement(source.text, start, end, value)


def _replacement(text: str, start: Mark, end: Mark, value: Any) -> Edit:
    """Return the edit that replaces the text between two marks by ``value``."""
    return Edit(
        start=start[0],
        end=end[0],
        line=start[1] + 1,
        column=start[2] + 1,
        end_line=end[1] + 1,
        end_column=end[2] + 1,
        before=text[start[0] : end[0]],
        after=json.dumps(value),
    )


def build_edit(text: str, tokens: Tokens, value: Any) -> Edit | None:
    """Return the edit that sets the field at ``tokens``; None if it is not a plain scalar.

    ``text`` is the file, blank outside the plan, so that offsets match the file.
    """
    try:
        node = YAML(typ="safe", pure=True).compose(text)
    except YAMLError:
        return None
    for token in tokens:
        node = _child_node(node, token)
    if not isinstance(node, ScalarNode) or node.style in ("|", ">"):
        return None
    first, last = node.start_mark, node.end_mark
    start = (first.index, first.line, first.column)
    return _replacement(text, start, (last.index, last.line, last.column), value)


def apply_edits(text: str, edits: tuple[Edit, ...]) -> str:
    """Apply ``edits`` to ``text``; duplicates count once.

    Raises ``ValueError`` if the edits were made for a different text.
    """
    for edit in sorted(set(edits), key=lambda edit: -edit.start):
        if text[edit.start : edit.end] != edit.before:
            raise ValueError("the edits were made for a different text")
        text = text[: edit.start] + edit.after + text[edit.end :]
    return text


def _child_node(node: Node | None, token: str | int) -> Node | None:
    if isinstance(node, MappingNode):
        for key, value in node.value:
            if isinstance(key, ScalarNode) and key.value == str(token):
                child: Node = value
                return child
    if isinstance(node, SequenceNode) and int(token) < len(node.value):
        element: Node = node.value[int(token)]
        return element
    return None
