"""Attachments: the noise matrices that a plan names as files beside it.

A plan travels: it is reviewed, sent and certified by others. So a file is named relative to
the plan, below its folder, and with its sha256; what is read is compared with that digest
before anything is made of it. Only commands read files. The service never does.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from affidavit.mechanisms.strategies.contents import (
    LARGEST_FILE,
    NotAStrategyFile,
    digest_of,
    remember,
)
from affidavit.plan.model import Plan
from affidavit.plan.reasons import MalformedPlan, Reason


def attach(plan: Plan, directory: Path) -> None:
    """Read the files that ``plan`` names below ``directory``; raises ``MalformedPlan``."""
    for index, phase in enumerate(plan.phases):
        noise = phase.noise
        if noise.kind != "matrix" or noise.file is None:
            continue
        at_file = plan.pointer(index, "noise", "file")
        content = _read(directory, noise.file, at_file)
        if digest_of(content) != noise.sha256:
            raise MalformedPlan(
                Reason(
                    code="digest_mismatch",
                    pointer=plan.pointer(index, "noise", "sha256"),
                    message=f"{noise.file} has the sha256 {digest_of(content)}.",
                    remedy="Give the file that was meant, or its digest.",
                )
            )
        try:
            remember(content)
        except NotAStrategyFile as error:
            raise _bad(at_file, f"{noise.file} is not a noise matrix: {error}.") from None


def _read(directory: Path, name: str, pointer: str) -> bytes:
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\\" in name or "\x00" in name:
        raise _bad(pointer, "the file is not below the folder of the plan.")
    path = directory / parts
    try:
        if not path.resolve().is_relative_to(directory.resolve()):
            raise _bad(pointer, "the file is not below the folder of the plan.")
        if not path.is_file():
            raise _bad(pointer, f"{name} is not a file beside the plan.")
        with path.open("rb") as stream:
            content = stream.read(LARGEST_FILE + 1)
    except OSError as error:
        raise _bad(pointer, f"{name} cannot be read: {error.strerror or error}.") from None
    if len(content) > LARGEST_FILE:
        raise _bad(pointer, f"{name} is larger than {LARGEST_FILE} bytes.")
    return content


def _bad(pointer: str, message: str) -> MalformedPlan:
    return MalformedPlan(
        Reason(
            code="bad_file",
            pointer=pointer,
            message=message,
            remedy="Name a strategy file (JSON, npy or npz) relative to the plan.",
        )
    )
