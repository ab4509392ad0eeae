"""The former version of a plan file: in another file, or at a commit of its repository."""

from __future__ import annotations

import subprocess
from pathlib import Path


class NoBase(Exception):
    """The base cannot be read; the message says why."""


def read_base(file: str, base: str) -> bytes | None:
    """The bytes of ``file`` at ``base``; None if it did not exist. Raises ``NoBase``."""
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
    content = _git(folder, "show", "--end-of-options", name)
    return content.stdout if content.returncode == 0 else None


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=False)
    except OSError as error:
        raise NoBase(f"cannot run git: {error.strerror}") from None
