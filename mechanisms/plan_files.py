"""Plans in files, with the noise files beside them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from affidavit.plan import MalformedPlan, OutsideFolder, Reason, Syntax, read_inside, syntax_of

if TYPE_CHECKING:
    from affidavit.plan import Plan

# The models of a plan are imported where one is read: a folder has many files that are none.

MAX_BYTES = 64 * 1024 * 1024
"""Size limit of a file, because a device may have no end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFile:
    """A plan and its text, in which findings have positions."""

    name: str
    raw: bytes
    syntax: Syntax
    plan: Plan

    def locate(self, reasons: tuple[Reason, ...]) -> tuple[Reason, ...]:
        """Return ``reasons`` with their line and column in this file."""
        from affidavit.plan import locate_in_text

        return locate_in_text(reasons, self.raw, self.syntax)


def read_bytes(name: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None) -> bytes:
    """Read a file or standard input (``-``); with a ``folder``, only a regular file inside of it.

    Raises ``MalformedPlan`` if it cannot be read, or has more than ``MAX_BYTES``.
    """
    try:
        if name == "-":
            raw = sys.stdin.buffer.read(MAX_BYTES + 1)
        elif folder is not None:
            raw = read_inside(name, folder, MAX_BYTES)
        else:
            with Path(name).open("rb") as stream:
                raw = stream.read(MAX_BYTES + 1)
    except OutsideFolder:
        raise MalformedPlan.with_reason(
            code="outside_repository",
            message=f"{name} leads out of the repository, and was not read.",
            remedy="Copy the file into the repository, or name the file itself.",
        ) from None
    except (OSError, ValueError) as error:
        detail = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _unreadable("unreadable", f"cannot read {name}: {detail}.") from None
    if len(raw) > MAX_BYTES:
        raise _unreadable("too_large", f"{name} is larger than {MAX_BYTES >> 20} MiB.")
    return raw


def _unreadable(code: str, message: str) -> MalformedPlan:
    remedy = "Give the path of an existing file."
    return MalformedPlan.with_reason(code=code, message=message, remedy=remedy)


def other_file(name: str, raw: bytes) -> MalformedPlan | None:
    """Return what to say of a file that people take for a plan, or None."""
    if b'"bundleType"' in raw and b'"payload"' in raw:
        return MalformedPlan.with_reason(
            code="no_plan",
            message="this is a certificate bundle, not a plan.",
            remedy=f"Give the plan; `affidavit verify {name} --show` prints the certificate.",
        )
    if name.endswith((".py", ".ipynb")):
        return MalformedPlan.with_reason(
            code="no_plan",
            message="this is a script, not a plan.",
            remedy=f"`affidavit check {name}` reads training scripts, and `affidavit init {name}` "
            "writes a plan from one.",
        )
    return None


def read_plan(name: str) -> PlanFile:
    """Read a plan and the files that it names; raises ``MalformedPlan`` with positions."""
    from affidavit.mechanisms import load_noise_files  # imports NumPy, slowly
    from affidavit.plan import parse_plan

    raw = read_bytes(name)
    syntax = syntax_of(name.lower(), raw)
    try:
        plan = parse_plan(raw, syntax)
    except MalformedPlan as error:
        raise other_file(name, raw) or error from None
    file = PlanFile(name=name, raw=raw, syntax=syntax, plan=plan)
    try:
        load_noise_files(file.plan, Path() if name == "-" else Path(name).parent)
    except MalformedPlan as error:
        raise MalformedPlan(*file.locate(error.reasons)) from None
    return file
