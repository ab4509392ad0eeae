"""A copy of what a distribution is built from, apart from whatever else lies in the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEEDED = ("src", "docs", "examples", "pyproject.toml", "setup.py", "README.md", "LICENSE")


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


def built(tree: Path, into: Path, *kinds: str) -> list[Path]:
    """What ``build`` makes of ``tree``, without network."""
    done = subprocess.run(
        [sys.executable, "-m", "build", *kinds, "--no-isolation", "--outdir", str(into), "."],
        cwd=tree,
        env={**os.environ, "PIP_NO_INDEX": "1", "SOURCE_DATE_EPOCH": "1700000000"},
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(into.iterdir())
