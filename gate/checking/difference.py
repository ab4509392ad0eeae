"""Compare a plan with an earlier version: another file, or the same file at a commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

from affidavit.certificate import compare_plans, printable
from affidavit.gate.checking.source import Source
from affidavit.plan import PlanError, plan_from

MAX_VALUE_LENGTH = 200
"""Characters of a changed value."""


class UnreadableBase(Exception):
    """The earlier version cannot be read; the message says why."""


def describe_changes(source: Source, base: str) -> list[str]:
    """Return one line per field changed since ``base``, with ε; raises ``UnreadableBase``."""
    raw = _read_base(source.file, base)
    name = printable(source.name)
    before = None if raw is None else source.find_same(raw)
    if before is None:
        return [f"{name}: not found in {base}."]
    try:
        comparison = compare_plans(plan_from(before.data), plan_from(source.data))
    except PlanError as error:
        return [f"{name}: not compared: {printable(str(error))}"]
    first, second = comparison.first, comparison.second
    before_text = _bound(first.epsilon_text, first.verdict)
    lines = [f"{name}: {before_text} -> {_bound(second.epsilon_text, second.verdict)}"]
    strongest = (comparison.strongest, comparison.strongest_on_noise)
    for effect in sorted(comparison.effects, key=lambda effect: effect not in strongest):
        result, pointer = effect.assessment, effect.change.pointer
        bound = (
            _bound(None, None) if result is None else _bound(result.epsilon_text, result.verdict)
        )
        values = " -> ".join(text or "nothing" for text in effect.change.texts(MAX_VALUE_LENGTH))
        line = source.line_of(pointer)
        place = "" if line is None else f" (line {line})"
        change = f"  {pointer}: {values}{place}"
        lines.append(printable(f"{change}; alone: {effect.reasons_text or bound}"))
    return lines


def _bound(epsilon: str | None, verdict: str | None) -> str:
    return verdict or "no effect" if epsilon is None else f"ε ≤ {epsilon}"


def _read_base(file: str, base: str) -> bytes | None:
    """Read ``file`` at ``base``; None if it did not exist. Raises ``UnreadableBase``."""
    try:
        if Path(base).is_file():
            return Path(base).read_bytes()
    except OSError as error:
        raise UnreadableBase(f"cannot read {base}: {error.strerror}") from None
    if base.startswith("-"):
        raise UnreadableBase(f"{base} is neither a file nor a commit")
    folder = Path(file).resolve().parent
    commit = _git(
        folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{base}^{{commit}}"
    )
    if commit.returncode != 0:
        raise UnreadableBase(f"{base} is neither a file nor a commit of the repository of {file}")
    name = f"{commit.stdout.decode().strip()}:./{Path(file).name}"
    content = _git(folder, "show", "--end-of-options", name)
    return content.stdout if content.returncode == 0 else None


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=False)
    except OSError as error:
        raise UnreadableBase(f"cannot run git: {error.strerror}") from None
