"""Attachments: noise matrices that a plan names as files in its folder.

A plan travels: it is reviewed, sent and certified by others. So a file is named relative to
the plan, below its folder, and with its sha256; what is read is compared with that digest
before anything is made of it. Only commands read files. The service never does.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from affidavit.plan import MalformedPlan, Matrix, Plan, parse_plan, read_limited, syntax_of


def read_plan(path: Path) -> Plan:
    """The plan in ``path`` and the files that it names; raises ``MalformedPlan``, ``OSError``."""
    raw = read_limited(path)
    plan = parse_plan(raw, syntax_of(path.name.lower(), raw))
    load_noise_files(plan, path.parent)
    return plan


def load_noise_files(plan: Plan, directory: Path) -> None:
    """Read the files that ``plan`` names below ``directory``; raises ``MalformedPlan``."""
    for index, phase in enumerate(plan.phases):
        if isinstance(phase.noise, Matrix) and phase.noise.file is not None:
            _attach(plan, index, phase.noise.file, phase.noise.sha256, directory)


def _attach(plan: Plan, index: int, name: str, sha256: str | None, directory: Path) -> None:
    # Most plans name no file, and need not wait for the strategies to load.
    from affidavit.mechanisms.strategies.noise_file_registry import (
        MAX_FILE,
        NotAStrategyFile,
        content_digest,
        remember,
    )

    at_file = plan.pointer(index, "noise", "file")
    content = _read(directory, name, at_file, MAX_FILE)
    if content_digest(content) != sha256:
        raise MalformedPlan.with_reason(
            code="digest_mismatch",
            pointer=plan.pointer(index, "noise", "sha256"),
            message=f"{name} has sha256 {content_digest(content)}.",
            remedy="Give the intended file, or correct its digest.",
        )
    try:
        remember(content)
    except NotAStrategyFile as error:
        raise _bad(at_file, f"{name} is not a noise matrix: {error}.") from None


def _read(directory: Path, name: str, pointer: str, most: int) -> bytes:
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\\" in name or "\x00" in name:
        raise _bad(pointer, "the file is outside the plan's folder.")
    path = directory / parts
    try:
        if not path.resolve().is_relative_to(directory.resolve()):
            raise _bad(pointer, "the file is outside the plan's folder.")
        if not path.is_file():
            raise _bad(pointer, f"file not found beside the plan: {name}.")
        content = read_limited(path, most)
    except (OSError, RuntimeError) as error:  # the latter for a loop of links
        detail = getattr(error, "strerror", None) or error
        raise _bad(pointer, f"{name} cannot be read: {detail}.") from None
    if len(content) > most:
        raise _bad(pointer, f"{name} is larger than {most} bytes.")
    return content


def _bad(pointer: str, message: str) -> MalformedPlan:
    return MalformedPlan.with_reason(
        code="bad_file",
        pointer=pointer,
        message=message,
        remedy="Name a strategy file (JSON, npy or npz) relative to the plan.",
    )
