"""What people put into their pipelines: each file is valid, and its steps are run here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.gate.checking.conftest import WEAK_SCRIPT

REPOSITORY = Path(__file__).parents[2]
GOOD = REPOSITORY / "examples/cifar10-wrn16-4-dp-sgd.yaml"
WEAK = REPOSITORY / "examples/e2e-dp-muon-published.yaml"
BIN = Path(sys.executable).parent


def _load(name: str) -> Any:
    return YAML(typ="safe").load((REPOSITORY / name).read_text())


def valid(schema: str, *files: str) -> None:
    """Hold files of the repository to a schema of ``check-jsonschema``."""
    command = [BIN / "check-jsonschema", "--builtin-schema", schema, *files]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)


@pytest.fixture(scope="module", autouse=True)
def _one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Both plans are accounted once, whoever checks them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AFFIDAVIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a plan that is right and one that is not, and the name of neither."""
    folder = tmp_path / "a project"
    (folder / "plans").mkdir(parents=True)
    (folder / "plans/good.yaml").write_text(_of_the_whole(GOOD, noise="1000"))
    (folder / "plans/weak.yaml").write_text(_of_the_whole(WEAK))
    return folder


def _of_the_whole(path: Path, noise: str = r"\g<0>") -> str:
    """The text of a plan that takes no samples, and so is accounted at once."""
    text = re.sub(r"(?<=noise_multiplier: )[\d.]+", noise, path.read_text())
    return re.sub(r"(?<=sampling: ){.*}", "{scheme: full_batch}", text)


def _shell(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """As a runner runs it: the first command that fails ends it."""
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def action(tmp_path: Path, project: Path) -> Any:
    """Runs the action's step that checks, with this environment as the installed one."""
    (tmp_path / "runner/affidavit/bin").mkdir(parents=True)
    (tmp_path / "runner/affidavit/bin/affidavit").symlink_to(BIN / "affidavit")
    (step,) = [item for item in _load("action.yml")["runs"]["steps"] if item["name"] == "Check"]

    def run(**inputs: str) -> subprocess.CompletedProcess[str]:
        provided = {"plans": "", "base": "", "arguments": "", "sarif": "out.sarif", **inputs}
        environment = {name.upper(): value for name, value in provided.items()}
        return _shell(step["run"], project, RUNNER_TEMP=str(tmp_path / "runner"), **environment)

    return run


def test_the_action_annotates_and_reports(action: Any, project: Path) -> None:
    result = action(plans="plans/good.yaml\n\nplans/weak.yaml")
    assert result.returncode == 1
    assert "::error file=plans/weak.yaml," in result.stdout
    assert json.loads((project / "out.sarif").read_text())["runs"][0]["results"]
    assert action(plans="plans/good.yaml").returncode == 0
    assert action().returncode == 2


@pytest.mark.ordinary("not --fix")
@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param("$(touch owned)", marks=pytest.mark.soak),
        "; touch owned",
        pytest.param("`touch owned`", marks=pytest.mark.soak),
        "--fix",
    ],
)
def test_inputs_of_the_action_are_never_code(action: Any, project: Path, hostile: str) -> None:
    before = (project / "plans/weak.yaml").read_bytes()
    for field in ("plans", "base"):
        assert action(**{"plans": "plans/weak.yaml", field: hostile}).returncode != 0
    assert not (project / "owned").exists()
    assert (project / "plans/weak.yaml").read_bytes() == before


def test_the_action_is_one() -> None:
    valid("vendor.github-actions", "action.yml")
    steps = {step["name"]: step for step in _load("action.yml")["runs"]["steps"]}
    assert not [name for name, step in steps.items() if "${{" in step.get("run", "")]
    install = steps["Install"]
    (lock,) = re.findall(r"\$HERE/(\S+)\"", install["run"])
    assert "--hash=sha256:" in (REPOSITORY / lock).read_text()


def test_the_cached_environment_is_that_of_this_python_and_these_files(tmp_path: Path) -> None:
    (step,) = [item for item in _load("action.yml")["runs"]["steps"] if item["name"] == "Key"]
    here, output = tmp_path / "action", tmp_path / "output"
    here.mkdir()
    keys = []
    for content in ("a", "a", "b"):
        (here / "file").write_text(content)
        output.write_text("")
        environment = {"PYTHON": sys.executable, "HERE": str(here), "GITHUB_OUTPUT": str(output)}
        assert _shell(step["run"], tmp_path, **environment).returncode == 0
        keys.append(output.read_text())
    assert re.fullmatch(r"key=affidavit-[0-9a-f]{64}\n", keys[0])
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.soak
def test_the_template_of_gitlab_checks_and_leaves_reports(project: Path) -> None:
    valid("vendor.gitlab-ci", "ci/gitlab.yml")
    job = _load("ci/gitlab.yml")["affidavit"]
    script = "\n".join(line for line in job["script"] if not line.startswith("pip install"))
    path = f"{BIN}:{os.environ['PATH']}"
    result = _shell(script, project, AFFIDAVIT_PLANS="plans/", PATH=path)
    assert result.returncode == 1
    for name in job["artifacts"]["reports"].values():
        assert (project / name).stat().st_size > 0


@pytest.mark.soak
def test_the_hook_of_pre_commit_is_one_and_runs(project: Path) -> None:
    subprocess.run(
        [BIN / "pre-commit", "validate-manifest", REPOSITORY / ".pre-commit-hooks.yaml"],
        check=True,
        capture_output=True,
    )
    (hook,) = _load(".pre-commit-hooks.yaml")
    config = {
        "repos": [
            # What is there is the same, in an environment that need not be built here.
            {
                "repo": "local",
                "hooks": [hook | {"language": "system", "additional_dependencies": []}],
            }
        ]
    }
    with (project / ".pre-commit-config.yaml").open("w") as stream:
        YAML().dump(config, stream)
    (project / "other.yaml").write_text("a: 1\n")
    (project / "train.py").write_text(WEAK_SCRIPT)
    path = f"{BIN}:{os.environ['PATH']}"
    _shell("git init -q . && git add .", project)
    result = _shell("pre-commit run --all-files", project, PATH=path)
    assert result.returncode == 1
    assert "plans/weak.yaml:11:47: under_noised" in result.stdout
    assert "other.yaml" not in result.stdout
    assert "train.py:6:1: under_noised" in result.stdout
    _shell("git rm -qf plans/weak.yaml train.py", project)
    assert _shell("pre-commit run --all-files", project, PATH=path).returncode == 0


def test_the_image_has_the_gate_on_its_path() -> None:
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    assert any("PATH=/opt/affidavit/bin:$PATH" in line for line in lines)
    assert not any(line.startswith("ENTRYPOINT") for line in lines)
