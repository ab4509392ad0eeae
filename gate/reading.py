"""Plans and bundles as a user names them: a file, or ``-`` for standard input."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from affidavit.mechanisms import attach
from affidavit.plan import MalformedPlan, Plan, Reason, Syntax, locate, parse_plan, syntax_of

MOMENT = 0.05
"""Seconds for which a line is awaited before its reader may do something else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFile:
    """A plan with the text it came from, so that a finding can point into it."""

    name: str
    raw: bytes
    syntax: Syntax
    plan: Plan

    def locate(self, reasons: tuple[Reason, ...]) -> tuple[Reason, ...]:
        """``reasons`` with line and column in this file."""
        return locate(reasons, self.raw, self.syntax)


def read_bytes(name: str) -> bytes:
    """The bytes of a file or of standard input; raises ``MalformedPlan`` if it cannot be read."""
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise MalformedPlan(
            Reason(
                code="unreadable",
                pointer="",
                message=f"{name} cannot be read: {why}.",
                remedy="Give the path of a file that is there.",
            )
        ) from None


def lines_as_they_come(stream: BinaryIO) -> Iterator[bytes | None]:
    """Each line of ``stream`` once it is there, and None for each moment without one."""
    try:
        descriptor = stream.fileno()
    except OSError:  # it is in memory, where nothing is awaited
        yield from stream
        return
    begun = bytearray()
    while True:
        if not select.select([descriptor], [], [], MOMENT)[0]:
            yield None
            continue
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            break
        begun += piece
        if b"\n" in piece:
            *whole, begun = begun.split(b"\n")
            yield from map(bytes, whole)
    if begun:
        yield bytes(begun)


def read_plan(name: str) -> PlanFile:
    """The plan in ``name``, with its files; raises ``MalformedPlan`` with positions."""
    raw = read_bytes(name)
    syntax = syntax_of(name.lower(), raw)
    try:
        plan = parse_plan(raw, syntax)
    except MalformedPlan:
        _require_no_bundle(name, raw)
        raise
    found = PlanFile(name=name, raw=raw, syntax=syntax, plan=plan)
    try:
        attach(found.plan, Path() if name == "-" else Path(name).parent)
    except MalformedPlan as error:
        raise MalformedPlan(*found.locate(error.reasons)) from None
    return found


def _require_no_bundle(name: str, raw: bytes) -> None:
    """Say so where a certificate was named in place of its plan: fields would puzzle."""
    if b'"bundleType"' in raw and b'"payload"' in raw:
        raise MalformedPlan(
            Reason(
                code="no_plan",
                pointer="",
                message="this is a certificate bundle and not a plan.",
                remedy=f"Name the plan; `affidavit verify {name} --show` says what it certifies.",
            )
        )
