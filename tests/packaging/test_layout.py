"""The rooms stand at the root and are imported as ``affidavit.<room>``, by committed links."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "affidavit"
LINKS = sorted(path.name for path in PACKAGE.iterdir() if path.is_symlink())


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {
    "python-flint": "flint",
    "prv-accountant": "prv_accountant",
    "ruamel.yaml": "ruamel",
    "pyjwt": "jwt",
    "prometheus-client": "prometheus_client",
}
# Packages that another one always brings along.
BROUGHT = {"pydantic": {"pydantic_core"}, "fastapi": {"starlette"}, "jinja2": {"markupsafe"}}
# Modules that another program loads, which is therefore there.
LOADED_BY = {"pytest_plugin.py": {"pytest"}}
ROOMS_OF = {
    None: (
        *("plan", "mechanisms", "accountants", "checker", "importers", "trust", "assessment"),
        *("certificate", "evidence", "guard", "replay", "library", "client", "gate", "worker"),
    ),
    "service": ("service", "migrations"),
}


def installed_with(extra: str | None) -> set[str]:
    """The modules that an extra installs, with what it builds on."""
    names: set[str] = set()
    lines = PROJECT["dependencies"] + (PROJECT["optional-dependencies"][extra] if extra else [])
    for line in lines:
        name = re.split(r"[^A-Za-z0-9._-]", line)[0]
        if name == "affidavit":
            names |= installed_with(line[len("affidavit[") : -1])
        module = MODULES.get(name, name.replace("-", "_"))
        names |= {module} | BROUGHT.get(name, set())
    return names


@pytest.mark.parametrize("extra", ROOMS_OF)
def test_an_extra_installs_what_its_rooms_import_at_once(extra: str | None) -> None:
    """What a function imports when it is called may be an extra of its own."""
    known = installed_with(extra) | set(sys.stdlib_module_names) | {"affidavit"}
    paths = {path for room in ROOMS_OF[extra] for path in (ROOT / room).rglob("*.py")}
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else names
            loader = LOADED_BY.get(path.name, set())
            assert {name.split(".")[0] for name in names} <= known | loader, path


def test_every_extra_that_a_text_names_exists() -> None:
    texts = [*ROOT.glob("docs/**/*.md"), *(p for r in LINKS for p in (ROOT / r).rglob("*.py"))]
    named = {n for path in texts for n in re.findall(r"affidavit\[([a-z0-9]+)\]", path.read_text())}
    assert named
    assert named <= set(PROJECT["optional-dependencies"])


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
