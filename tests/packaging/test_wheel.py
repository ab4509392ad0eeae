"""The wheel has one top-level name and all that runs, and nothing that only tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from ruamel.yaml import YAML

from affidavit import __version__

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


def test_every_module_of_every_room_is_in_it(wheel: zipfile.Path) -> None:
    rooms = [path for path in (ROOT / "src" / "affidavit").iterdir() if path.is_symlink()]
    expected = {
        "affidavit/" + (Path(room.name) / path.relative_to(room.resolve())).as_posix()
        for room in rooms
        for path in room.resolve().rglob("*.py")
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


def required(line: str) -> Iterator[str]:
    """The distributions that ``pip install`` of a requirement brings along."""
    todo, found = [Requirement(line)], set()
    while todo:
        requirement = todo.pop()
        if requirement.name in found:
            continue
        found.add(requirement.name)
        yield requirement.name
        for below in map(Requirement, distribution(requirement.name).requires or []):
            extras = requirement.extras or {""}
            if not below.marker or any(below.marker.evaluate({"extra": each}) for each in extras):
                todo.append(below)


@pytest.fixture(scope="module")
def installed(
    wheel_of_the_tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``affidavit`` in an environment with the wheel and what it requires, and nothing else."""
    where = tmp_path_factory.mktemp("installed")
    venv.create(where / "venv", symlinks=True)
    (site,) = (where / "venv/lib").glob("python*/site-packages")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in {name for line in project["dependencies"] for name in required(line)}:
        for file in distribution(name).files or []:
            top = Path(distribution(name).locate_file(file.parts[0]))  # type: ignore[arg-type]
            if file.parts[0] != ".." and not (site / top.name).exists():
                (site / top.name).symlink_to(top)
    python = where / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    pip += ["--no-deps", "--no-index", "--disable-pip-version-check", str(wheel_of_the_tree)]
    subprocess.run(pip, check=True, timeout=300)

    def affidavit(*arguments: str, program: str = "affidavit") -> subprocess.CompletedProcess[str]:
        stored = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        homes = {"AFFIDAVIT_HOME": str(where / "home"), "AFFIDAVIT_CACHE": str(where / "cache")}
        return subprocess.run(
            [str(python.with_name(program)), *arguments],
            cwd=where,
            env={**stored, **homes},
            input="{}\n",
            capture_output=True,
            check=False,
            text=True,
            timeout=300,
        )

    return affidavit


def test_one_install_brings_the_commands(installed: Callable[..., Any]) -> None:
    weak = str(ROOT / "examples/e2e-dp-muon-published.yaml")
    assert installed("--version").stdout.strip() == __version__
    assert installed("--help").returncode == 0
    assert installed("certify", str(ROOT / "examples/e2e-dp-sgd-published.yaml")).returncode == 0
    assert installed("check", weak).returncode == 1
    assert installed("diagnose", weak, "--claimed-epsilon", "7.9852").returncode == 1


def test_the_first_screen_of_the_readme_works(installed: Callable[..., Any]) -> None:
    """Its commands, its lines of Python and its line of a workflow, in order, in one folder."""
    screen = (ROOT / "README.md").read_text().partition("## ")[0]
    shell, code, workflow = re.findall(r"```\w+\n(.*?)```", screen, re.DOTALL)
    install, *commands = [*shell.splitlines(), workflow.partition(" && ")[2].strip()]
    assert install == "pip install affidavit"
    for command in commands:
        program, *words = command.split()
        assert program == "affidavit"
        assert installed(*words).returncode == 0, command
    assert 0 < float(installed("-c", code, program="python").stdout) < 2


@pytest.mark.parametrize(
    ("command", "extra"),
    [("train --plan p.yaml", "trainer"), ("tokens list", "service"), ("batch - --ray auto", "ray")],
)
def test_a_command_without_its_extra_names_the_line_that_installs_it(
    installed: Callable[..., Any], command: str, extra: str
) -> None:
    result = installed(*command.split())
    assert result.returncode == 2
    assert f"pip install 'affidavit[{extra}]'" in result.stderr
