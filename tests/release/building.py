"""A copy of what a distribution is built from, apart from whatever else lies in the tree."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEEDED = ("src", "docs", "examples", "pyproject.toml", "README.md", "LICENSE")


def copy_of_the_tree(where: Path) -> Path:
    """``where``, filled with the rooms, the links to them and what the build reads."""
    where.mkdir(parents=True, exist_ok=True)
    rooms = [path.name for path in (ROOT / "src" / "affidavit").iterdir() if path.is_symlink()]
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*NEEDED, *rooms):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, where / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, where / name)
    return where
