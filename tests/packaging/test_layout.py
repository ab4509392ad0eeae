"""The rooms stand at the root and are imported as ``affidavit.<room>``, by committed links."""

from __future__ import annotations

import subprocess
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "affidavit"
LINKS = sorted(path.name for path in PACKAGE.iterdir() if path.is_symlink())


def test_there_are_links() -> None:
    assert {"plan", "mechanisms", "accountants", "certificate", "service", "gate"} <= set(LINKS)


@pytest.mark.parametrize("room", LINKS)
def test_a_link_is_relative_and_leads_to_the_room_at_the_root(room: str) -> None:
    assert (PACKAGE / room).readlink() == Path("..") / ".." / room
    assert (ROOT / room / "__init__.py").is_file()
    module = import_module(f"affidavit.{room}")
    assert Path(module.__file__ or "").resolve() == ROOT / room / "__init__.py"


def test_links_are_committed_as_links() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--stage", "src/affidavit"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    modes = {line.split("\t")[1]: line.split()[0] for line in listed.splitlines()}
    for room in LINKS:
        assert modes[f"src/affidavit/{room}"] == "120000", room


def test_every_room_is_banned_by_its_bare_name() -> None:
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text())
    banned = configured["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert set(LINKS) <= banned.keys()


def test_every_package_of_a_room_has_an_init_file() -> None:
    for room in LINKS:
        for path in (ROOT / room).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path
