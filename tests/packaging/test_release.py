"""What a release needs beside its code: metadata, a workflow that trusts little, its pages."""

from __future__ import annotations

import re
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.metadata import Metadata
from packaging.version import Version
from ruamel.yaml import YAML

from affidavit import __version__
from tests.packaging.test_ci import valid
from tests.support.building import ROOT

WORKFLOW = ".github/workflows/release.yml"


@pytest.fixture(scope="module")
def metadata(wheel_of_the_tree: Path) -> Metadata:
    """What the wheel says of itself, each field checked as an index checks it."""
    with zipfile.ZipFile(wheel_of_the_tree) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return Metadata.from_email(wheel.read(name), validate=True)


def test_the_metadata_says_what_it_is(metadata: Metadata) -> None:
    assert metadata.version == Version(__version__)
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.description_content_type == "text/markdown"
    assert metadata.summary
    assert metadata.classifiers
    assert metadata.requires_python is not None
    stated = [line.rpartition(":: ")[2] for line in metadata.classifiers if ":: 3." in line]
    assert stated
    assert all(metadata.requires_python.contains(version) for version in stated)


def test_the_description_is_the_readme_with_links_that_an_index_can_follow(
    metadata: Metadata,
) -> None:
    described, readme = metadata.description or "", (ROOT / "README.md").read_text()
    links = re.compile(r"\[([^]]+)\]\(([^)]+)\)")
    targets = [target for _, target in links.findall(described)]
    assert len(targets) > 3
    assert [target for target in targets if not target.startswith("https://")] == []
    assert links.sub(r"\1", described) == links.sub(r"\1", readme)


def test_every_extra_of_the_project_is_one_of_the_wheel(metadata: Metadata) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(metadata.provides_extra or ()) == set(project["optional-dependencies"])


def test_the_supported_version_is_this_one() -> None:
    supported = re.findall(r"^\| ([\d.]+) \| yes \|$", (ROOT / "SECURITY.md").read_text(), re.M)
    assert supported == [".".join(__version__.split(".")[:2])]


def jobs() -> dict[str, Any]:
    stored: dict[str, Any] = YAML(typ="safe").load(ROOT / WORKFLOW)
    assert stored["permissions"] == {"contents": "read"}
    return stored["jobs"]


def test_the_workflow_runs_only_what_is_pinned() -> None:
    valid("vendor.github-workflows", WORKFLOW)
    used = [step["uses"] for job in jobs().values() for step in job["steps"] if "uses" in step]
    assert len(used) > 5
    assert not [name for name in used if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", name)]
    scripts = [step["run"] for job in jobs().values() for step in job["steps"] if "run" in step]
    assert not [text for text in scripts if "${{" in text]


def test_only_what_uploads_may_write_and_it_runs_nothing_of_the_repository() -> None:
    """The job that PyPI trusts holds no secret, and neither checks out nor runs a script."""
    stored = jobs()
    assert "permissions" not in stored["build"]
    upload = stored["pypi"]
    assert upload["permissions"] == {"id-token": "write"}
    assert upload["environment"] == "pypi"
    assert all("run" not in step for step in upload["steps"])
    assert not [step for step in upload["steps"] if "actions/checkout" in step["uses"]]
    assert "secrets" not in str(upload)
    assert all(job["needs"] for name, job in stored.items() if name != "build")
