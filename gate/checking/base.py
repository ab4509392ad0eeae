"""The former text of a file: of a commit, when the base is one, or of another file."""

from __future__ import annotations

import subprocess
from pathlib import Path


class NoBase(Exception):
    """The base cannot be had; the text says why."""


def former(file: str, base: str) -> bytes | None:
    """The bytes of ``file`` at ``base``; None if it was not there. Raises ``NoBase``."""
    if Path(base).is_file():
        return Path(base).read_bytes()
    if base.startswith("-"):
        raise NoBase(f"{base} is neither a file nor a commit")
    folder = Path(file).resolve().parent
    commit = _git(
        folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{base}^{{commit}}"
    )
    if commit.returncode != 0:
        raise NoBase(f"{base} is neither a file nor a commit of the repository of {file}")
    name = f"{commit.stdout.decode().strip()}:./{Path(file).name}"
    found = _git(folder, "show", "--end-of-options", name)
    return found.stdout if found.returncode == 0 else None


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=False)
    except OSError as error:
        raise NoBase(f"git cannot be run: {error.strerror}") from None
