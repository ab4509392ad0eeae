"""A plan as it was found: in which file, where in it, and what its text allows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from affidavit.gate.checking import toml
from affidavit.gate.checking.importers import imported
from affidavit.gate.checking.importers.partial import Partial
from affidavit.gate.checking.project import given_for
from affidavit.gate.checking.sections import (
    Section,
    alone,
    loosely_decoded,
    mentions_a_plan,
    sections,
)
from affidavit.gate.reading import read_bytes
from affidavit.mechanisms import attach
from affidavit.plan import (
    Document,
    MalformedPlan,
    Plan,
    Reason,
    Syntax,
    load_json,
    load_yaml,
    locate_in_json,
    located,
    plan_from,
    syntax_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A plan's tree, not validated yet, with the text that it came from.

    ``pointer`` leads to the plan inside the file, "" if it is the whole; ``text`` is as long
    as the file and holds nothing but the plan, or is empty where edits are not possible.
    ``imported`` is the kind of another library's document that it was made from.
    """

    file: str
    pointer: str
    data: Any
    places: Document
    text: str = ""
    syntax: Syntax = "yaml"
    assumed: tuple[str, ...] = field(default=())
    imported: str | None = None

    @property
    def name(self) -> str:
        """The file, with the place of the plan in it where it is not the whole."""
        return f"{self.file}#{self.pointer}" if self.pointer else self.file

    def plan(self) -> Plan:
        """The plan, with its files; raises ``MalformedPlan`` with positions in the file."""
        try:
            found = plan_from(self.data)
            attach(found, Path() if self.file == "-" else Path(self.file).parent)
        except MalformedPlan as error:
            reasons = self.locate(error.reasons)
            if self.imported is not None:
                reasons = tuple(self._asked(reason) for reason in reasons)
            raise MalformedPlan(*reasons) from None
        return found

    def _asked(self, reason: Reason) -> Reason:
        """What another library's document leaves open, with where to say it."""
        if reason.code not in ("missing_field", "incomplete"):
            return reason
        remedy = f'{reason.remedy} Say it in [tool.affidavit.given."{self.file}"].'
        return replace(reason, message=f"{self.imported}: {reason.message}", remedy=remedy)

    @property
    def names_a_file(self) -> bool:
        """Whether the plan takes noise from another file, on which it then depends too."""
        return '"file"' in json.dumps(self.data, default=str)

    def same_in(self, raw: bytes) -> Source | None:
        """The plan at the same place of another text of the file, if there is one."""
        try:
            found = list(_sources(self.file, raw, asked_for=True))
        except MalformedPlan:
            return None
        return next((one for one in found if one.pointer == self.pointer), None)

    def locate(self, reasons: tuple[Reason, ...]) -> tuple[Reason, ...]:
        """``reasons`` with line and column in the file."""
        return located(reasons, self.places)


def sources_of(name: str, *, asked_for: bool) -> Iterator[Source]:
    """The plans in the file ``name``; raises ``MalformedPlan`` where one cannot be read.

    A file that was ``asked_for`` by name holds a plan, or it is malformed; one that was come
    across is left alone unless it looks as if it held one.
    """
    yield from _sources(name, read_bytes(name), asked_for=asked_for)


def _sources(name: str, raw: bytes, *, asked_for: bool) -> Iterator[Source]:
    kind = name.lower()  # the suffix says the kind in any case
    if kind.endswith(".toml"):
        yield from _in_toml(name, raw, asked_for=asked_for)
        return
    if (foreign := imported(kind, raw)) is not None:
        yield _completed(name, foreign)
        return
    if kind.endswith(".py"):
        if asked_for:
            raise _no_plan("this script makes nothing private by Opacus.")
        return
    syntax = syntax_of(kind, raw)
    text = raw.decode("utf-8", errors="replace")
    loosely = loosely_decoded(raw)
    if not asked_for and not mentions_a_plan(loosely):
        return
    found = sections(loosely)
    # What is not plain UTF-8 is left to the strict reader as a whole: its places are others.
    if found is None or (found and loosely != text) or (not found and asked_for):
        found = [Section("", 0, len(text))]
    for section in found:
        yield _read(name, raw, text, syntax, section)


def _read(name: str, raw: bytes, text: str, syntax: Syntax, section: Section) -> Source:
    inside = text if section.pointer == "" else alone(text, section)
    plan = raw if section.pointer == "" else inside.encode()
    if syntax == "yaml":
        document = load_yaml(plan)
        data, places = document.data, document
    else:
        data, places = load_json(plan).data, locate_in_json(plan)
    return Source(
        file=name, pointer=section.pointer, data=data, places=places, text=inside, syntax=syntax
    )


def _in_toml(name: str, raw: bytes, *, asked_for: bool) -> Iterator[Source]:
    document = toml.plan_in(raw)
    if document is not None:
        yield Source(file=name, pointer="/tool/affidavit/plan", data=document.data, places=document)
    elif asked_for:
        raise _no_plan("there is no table [tool.affidavit.plan].")


def _completed(name: str, foreign: Partial) -> Source:
    """What another library wrote, with what is given beside it."""
    places = {(): (1, 1)} | {
        tuple(pointer.split("/")[1:]): (line, 1) for pointer, line in foreign.lines
    }
    return Source(
        file=name,
        pointer="",
        data=foreign.completed(given_for(name), name),
        places=Document(None, places),
        assumed=foreign.assumed,
        imported=foreign.kind,
    )


def _no_plan(message: str) -> MalformedPlan:
    return MalformedPlan(
        Reason(code="no_plan", pointer="", message=message, remedy="Name a file that holds a plan.")
    )
