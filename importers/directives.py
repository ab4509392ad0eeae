"""Read ``# affidavit: key=value`` comments, which state what a script's text does not show.

::

    # affidavit: dataset_size=60000 adjacency=zero_out
    # affidavit: lot_size=256 target_epsilon=8 target_delta=1e-5

A directive that contradicts the script is an error. In a script with several private calls, one at
a call's statement, or right above it, is about that call, and any other about all.
"""

from __future__ import annotations

import io
import json
import re
import tokenize
from collections.abc import Collection
from typing import Any

from affidavit.importers.partial_plan import malformed_plan
from affidavit.plan import MalformedPlan

DIRECTIVE = re.compile(r"#\s*+affidavit:\s*+(.*)")
KEY_VALUE = re.compile(r"(?<![a-z_])([a-z_]++)\s*+=\s*+([^\s,]++)")
DIRECTIVE_FIELDS: dict[str, tuple[str, ...]] = {
    "dataset_size": ("dataset", "size"),
    "unit": ("dataset", "unit"),
    "adjacency": ("adjacency",),
    "lot_size": ("sampling", "lot_size"),
    "scheme": ("sampling", "scheme"),
    "probability": ("sampling", "probability"),
    "max_lot_size": ("sampling", "max_lot_size"),
    "epochs": ("epochs",),
    "steps": ("steps",),
    "noise_multiplier": ("releases", "noise_multiplier"),
    "clip_norm": ("releases", "clip_norm"),
    "target_delta": ("target", "delta"),
    "target_epsilon": ("target", "epsilon"),
    "poisson_sampling": ("poisson_sampling",),
    "drop_last": ("drop_last",),
}
"""The plan field that each key states."""


HARMLESS = "harmless"
"""The key of a comment about a line: why its use of a private object spends nothing."""


def read_directives(source: str, elsewhere: Collection[int] = ()) -> dict[str, Any]:
    """Return the values that comments state, by key; raises ``MalformedPlan``.

    Comments in the lines ``elsewhere`` are about other private calls.
    """
    stated: dict[str, Any] = {}
    for line, comment in _comments(source):
        match = DIRECTIVE.match(comment)
        if match is None or line in elsewhere:
            continue
        pairs = KEY_VALUE.findall(match[1])
        if not pairs or KEY_VALUE.sub("", match[1]).strip(" ,"):
            raise _wrong_directive(line, f"{match[1]!r} is not a list of key=value.")
        for key, text in pairs:
            if key == HARMLESS:
                continue
            if key not in DIRECTIVE_FIELDS:
                raise _wrong_directive(line, f"{key} is an unknown key.")
            value = _value(text)
            if stated.setdefault(key, value) != value:
                raise _wrong_directive(
                    line, f"{key} is stated twice, as {stated[key]} and {value}."
                )
    return stated


def read_harmless_lines(source: str) -> dict[int, str]:
    """Return the lines that a comment says are harmless, each with the reason that it gives.

    A comment of its own is about the line after it.

    >>> read_harmless_lines("f(model)  # affidavit: harmless=prints_shapes")
    {1: 'prints_shapes'}
    >>> read_harmless_lines("f(model)  # noqa  # affidavit: harmless=prints_shapes")
    {1: 'prints_shapes'}
    >>> read_harmless_lines("# f(model)  # affidavit: harmless=prints_shapes")
    {}
    """
    lines = source.splitlines()
    found: dict[int, str] = {}
    for line, comment in _comments(source):
        match = DIRECTIVE.match(comment)
        reasons = [] if match is None else [
            text for key, text in KEY_VALUE.findall(match[1]) if key == HARMLESS
        ]  # fmt: skip
        if reasons:
            alone = lines[line - 1].lstrip().startswith("#")
            found[line + alone] = reasons[0]
    return found


def directive_key(pointer: str) -> str | None:
    """Return the key that states the plan field at ``pointer``, if there is one.

    >>> directive_key("/dataset/size"), directive_key("/dataset"), directive_key("/optimizer")
    ('dataset_size', 'dataset_size', None)
    """
    path = tuple(part for part in pointer.split("/")[1:] if not part.isdigit())
    return next(
        (key for key, field in DIRECTIVE_FIELDS.items() if path and field[: len(path)] == path),
        None,
    )


def _comments(source: str) -> list[tuple[int, str]]:
    if "affidavit:" not in source:
        return []
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):
        return []
    comments = [item for item in tokens if item.type == tokenize.COMMENT]
    return [(item.start[0], _last_part(item)) for item in comments]


def _last_part(comment: tokenize.TokenInfo) -> str:
    """Return what stands behind another comment on a line of code; of a line without, all."""
    text, last = comment.string, comment.string[comment.string.rfind("#") :]
    is_alone = not comment.line[: comment.start[1]].strip()
    return text if is_alone or DIRECTIVE.match(text) or not DIRECTIVE.match(last) else last


def _value(text: str) -> Any:
    try:
        return json.loads(text.replace("_", "") if text[0].isdigit() else text.lower())
    except ValueError:
        return text


def _wrong_directive(line: int, message: str) -> MalformedPlan:
    return malformed_plan(
        "wrong_statement",
        f"# affidavit: {message}",
        f"Use key=value with one of {', '.join(DIRECTIVE_FIELDS)}.",
        line,
    )
