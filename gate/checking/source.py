"""Read plans from files of any supported format, with positions for findings.

Plans inside larger YAML and JSON files are found by the names of their fields. The text around a
plan is replaced by blanks, so that positions stay those of the file, and the plan is parsed as
strictly as a separate file. The larger file may use anchors, tags and several documents.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from affidavit.gate.checking.discovery import (
    Candidate,
    declared_fields,
    find_toml_plan,
)
from affidavit.mechanisms import read_bytes
from affidavit.plan import (
    MAX_JSON_BYTES,
    MAX_YAML_BYTES,
    Document,
    MalformedPlan,
    Reason,
    Syntax,
    load_json,
    load_yaml,
    pointer_to,
    syntax_of,
)

if TYPE_CHECKING:
    from affidavit.importers import BrokenObligation, OpenUse, PartialPlan, SourceSpan
    from affidavit.plan import Plan

# The models of a plan and the importers are imported where they are used: a cached result needs
# neither.

FIELDS = frozenset(
    {"adjacency", "dataset", "epochs", "phases", "releases", "sampling", "steps", "target"}
)
"""Fields of plans that are rare in other documents."""
MIN_FIELDS = 3
"""A mapping with this many of them counts as a plan, even if it is invalid."""
NAMES = ("plan", "plans")
"""Keys of a plan, a list of plans or a mapping of plans in a larger file."""

_KEY = re.compile(rf"""(?<![^\s{{,])["']?({"|".join(sorted(FIELDS))})["']?\s*+:""")

_NAMED = re.compile(rf""""(?:{"|".join(NAMES)})"|\\u""")
"""A key or a text of ``NAMES`` in JSON, which may have escapes in place of letters."""

_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark is a prefix
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
    """Decode text in any encoding, to decide whether it contains a plan."""
    for mark, encoding in _BYTE_ORDER_MARKS:
        if raw.startswith(mark):
            return raw.decode(encoding, errors="replace")
    # Without a mark, the ASCII names of fields in wide encodings differ only by NULs.
    return raw.translate(None, b"\0").decode("utf-8", errors="replace")


def may_contain_plan(text: str) -> bool:
    """Whether ``text`` has enough names of plan fields as keys."""
    fields = set()
    for match in _KEY.finditer(text) if _mentions_fields(text) else ():
        fields.add(match[1])
        if len(fields) >= MIN_FIELDS:
            return True
    return False


def _mentions_fields(text: str) -> bool:
    return sum(field in text for field in FIELDS) >= MIN_FIELDS


class _Members(list[tuple[str, Any]]):
    """The members of a JSON object."""


def may_have_json_plan(text: str) -> bool:
    """Whether a JSON text has a plan for ``find_sections``, which takes a hundred times as long."""
    if not _mentions_fields(text):
        return False
    try:
        # A number's value, which takes half of the time, does not matter.
        document = json.loads(text, object_pairs_hook=_Members, parse_float=len, parse_int=len)
        if '"<<"' in text or _is_plan_in([document]):
            return True
        # Only below a key of ``NAMES`` is another plan: without any, most of the text is left out.
        return _NAMED.search(text) is not None and _is_plan_below([document], None, expected=True)
    except (ValueError, RecursionError):
        return True


def _is_plan_in(part: list[Any]) -> bool:
    """Whether a JSON object is a plan, or a list has one at any depth."""
    if isinstance(part, _Members):
        return len(FIELDS & {key for key, _ in part}) >= MIN_FIELDS
    return any(_is_plan_in(element) for element in part if isinstance(element, list))


def _is_plan_below(part: list[Any], name: str | None, *, expected: bool) -> bool:
    """Whether ``_find_below`` finds a plan in the value of the key ``name``."""
    if isinstance(part, _Members):
        if expected and _is_plan_in(part):
            return True
        named = expected and name in NAMES
        return any(
            _is_plan_below(value, key, expected=named or key in NAMES)
            for key, value in part
            if isinstance(value, list)
        )
    inner = (element for element in part if isinstance(element, list))
    return any(_is_plan_below(element, None, expected=expected) for element in inner)


def find_sections(text: str) -> list[Section] | None:
    """Find the plans in ``text``: the whole (pointer ""), list elements, or values of ``NAMES``.

    Returns None if the text cannot be parsed. If one of several documents is a plan, the result is
    the whole text, which the strict parser then refuses.
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
            result += _find_below(root, prefix, set(), expected=True)
    return result


def isolate(text: str, section: Section) -> str:
    """Replace what is before the section by blanks, and leave out what is after it."""
    before = text[: section.start].split("\n")
    blank = "\n".join(" " * len(line) for line in before)
    return blank + text[section.start : section.end]


def _find_below(
    node: Node, path: tuple[str, ...], seen: set[tuple[int, bool]], *, expected: bool
) -> Iterator[Section]:
    """Yield the plans in ``node``, which is a plan, a list or a mapping of plans if ``expected``.

    A node with several aliases is visited once.
    """
    if (id(node), expected) in seen:
        return
    seen.add((id(node), expected))
    if expected and _is_plan(node):
        yield Section(pointer_to(*path), node.start_mark.index, node.end_mark.index)
    elif isinstance(node, MappingNode):
        named = bool(path) and expected and path[-1] in NAMES
        for key, value in node.value:
            if isinstance(key, ScalarNode):
                name = str(key.value)
                yield from _find_below(value, (*path, name), seen, expected=named or name in NAMES)
    elif isinstance(node, SequenceNode):
        for index, element in enumerate(node.value):
            yield from _find_below(element, (*path, str(index)), seen, expected=expected)


def _is_plan(node: Node | None) -> bool:
    return isinstance(node, MappingNode) and len(FIELDS & _keys(node, set())) >= MIN_FIELDS


def _keys(node: MappingNode, seen: set[int]) -> set[str]:
    """Return the keys of a mapping, including merged ones (``<<``); visits each node once."""
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


PLACEHOLDERS: dict[str, Any] = {
    "/adjacency": "zero_out",
    "/target": {"epsilon": 1.0, "delta": 1e-9},
    "/target/delta": 1e-9,
    "/dataset": {"size": 10**6},
    "/dataset/size": 10**6,
    "/sampling": {"scheme": "poisson", "lot_size": 1},
    "/sampling/scheme": "poisson",
    "/sampling/lot_size": 1,
    "/steps": 1,
}
"""Values of missing fields, with which the rest of an imported document is validated."""
SOURCE_FIELDS = {"/steps": "/epochs", "/sampling/probability": "/sampling/lot_size"}
"""Fields that a library derives, by the field that its script has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """An unvalidated plan document with the text it came from.

    ``pointer`` is the plan's JSON pointer, "" if it is the whole file. ``whole`` is the text of the
    file, or empty if edits are impossible, and ``section`` the plan in it. ``imported`` is the kind
    of document that the plan was imported from, and ``literals`` are the places of its numbers.
    ``adds_to`` are the lines of other private calls of a script, whose ε adds up with the plan's.
    """

    file: str
    pointer: str
    data: Any
    places: Document
    whole: str = ""
    section: Section | None = None
    syntax: Syntax = "yaml"
    assumed: tuple[str, ...] = field(default=())
    imported: str | None = None
    broken: tuple[BrokenObligation, ...] = ()
    open_uses: tuple[OpenUse, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    literals: tuple[tuple[str, SourceSpan], ...] = ()
    adds_to: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The file, with the pointer if the plan is not the whole file."""
        return f"{self.file}#{self.pointer}" if self.pointer else self.file

    @property
    def text(self) -> str:
        """The file up to the end of the plan, blank before it; empty if edits are impossible."""
        return self.whole if self.section is None else isolate(self.whole, self.section)

    def plan(self) -> Plan:
        """Return the plan with its noise files; raises ``MalformedPlan`` with positions."""
        from affidavit.mechanisms import load_noise_files
        from affidavit.plan import plan_from

        try:
            plan = plan_from(self.data)
            load_noise_files(plan, Path() if self.file == "-" else Path(self.file).parent)
        except MalformedPlan as error:
            reasons = error.reasons
            if self.imported is not None:
                hints = (self._with_hint(reason) for reason in self._add_missing_fields(reasons))
                reasons = (*hints, *self._faults_of_lines())
            raise MalformedPlan(*self.locate(reasons)) from None
        if (
            plan.target is not None
            and plan.target.delta is None
            and self._has_unread_value("/target/delta")
        ):
            # The script has an expression for δ, which could not be read.
            lacking = Reason(
                code="missing_field",
                pointer="/target/delta",
                message="delta is not given.",
                remedy="",
            )
            raise MalformedPlan(*self.locate((self._with_hint(lacking),)))
        return plan

    def _faults_of_lines(self) -> tuple[Reason, ...]:
        """Return the faults that lines of a script show, whatever numbers are missing."""
        adjacency, sampling = self.data.get("adjacency"), self.data.get("sampling", {})
        scheme = sampling.get("scheme") if isinstance(sampling, dict) else None
        shown = (item for item in self.broken if item.line is not None)
        return tuple(item.reason() for item in shown if item.applies(adjacency, {str(scheme)}))

    def _has_unread_value(self, pointer: str) -> bool:
        """Whether a script has an expression for a field that could not be read."""
        return any(name == pointer for name, _ in self.unread)

    def _add_missing_fields(self, reasons: tuple[Reason, ...]) -> tuple[Reason, ...]:
        """Add the missing fields that are reported only after the first ones are set."""
        from affidavit.plan import plan_from

        data, seen = deepcopy(self.data), list(reasons)
        for _ in PLACEHOLDERS:
            lacking = [item.pointer for item in reasons if item.code == "missing_field"]
            if not lacking or len(lacking) < len(reasons):
                break
            for pointer in lacking:
                _set_placeholder(data, pointer)
            try:
                plan_from(data)
            except MalformedPlan as error:
                known = {item.pointer for item in seen}
                reasons = tuple(item for item in error.reasons if item.pointer not in known)
                seen += [item for item in reasons if item.code == "missing_field"]
            else:
                break
        asks_steps = any(item.pointer == "/steps" for item in seen)
        return tuple(
            item for item in seen if not (asks_steps and item.pointer == "/target/epsilon")
        )

    def _with_hint(self, reason: Reason) -> Reason:
        """Add to the reason of a missing field how to set it for an imported document."""
        from affidavit.importers import directive_key

        if reason.code not in ("missing_field", "incomplete"):
            return reason
        remedy = f'{reason.remedy} Set it in [tool.affidavit.given."{self.name}"].'
        why = ""
        if self.file.lower().endswith((".py", ".ipynb")):
            why = "".join(
                f" {text}"
                for pointer, text in self.unread
                if pointer.startswith(reason.pointer) or reason.pointer.startswith(pointer)
            )
            key = (
                "scheme=... lot_size"
                if reason.pointer == "/sampling"
                else directive_key(reason.pointer)
            )
            if key is not None:
                remedy = (
                    f'Add the line "# affidavit: {key}=...", or set it in '
                    + remedy.partition("Set it in ")[2]
                )
        message = f"{self.imported}: {reason.message}{why}"
        return replace(reason, message=message, remedy=remedy)

    @property
    def names_a_file(self) -> bool:
        """Whether the plan names a noise file."""
        return '"file"' in json.dumps(self.data, default=str)

    def find_same(self, raw: bytes) -> Source | None:
        """Return the plan at the same pointer in another text of the file, or None."""
        try:
            sources = list(_parse_sources(self.file, raw, explicit=True))
        except MalformedPlan:
            return None
        return next((source for source in sources if source.pointer == self.pointer), None)

    def line_of(self, pointer: str) -> int | None:
        """Return the line of the field at ``pointer``, of its source field or of its parent."""
        field = SOURCE_FIELDS.get(pointer, pointer) if self.imported else pointer
        if (span := dict(self.literals).get(field)) is not None:
            return span[0]
        (reason,) = self.locate((Reason(code="", pointer=field, message="", remedy=""),))
        return reason.line

    def locate(self, reasons: tuple[Reason, ...]) -> tuple[Reason, ...]:
        """Return ``reasons`` with their line and column in the file."""
        from affidavit.plan import locate_in_document

        return locate_in_document(reasons, self.places)


def read_sources(candidate: Candidate) -> Iterator[Source]:
    """Read the plans in a file; raises ``MalformedPlan`` if one cannot be read.

    An explicit file, named by the user, must contain a plan. Any other file is ignored unless it
    may contain one.
    """
    raw = read_bytes(candidate.file, candidate.root)
    yield from _parse_sources(candidate.file, raw, explicit=candidate.explicit)


def _parse_sources(name: str, raw: bytes, *, explicit: bool) -> Iterator[Source]:
    kind = name.lower()  # suffixes are case-insensitive
    if kind.endswith(".toml"):
        yield from _read_toml(name, raw, explicit=explicit)
        return
    if kind.endswith((".py", ".ipynb", ".json")):
        from affidavit.importers import LIBRARIES, import_file

        folder = None if name == "-" else Path(name).parent
        if (partial := import_file(kind, raw, folder, explicit=explicit)) is not None:
            for part in (partial, *partial.others):
                yield _read_imported(name, raw, part)
            return
    if kind.endswith((".py", ".ipynb")):
        if explicit:
            raise _no_plan_error(
                "no call that Affidavit reads; it reads the private calls of "
                f"{', '.join(LIBRARIES)}."
            )
        return
    syntax = syntax_of(kind, raw)
    text = raw.decode("utf-8", errors="replace")
    lenient = decode_leniently(raw)
    if not explicit and not (
        (syntax == "yaml" or may_have_json_plan(lenient)) and may_contain_plan(lenient)
    ):
        return
    plans = find_sections(lenient)
    # Text that is not plain UTF-8 is parsed as a whole, because its positions would differ.
    if plans is None or (plans and lenient != text) or (not plans and explicit):
        plans = [Section("", 0, len(text))]
    for section in plans:
        yield _read(name, raw, text, syntax, section)


def _read(name: str, raw: bytes, text: str, syntax: Syntax, section: Section) -> Source:
    load = load_yaml if syntax == "yaml" else load_json
    if section.pointer == "":
        document = load(raw)
    else:
        # From the plan's first line on: many plans in a file would each be read up to there.
        start = text.rfind("\n", 0, section.start) + 1
        before = text.count("\n", 0, start)
        inside = " " * (section.start - start) + text[section.start : section.end]
        try:
            document = replace(load(inside.encode()), lines_before=before)
        except MalformedPlan as error:
            raise MalformedPlan(*(_moved(reason, before) for reason in error.reasons)) from None
    return Source(
        file=name,
        pointer=section.pointer,
        data=document.data,
        places=document,
        whole=text,
        section=section if section.pointer else None,
        syntax=syntax,
    )


def _moved(reason: Reason, lines: int) -> Reason:
    return reason if reason.line is None else replace(reason, line=reason.line + lines)


def _read_toml(name: str, raw: bytes, *, explicit: bool) -> Iterator[Source]:
    # Most files are of other tools. A key may have escapes in place of letters.
    if not explicit and not any(part in raw for part in (b"affidavit", rb"\u00", rb"\U0000")):
        return
    document = find_toml_plan(raw)
    if document is not None:
        yield Source(file=name, pointer="/tool/affidavit/plan", data=document.data, places=document)
    elif explicit:
        raise _no_plan_error("the file has no [tool.affidavit.plan] table.")


def _read_imported(name: str, raw: bytes, partial: PartialPlan) -> Source:
    """Complete an imported plan with the fields of pyproject.toml."""
    from affidavit.accountants import opacus_noise_multiplier  # imports the accountants, slowly

    places = {(): (1, 1)} | {
        tuple(pointer.split("/")[1:]): (line, 1) for pointer, line in partial.lines
    }
    whole = f"{name}#{partial.pointer}" if partial.pointer else name
    given_fields = declared_fields(name) | (declared_fields(whole) if partial.pointer else {})
    return Source(
        file=name,
        pointer=partial.pointer,
        data=partial.completed(given_fields, name, opacus_noise_multiplier),
        places=Document(None, places),
        assumed=partial.assumed,
        imported=partial.kind,
        broken=partial.broken,
        open_uses=partial.open_uses,
        unread=partial.unread,
        whole=_editable(raw) if name.lower().endswith(".py") else "",
        literals=partial.literals,
        adds_to=partial.adds_to,
    )


def _editable(raw: bytes) -> str:
    """Return the text of a script, or nothing if it is in an encoding of its own."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return ""


def _set_placeholder(data: dict[str, Any], pointer: str) -> None:
    """Set the field at ``pointer`` to its placeholder, if it has one."""
    if pointer not in PLACEHOLDERS:
        return
    *path, name = pointer.split("/")[1:]
    for part in path:
        data = data.setdefault(part, {})
    data[name] = PLACEHOLDERS[pointer]


def _no_plan_error(message: str) -> MalformedPlan:
    return MalformedPlan.with_reason(
        code="no_plan", message=message, remedy="Give a file that contains a plan."
    )
