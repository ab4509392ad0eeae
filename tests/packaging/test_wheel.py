"""The wheel has one top-level name and all that runs, and nothing that only tests."""

from __future__ import annotations

import json
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from affidavit import __version__
from tests.packaging.conftest import Installed

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wheel(wheel_of_the_tree: Path) -> zipfile.Path:
    """The wheel, to look into."""
    return zipfile.Path(wheel_of_the_tree)


def names(wheel: zipfile.Path) -> set[str]:
    """Every file of the wheel."""
    return set(wheel.root.namelist())


def test_there_is_one_top_level_name(wheel: zipfile.Path) -> None:
    tops = {name.split("/")[0] for name in names(wheel)}
    assert {top for top in tops if not top.endswith((".dist-info", ".data"))} == {"affidavit"}
    assert len(tops) == 3


def test_the_pages_that_messages_name_travel_with_it(wheel: zipfile.Path) -> None:
    """Below ``share/doc/affidavit``, with the example plans and the schema of plans."""
    shared = {name.partition("/share/doc/affidavit/")[2] for name in names(wheel)}
    rooms = ("plan", "mechanisms", "accountants", "certificate", "service", "gate", "worker")
    texts = [path.read_text() for room in rooms for path in (ROOT / room).rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"docs/[a-z/-]+\.md", text)}
    assert len(named) > 10
    assert named <= shared
    for folder in ("examples", "examples/policies"):
        assert {f"{folder}/{path.name}" for path in (ROOT / folder).glob("*.yaml")} <= shared
    schema = next(name for name in names(wheel) if name.endswith("/plan.schema.json"))
    assert json.loads(wheel.root.read(schema))["$id"].endswith("/plan-v1.json")


def test_the_recipe_of_conda_needs_what_the_wheel_needs() -> None:
    recipe = YAML(typ="safe").load(ROOT / "deploy/conda/recipe.yaml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = {line.replace(" ", "") for line in recipe["requirements"]["run"]}
    bounds = {",".join(sorted(line.split(","), reverse=True)) for line in project["dependencies"]}
    assert stated - {f"python{project['requires-python']}"} == bounds
    assert recipe["context"]["version"] == __version__
    (entry,) = recipe["build"]["python"]["entry_points"]
    assert dict([entry.split(" = ")]) == project["scripts"]


def test_every_file_of_every_room_is_in_it(wheel: zipfile.Path) -> None:
    """Modules, and what they read when they run."""
    rooms = [path for path in (ROOT / "src" / "affidavit").iterdir() if path.is_symlink()]
    expected = {
        "affidavit/" + (Path(room.name) / path.relative_to(room.resolve())).as_posix()
        for room in rooms
        for path in room.resolve().rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len(expected) > 50
    assert expected <= names(wheel)


def test_types_and_migrations_travel_with_it(wheel: zipfile.Path) -> None:
    result = names(wheel)
    assert "affidavit/py.typed" in result
    assert "affidavit/migrations/script.py.mako" in result
    assert "affidavit/plan/codes.json" in result
    assert "affidavit/__init__.pyi" in result
    versions = {path.name for path in (ROOT / "migrations" / "versions").glob("0*.py")}
    assert versions
    assert {f"affidavit/migrations/versions/{name}" for name in versions} <= result


def test_no_test_travels_with_it(wheel: zipfile.Path) -> None:
    for name in names(wheel):
        parts = name.split("/")
        assert not {"tests", "conftest.py", "bench"} & set(parts), name
        assert not parts[-1].startswith("test_"), name


def test_the_command_line_is_declared(wheel: zipfile.Path) -> None:
    (points,) = (name for name in names(wheel) if name.endswith("entry_points.txt"))
    assert "affidavit = affidavit.gate.entry:main" in wheel.root.read(points).decode()


def test_one_install_brings_the_commands(installed: Installed) -> None:
    assert installed("--version").stdout.strip() == __version__
    assert installed("--help").returncode == 0
    weak = str(ROOT / "examples/e2e-dp-muon-published.yaml")
    assert installed("diagnose", weak, "--claimed-epsilon", "7.9852").returncode == 1


@pytest.mark.parametrize(
    ("command", "extra"),
    [("train --plan p.yaml", "trainer"), ("worker --once", "trainer"), ("tokens list", "service")],
)
def test_a_command_without_its_extra_names_the_line_that_installs_it(
    installed: Installed, command: str, extra: str
) -> None:
    result = installed(*command.split())
    assert result.returncode == 2
    assert f"pip install 'affidavit[{extra}]'" in result.stderr
