"""From the wheel alone: the pages' commands in their order, in time, and other installers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.packaging.conftest import Installed, linked, project, required
from tests.support.answering import answering
from tests.support.document_blocks import DOCS, ROOT, Block, blocks, commands
from tests.support.free_ports import free_port

FIRST_EPSILON_SECONDS = 60
BLOCKED_SECONDS = 300
KIND = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def seconds_of_children() -> float:
    """Processor time, because a busy machine takes longer for the same."""
    times = os.times()
    return times.children_user + times.children_system


def follow(installed: Installed, page: Path, folder: Path, until: str = "") -> dict[str, float]:
    """Paste the blocks of a page in order; the processor seconds until each command ended.

    Commands of ``pip`` and ``make`` are left out, and so are blocks that need more than the base.
    """
    began, record = seconds_of_children(), dict[str, float]()
    for block in blocks(page):
        if block.language == "yaml" and "releases:" in block.text:
            (folder / "plan.yaml").write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            ran = installed("-c", block.text, program="python", folder=folder)
            assert 0 < float(ran.stdout) < 2, ran.stderr
        elif block.language == "sh" and not needs_more(block):
            for line in commands(block.text):
                if until in record:
                    return record
                if not line.startswith("pip install"):
                    ran = installed("-c", line, program="bash", folder=folder)
                    assert ran.returncode == 0, (line, ran.stdout, ran.stderr)
                    record[line] = seconds_of_children() - began
        elif block.language == "yaml" and " && affidavit " in block.text:
            line = block.text.partition(" && ")[2]
            assert installed("-c", line, program="bash", folder=folder).returncode == 0
    return record


def needs_more(block: Block) -> bool:
    text = block.text
    return any(word in text for word in ("make ", "[service]", "[trainer]", "curl ", "tokens new"))


@pytest.mark.soak  # tests/docs runs the same commands, and test_wheel.py those of the wheel
@pytest.mark.parametrize("page", ["README.md", "docs/tutorials/privacy-officer.md"])
def test_the_blocks_of_a_first_page_work_in_their_order(
    installed: Installed, page: str, tmp_path: Path
) -> None:
    record = follow(installed, ROOT / page, tmp_path)
    assert len(record) > 4


def test_the_engineer_has_a_first_epsilon_in_a_minute(
    installed: Installed, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    answer = "affidavit certify plan.yaml"
    record = follow(installed, DOCS / "tutorials/engineer.md", tmp_path, answer)
    record_property("first_epsilon_seconds", record[answer])
    assert record[answer] < FIRST_EPSILON_SECONDS


@pytest.mark.soak  # tests/docs runs the page, and what is below its commands is in test_wheel.py
def test_a_pull_request_is_blocked_in_five_minutes(
    installed: Installed, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    """The page's first sections, then its change: lower the noise, be blocked, be fixed."""
    began = seconds_of_children()

    def run(line: str) -> subprocess.CompletedProcess[str]:
        return installed("-c", line, program="bash", folder=tmp_path)

    page = blocks(DOCS / "tutorials/ci-owner.md")
    lines = [line for block in page if block.language == "sh" for line in commands(block.text)]
    change = [line for line in lines if "--diff main" in line or "--fix" in line]
    assert len(change) == 2
    for line in lines:
        if line not in change and not line.startswith("pip install"):
            assert run(line).returncode == 0, line
    (tmp_path / "plans").mkdir()
    plan = tmp_path / "plans" / "sgd.yaml"
    shutil.copy(tmp_path / "examples" / "e2e-dp-sgd-published.yaml", plan)
    (configuration,) = (block.text for block in page if block.language == "toml")
    (tmp_path / "pyproject.toml").write_text(configuration)
    git = "git -c user.name=a -c user.email=a@b.c"
    started = run(f"git init -qb main && git add plans pyproject.toml && {git} commit -qm first")
    assert started.returncode == 0, started.stderr
    strong = plan.read_text()
    plan.write_text(re.sub(r"noise_multiplier: [\d.]+", "noise_multiplier: 0.5", strong))
    assert plan.read_text() != strong
    blocked = run(change[0])
    record_property("blocked_seconds", seconds_of_children() - began)
    assert blocked.returncode == 1, blocked.stdout + blocked.stderr
    assert "noise_multiplier" in blocked.stdout + blocked.stderr
    assert seconds_of_children() - began < BLOCKED_SECONDS
    assert run(change[1]).returncode == 0
    assert run("affidavit check").returncode == 0


