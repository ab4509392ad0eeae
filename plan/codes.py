"""What a code says: the data behind ``affidavit explain`` and the service's problem types.

``codes.json`` is written from the source by ``make docs``.

>>> explain("yaml_alias")[0].remedy
'Write the value out where it is used.'
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeMeaning:
    """What a code says where ``room`` gives it out; ``…`` stands for what is filled in."""

    room: str
    message: str
    remedy: str


@cache
def code_meanings() -> dict[str, tuple[CodeMeaning, ...]]:
    """Every code, with its meaning in each room that gives it out."""
    text = files("affidavit.plan").joinpath("codes.json").read_text(encoding="utf-8")
    return {
        code: tuple(CodeMeaning(**entry) for entry in entries)
        for code, entries in json.loads(text).items()
    }


def explain(code: str) -> tuple[CodeMeaning, ...]:
    """The meanings of ``code``; empty for a code that does not exist."""
    return code_meanings().get(code, ())
