"""A distribution that several tests look at, and an environment with it and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.building import ROOT, built, copy_of_the_tree


@pytest.fixture(scope="session")
def wheel_of_the_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is made from a copy of the tracked files, without an sdist between."""
    where = tmp_path_factory.mktemp("wheel")
    (wheel,) = built(copy_of_the_tree(where / "tree"), where / "out", "--wheel")
    return wheel


def brought(requirement: Requirement) -> list[Requirement]:
    """What a requirement itself requires, here and with its extras."""
    extras = requirement.extras or {""}
    below = map(Requirement, distribution(requirement.name).requires or [])
    return [
        item
        for item in below
        if not item.marker or any(item.marker.evaluate({"extra": extra}) for extra in extras)
    ]


def required(lines: Iterable[str]) -> dict[str, list[Requirement]]:
    """The distributions that ``pip install`` of some requirements brings, and what each needs."""
    todo = [Requirement(line) for line in lines]
    result: dict[str, list[Requirement]] = {}
    while todo:
        requirement = todo.pop()
        below = brought(requirement)
        known = result.setdefault(canonicalize_name(requirement.name), [])
        new = [item for item in below if item.name not in {other.name for other in known}]
        known += new
        todo += new
    return result


def project() -> dict[str, list[str]]:
    """The requirements of the package under ``""``, and those of each extra."""
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": stated["dependencies"], **stated["optional-dependencies"]}


def linked(names: Iterable[str], site: Path) -> None:
    """Put links to the modules of some distributions into ``site``."""
    for dist in map(distribution, names):
        for file in dist.files or []:
            top = Path(dist.locate_file(file.parts[0]))  # type: ignore[arg-type]
            if file.parts[0] != ".." and not (site / top.name).exists():
                (site / top.name).symlink_to(top)


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel and what it requires; call it to run ``affidavit``."""

    where: Path

    @property
    def programs(self) -> Path:
        return self.where / "venv" / "bin"

    @property
    def site(self) -> Path:
        (result,) = (self.where / "venv/lib").glob("python*/site-packages")
        return result

    @property
    def variables(self) -> dict[str, str]:
        """The variables of its processes: nothing of the environment that runs the tests."""
        stored = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        homes = {name: str(self.where / name) for name in ("home", "cache")}
        return {
            **stored,
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "AFFIDAVIT_HOME": homes["home"],
            "AFFIDAVIT_CACHE": homes["cache"],
        }

    def __call__(
        self, *arguments: str, program: str = "affidavit", folder: Path | None = None, **more: str
    ) -> subprocess.CompletedProcess[str]:
        found = self.programs / program
        return subprocess.run(
            [str(found) if found.exists() else program, *arguments],
            cwd=folder or self.where,
            env={**self.variables, **more},
            input="{}\n",
            capture_output=True,
            check=False,
            text=True,
            timeout=300,
        )


@pytest.fixture(scope="session")
def installed(wheel_of_the_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The only installation of the session; the required packages are links to those here."""
    result = Installed(where=tmp_path_factory.mktemp("installed"))
    venv.create(result.where / "venv", symlinks=True)
    linked(required(project()[""]), result.site)
    pip = [sys.executable, "-m", "pip", "--python", str(result.programs / "python"), "install"]
    pip += ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*pip, str(wheel_of_the_tree)], check=True, timeout=300)
    return result