@pytest.mark.soak
def test_the_service_of_the_readme_answers(installed: Installed, tmp_path: Path) -> None:
    """With its extra in a folder beside, so that the base is not installed twice."""
    extra = tmp_path / "extra"
    extra.mkdir()
    linked(required(project()["service"]), extra)
    more = {"PYTHONPATH": str(extra), "AFFIDAVIT_HOME": str(tmp_path / "home")}
    lines = [
        line
        for block in blocks(ROOT / "README.md")
        if block.language == "sh"
        for line in commands(block.text)
        if line.startswith(("affidavit migrate", "affidavit tokens", "affidavit serve"))
    ]
    serve, others = lines.pop(lines.index("affidavit serve")), lines
    assert len(others) == 2
    for line in others:
        ran = installed(*line.split()[1:], **more)
        assert ran.returncode == 0, (line, ran.stderr)
    port = free_port()
    served = subprocess.Popen(
        [installed.programs / "affidavit", *serve.split()[1:], "--port", str(port)],
        cwd=tmp_path,
        env={**installed.variables, **more},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert answering(f"http://127.0.0.1:{port}/readyz").status_code == 200
    finally:
        served.terminate()
        served.wait(timeout=300)


@pytest.fixture(scope="module")
def index(
    installed: Installed, wheel_of_the_tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder of wheels for resolvers: ours, and for each package it needs one without modules.

    These have the names, versions and requirements of what is installed here; one of them adds
    the path of the session's environment, where the modules are.
    """
    where = tmp_path_factory.mktemp("index")
    shutil.copy(wheel_of_the_tree, where)
    for number, (name, needs) in enumerate(required(project()[""]).items()):
        version = distribution(name).version
        stem = f"{name.replace('-', '_').replace('.', '_').lower()}-{version}"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        metadata += "".join(f"Requires-Dist: {need.name}{need.specifier}\n" for need in needs)
        files = {
            f"{stem}.dist-info/METADATA": metadata,
            f"{stem}.dist-info/WHEEL": KIND,
        }
        if not number:
            files["modules.pth"] = f"{installed.site}\n"
        listed = [*files, f"{stem}.dist-info/RECORD"]
        files[listed[-1]] = "".join(f"{file},,\n" for file in listed)
        with zipfile.ZipFile(where / f"{stem}-py3-none-any.whl", "w") as wheel:
            for file, text in files.items():
                wheel.writestr(file, text)
    return where


def uv(installed: Installed, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``uv`` of the developers' environment, with homes of its own and no network."""
    stores = {name: str(folder / name) for name in ("UV_CACHE_DIR", "UV_TOOL_DIR")}
    return installed(
        *words,
        program=str(Path(sys.executable).with_name("uv")),
        folder=folder,
        UV_OFFLINE="1",
        UV_PYTHON=sys.executable,
        **stores,
    )


@pytest.mark.soak
def test_uvx_runs_the_command(installed: Installed, index: Path, tmp_path: Path) -> None:
    plan = str(ROOT / "examples/e2e-dp-sgd-published.yaml")
    options = ["--no-index", "--find-links", str(index)]
    ran = uv(installed, tmp_path, "tool", "run", *options, "affidavit", "check", plan)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.soak
def test_uv_add_brings_the_command(installed: Installed, index: Path, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "0"\nrequires-python = ">=3.11"\n'
    )
    options = ["--no-index", "--find-links", str(index)]
    added = uv(installed, tmp_path, "add", *options, "affidavit")
    assert added.returncode == 0, added.stderr
    plan = str(ROOT / "examples/e2e-dp-sgd-published.yaml")
    ran = uv(installed, tmp_path, "run", "--no-sync", "affidavit", "certify", plan)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.soak
def test_pip_resolves_what_the_wheel_declares(index: Path, tmp_path: Path) -> None:
    """As pipx does for its one environment of a command."""
    into = tmp_path / "site"
    options = ["--quiet", "--no-index", "--find-links", str(index), "--target", str(into)]
    command = [sys.executable, "-m", "pip", "install", *options, "affidavit"]
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    brought = {path.name.partition("-")[0].lower() for path in into.glob("*.dist-info")}
    assert len(brought) == 1 + len(required(project()[""]))
