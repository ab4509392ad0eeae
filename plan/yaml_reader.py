"""YAML 1.2 without what YAML adds: no anchors, aliases, tags, directives or second documents.

The tree is built from the parser's events, so that nothing is expanded before it is known
to be allowed, and each field's line and column are kept beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

from affidavit.plan.diagnostics import MalformedPlan, Reason
from affidavit.plan.strictness import (
    EMPTY,
    MAX_DEPTH,
    BadNumber,
    Pairs,
    Path,
    Position,
    Refused,
    number,
    too_deep,
)

_NULL = re.compile(r"|~|null|Null|NULL")
_BOOLEAN = re.compile(r"true|True|TRUE|false|False|FALSE")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def _plain_scalar(text: str) -> Any:
    """Resolve an unquoted scalar by the core schema (YAML 1.2.2, section 10.3.2)."""
    if _NULL.fullmatch(text):
        return None
    if _BOOLEAN.fullmatch(text):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return number(text, integral=True)
    if _FLOAT.fullmatch(text):
        return number(text, integral=False)
    if _NOT_FINITE.fullmatch(text):
        return BadNumber("not_finite", f"{text} is not a finite number")
    return text


class YamlReader:
    """Reads one document; ``positions`` grows with what has been read, also when it fails."""

    def __init__(self, text: str) -> None:
        self.positions: dict[Path, Position] = {}
        self._events: Iterator[Event] = YAML(typ="safe", pure=True).parse(text)

    def read(self) -> Any:
        """The tree; raises ``Refused`` or ``MalformedPlan``."""
        try:
            next(self._events)  # the stream begins
            start = next(self._events)
            if isinstance(start, StreamEndEvent):  # comments alone
                raise MalformedPlan(EMPTY)
            assert isinstance(start, DocumentStartEvent)
            if start.version not in (None, (1, 2)) or start.tags:
                self.positions[()] = _mark(start)
                raise Refused(
                    (),
                    "yaml_directive",
                    "the document has a YAML directive.",
                    "Remove the %YAML or %TAG line; plans are YAML 1.2.",
                )
            tree = self._node(next(self._events), ())
            next(self._events)  # the document ends
            if not isinstance(next(self._events), StreamEndEvent):
                raise Refused(
                    (), "syntax", "the text holds more than one document.", "Keep one plan a file."
                )
            return tree
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise MalformedPlan(
                Reason(
                    code="syntax",
                    pointer="",
                    message=f"this is not YAML: {error.problem or error.context}.",
                    remedy="Mend the text at the position given.",
                    line=mark.line + 1 if mark else None,
                    column=mark.column + 1 if mark else None,
                )
            ) from None
        except (YAMLError, StopIteration) as error:
            raise self._not_yaml(str(error).partition("\n")[0] or "it ends too early") from None
        except (ValueError, OverflowError):
            raise self._not_yaml("an escape stands for no character") from None

    def _not_yaml(self, message: str) -> MalformedPlan:
        line, column = max(self.positions.values(), default=(1, 1))
        return MalformedPlan(
            Reason(
                code="syntax",
                pointer="",
                message=f"this is not YAML: {message}.",
                remedy="Mend the text after the position given.",
                line=line,
                column=column,
            )
        )

    def _node(self, event: Event, path: Path) -> Any:
        self.positions.setdefault(path, _mark(event))
        if len(path) > MAX_DEPTH:
            reason = too_deep(path)
            raise Refused(path, reason.code, reason.message, reason.remedy)
        if isinstance(event, AliasEvent) or getattr(event, "anchor", None):
            raise Refused(
                path,
                "yaml_alias",
                "the document uses an anchor or an alias.",
                "Write the value out where it is used.",
            )
        if getattr(event, "ctag", None) is not None or getattr(event, "tag", None) is not None:
            raise Refused(path, "yaml_tag", "the document uses a YAML tag.", "Remove the tag.")
        match event:
            case ScalarEvent():
                quoted = event.style in ("'", '"', "|", ">")
                return event.value if quoted else _plain_scalar(event.value)
            case SequenceStartEvent():
                items = iter(self._until(SequenceEndEvent))
                return [self._node(item, (*path, str(index))) for index, item in enumerate(items)]
            case MappingStartEvent():
                return self._mapping(path)
            case _:
                raise Refused(path, "syntax", "this is not a plan.", "Give a mapping of fields.")

    def _mapping(self, path: Path) -> Pairs:
        pairs = Pairs()
        for key in self._until(MappingEndEvent):
            if not isinstance(key, ScalarEvent) or key.anchor or key.tag is not None:
                raise Refused(
                    path,
                    "syntax",
                    "a key of a mapping is not a plain word.",
                    "Use field names as keys.",
                )
            here = (*path, key.value)
            self.positions[here] = _mark(key)
            pairs.append((key.value, self._node(next(self._events), here)))
        return pairs

    def _until(self, end: type[Event]) -> Iterator[Event]:
        for event in self._events:
            if isinstance(event, end):
                return
            yield event


def _mark(event: Event) -> Position:
    mark = event.start_mark
    return (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
