"""The user's command, and the copy of its folder in which each run works.

>>> parse_command(["python", "-m", "package.train", "--lr", "1"], ".").module
'package.train'
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from affidavit.replay.errors import ReplayRefused

COPIED_BYTES = 1 << 20
"""Larger files are linked, not copied; a run cannot write to them."""
OWN_BYTES = 1 << 28
"""The most in a file that a run wrote before it stopped, which those that continue it may write."""
MOST_FILES = 20_000
LINKED_FOLDERS = {".git", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache"}


@dataclass(frozen=True, kw_only=True)
class Program:
    """A Python script, relative to ``folder``, or a module, with its arguments."""

    interpreter: str
    folder: Path
    script: str | None
    module: str | None
    arguments: tuple[str, ...]

    @property
    def source(self) -> Path:
        """The file that runs."""
        if self.script is not None:
            return self.folder / self.script
        place = self.folder.joinpath(*str(self.module).split("."))
        return place / "__main__.py" if place.is_dir() else place.with_suffix(".py")


def parse_command(command: list[str], folder: str | Path) -> Program:
    """Return the program of ``python train.py ...`` or ``python -m train ...``.

    Raises ``ReplayRefused``.
    """
    remedy = "Say: affidavit replay -- python train.py ..."
    if not command or not Path(command[0]).name.startswith("python"):
        name = command[0] if command else "nothing"
        raise ReplayRefused(
            "command_unknown", f"{name} is not a Python interpreter that replay can start.", remedy
        )
    interpreter = shutil.which(command[0])
    if interpreter is None:
        raise ReplayRefused("command_unknown", f"{command[0]} is not found.", remedy)
    folder, rest = Path(folder).resolve(), command[1:]
    if rest[:1] == ["-m"] and len(rest) > 1:
        return Program(
            interpreter=interpreter,
            folder=folder,
            script=None,
            module=rest[1],
            arguments=tuple(rest[2:]),
        )
    if not rest or rest[0].startswith("-"):
        raise ReplayRefused("command_unknown", "the command names no script.", remedy)
    script = (folder / rest[0]).resolve()
    if not script.is_file() or not script.is_relative_to(folder):
        raise ReplayRefused(
            "command_unknown",
            f"{rest[0]} is no file of {folder}.",
            "Start replay in the folder of the script.",
        )
    return Program(
        interpreter=interpreter,
        folder=folder,
        script=str(script.relative_to(folder)),
        module=None,
        arguments=tuple(rest[1:]),
    )


def copy_folder(folder: Path, target: Path, largest: int = COPIED_BYTES) -> None:
    """Copy ``folder``, with links to environments, and to files of more than ``largest`` bytes.

    Raises ``ReplayRefused``.
    """
    count = 0
    for root, folders, files in os.walk(folder):
        place = target / Path(root).relative_to(folder)
        place.mkdir(parents=True, exist_ok=True)
        for name in [name for name in folders if name in LINKED_FOLDERS]:
            folders.remove(name)
            if name != "__pycache__":
                (place / name).symlink_to(Path(root) / name)
        for name in files:
            count += 1
            source = Path(root) / name
            if count > MOST_FILES:
                raise ReplayRefused(
                    "folder_too_large",
                    f"{folder} has more than {MOST_FILES} files.",
                    "Start replay in a smaller folder, and name the data by an absolute path.",
                )
            most = COPIED_BYTES if source.is_symlink() else largest
            if source.is_file() and source.stat().st_size <= most:
                shutil.copy2(source, place / name)
            else:
                (place / name).symlink_to(source.resolve())


def digest_files(folder: Path) -> dict[str, str]:
    """Return a digest of each file of a copy, without links."""
    digests = {}
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for path in (Path(root) / name for name in files):
            if not path.is_symlink():
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                digests[str(path.relative_to(folder))] = digest
    return digests
