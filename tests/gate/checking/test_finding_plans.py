"""Plans in files of their own, in larger ones, in TOML; and what is no plan."""

from __future__ import annotations

import ast
import errno
import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from affidavit.gate.checking.discovery import Candidate, Skipped, candidates
from affidavit.importers.scripts import repository
from affidavit.importers.scripts.syntax import Script
from affidavit.plan import MalformedPlan, digest_of

WEAK = """\
version: 1
dataset: {size: 60000}
adjacency: add_remove
sampling: {scheme: full_batch}
steps: 15
releases:
  - {name: all, clip_norm: 1, noise_multiplier: 0.8123}
target: {epsilon: 1, delta: 1.0e-5}
"""
"""A composition of Gaussians, which is exact: where a plan stands does not depend on its cost."""
TOML = """\
[project]
name = "x"

[tool.affidavit.plan]
version = 1
adjacency = "add_remove"
steps = 15
sampling = {scheme = "full_batch"}

[tool.affidavit.plan.dataset]
size = 60000

[[tool.affidavit.plan.releases]]
name = "all"
clip_norm = 1
noise_multiplier = 0.8123

[tool.affidavit.plan.target]
epsilon = 1.0
delta = 1e-5
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)


def indented(text: str, by: int) -> str:
    return "".join(" " * by + line + "\n" for line in text.splitlines())


@pytest.mark.ordinary(
    "not two.*", "not list.*", "not config.*", "not plans.*", "not plan.*", "not pyproject.*"
)
@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("plan.yaml", WEAK, 7),
        ("config.yaml", "lr: &x 0.1\nother: *x\nplan:\n" + indented(WEAK, 2) + "seed: 3\n", 10),
        ("deep.yaml", "runs:\n- !big\n  plan:\n" + indented(WEAK, 4) + "  a: {b: [1]}\n", 10),
        ("two.yaml", "a: 1\n---\nplan:\n" + indented(WEAK, 1) + "...\n", 10),
        ("list.yaml", "- a: 1\n-\n" + indented(WEAK, 2), 9),
        ("lists.yaml", "a: 1\n---\n- - \n   " + indented(WEAK, 3).lstrip(), 10),
        ("plans.yaml", "a:\n plans:\n - \n" + indented(WEAK, 3), 10),
        ("named.yaml", "plans:\n sgd:\n" + indented(WEAK, 2) + " muon: 3\n", 9),
        ("pyproject.toml", TOML, 16),
    ],
)
def test_a_finding_stands_at_its_line_of_the_whole_file(
    checked: Any, name: str, text: str, line: int
) -> None:
    Path(name).write_text(text)
    for requested in (name, "."):
        code, document = checked(requested)
        assert code == 1
        (plan,) = document["plans"]
        (result,) = plan["findings"]
        assert (result["file"], result["line"], result["rule"]) == (name, line, "under_noised")
        assert "noise_multiplier" in text.splitlines()[result["line"] - 1]


@pytest.mark.parametrize("before", ["plan:\n", "x: {y: 1} # é ε 𝜎\nrun:\n plan:\n"])
def test_a_fix_changes_one_number_of_the_larger_file(run: Any, before: str) -> None:
    text = before + indented(WEAK, 4) + "after: [1, 2] # kept\n"
    Path("config.yaml").write_text(text)
    assert run("check", "config.yaml", "--fix").exit_code == 0
    changed = Path("config.yaml").read_text()
    ((old, new),) = (
        pair
        for pair in zip(text.splitlines(), changed.splitlines(), strict=True)
        if len(set(pair)) > 1
    )
    assert old.split("0.8123")[0] == new[: len(old.split("0.8123")[0])]


@pytest.mark.soak
def test_every_plan_of_one_file_is_fixed_after_earlier_fixes_moved_it(
    run: Any, checked: Any
) -> None:
    """The first fix makes the file longer, and moves what comes after it."""
    plans = "".join(f"run{number}:\n  plan:\n{indented(WEAK, 4)}" for number in range(3))
    Path("config.yaml").write_text(plans)
    assert run("check", "config.yaml", "--fix").exit_code == 0
    assert "0.8123\n" not in Path("config.yaml").read_text()
    assert len(checked("config.yaml")[1]["plans"]) == 3


def test_a_fix_of_json_leaves_its_layout(run: Any) -> None:
    plan = json.dumps(
        {
            "version": 1, "dataset": {"size": 60000}, "adjacency": "add_remove", "steps": 100,
            "sampling": {"scheme": "full_batch"},
            "releases": [{"name": "all", "clip_norm": 2.0, "noise_std": 1.25}],
            "target": {"epsilon": 1, "delta": 1e-5},
        },
        indent=3,
    )  # fmt: skip
    Path("plan.json").write_text(plan)
    assert run("check", "plan.json", "--fix").exit_code == 0
    assert Path("plan.json").read_text().replace("\n", "").count("   ") == plan.count("   ")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "nothing_checked"),
        (("*.nothing",), "matches no file"),
        (("missing.yaml",), "unreadable"),
        ((".",), "no plans found"),
        (("other.yaml",), "missing_field"),
        (("empty.toml",), "no_plan"),
        (("--format", "pdf", "."), "--format pdf"),
        (("--report", "pdf=x", "."), "--report pdf=x"),
        (("--report", "sarif=none/x", "missing.yaml"), "none is not a directory"),
        (("--report", "sarif=/tmp", "missing.yaml"), "it is a directory"),
    ],
)
def test_nothing_checked_is_never_zero(run: Any, arguments: tuple[str, ...], text: str) -> None:
    Path("other.yaml").write_text("services: {}\n")
    Path("empty.toml").write_text("[project]\n")
    result = run("check", *arguments)
    assert result.exit_code == 2
    assert text in result.stderr


def test_the_settings_name_the_plans(checked: Any) -> None:
    Path("plans").mkdir()
    Path("plans/a.yaml").write_text(WEAK)
    Path("pyproject.toml").write_text('[tool.affidavit]\nplans = ["plans/"]\n')
    code, document = checked()
    assert (code, [item["file"] for item in document["plans"]]) == (1, ["plans/a.yaml"])


def test_a_malformed_plan_that_is_come_across_blocks(checked: Any) -> None:
    Path("plan.yaml").write_text(WEAK.replace("adjacency: add_remove\n", "adjacency: sideways\n"))
    code, document = checked(".")
    assert code == 2
    (result,) = document["plans"][0]["findings"]
    assert (result["line"], result["blocks"]) == (3, True)


FINE = WEAK.replace("epsilon: 1,", "epsilon: 40,")
ANCHORED = "a: &a\n" + indented(WEAK, 1)
MANIFESTS = """\
kind: Workflow
spec: {steps: [a], target: x, phases: [b], releases: 3}
---
kind: Service
"""


@pytest.mark.by_turns
@pytest.mark.ordinary("*-bad_text", "*-under_noised", "*-yaml_alias", "bad.YML-*")
@pytest.mark.parametrize(
    ("name", "raw", "rule"),
    [
        ("bad.yaml", (WEAK + "---\n").encode(), "syntax"),
        ("bad.yaml", (WEAK + "---\n{}\n").encode(), "syntax"),
        ("bad.yaml", ("a: 1\n---\n" + WEAK).encode(), "syntax"),
        ("bad.yaml", (WEAK + "---\nplan:\n" + indented(FINE, 2)).encode(), "syntax"),
        ("bad.yaml", ("# σ\n" + WEAK).encode("utf-16"), "bad_text"),
        ("bad.yaml", WEAK.encode("utf-32"), "bad_text"),
        ("bad.yml", WEAK.encode("utf-16-le"), "syntax"),
        ("bad.yml", WEAK.encode("utf-32-be"), "syntax"),
        ("bad.json", ("plan:\n" + indented(WEAK, 2)).encode("utf-16"), "bad_text"),
        ("bad.YAML", WEAK.encode(), "under_noised"),
        ("bad.Toml", TOML.encode(), "under_noised"),
        ("bad.YML", ("{plan: {" + WEAK.replace("\n", ",")).encode(), "syntax"),
        ("bad.yml", f"{ANCHORED}plan: *a\n".encode(), "yaml_alias"),
        ("bad.yml", f"{ANCHORED}plan: {{<<: *a, name: x}}\n".encode(), "yaml_alias"),
        ("bad.yml", f"{ANCHORED}plans: [{{<<: [*a]}}]\n".encode(), "yaml_alias"),
    ],
)
def test_what_blocks_by_its_name_blocks_beside_a_plan_that_is_fine(
    checked: Any, name: str, raw: bytes, rule: str
) -> None:
    Path("fine.yaml").write_text(FINE)
    Path(name).write_bytes(raw)
    code, named = checked(name)
    assert code == (1 if rule == "under_noised" else 2)
    assert [item["rule"] for item in named["plans"][0]["findings"]] == [rule]
    for requested in (".", "*.[yYjT]*"):
        result, document = checked(requested)
        assert result == code
        assert document["plans"][0] == named["plans"][0]
        assert document["plans"][1]["verdict"] == "certified"


@pytest.mark.ordinary("*-utf-16-be", "services*-utf-8")
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("text", [MANIFESTS, "services: {}\n", "x: {y: [1]}\n---\n"])
def test_what_is_no_plan_is_passed_over_in_any_encoding(
    checked: Any, text: str, encoding: str
) -> None:
    Path("fine.yaml").write_text(FINE)
    Path("other.YAML").write_bytes(text.encode(encoding))
    for requested in (".", "*.[yY]*"):
        code, document = checked(requested)
        assert (code, [item["file"] for item in document["plans"]]) == (0, ["fine.yaml"])


def test_a_folder_that_cannot_be_looked_into_blocks(
    checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An administrator may read anything, so that the refusal is the system's in name only."""
    Path("plans/hidden").mkdir(parents=True)
    Path("plans/fine.yaml").write_text(FINE)
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("hidden"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    code, document = checked("plans")
    assert code == 2
    assert [item["verdict"] for item in document["plans"]] == ["certified", "refused"]
    (result,) = document["plans"][1]["findings"]
    assert (result["rule"], result["blocks"]) == ("unreadable", True)
    assert "cannot read plans/hidden" in result["message"]


def test_what_is_no_file_is_passed_over(run: Any) -> None:
    os.mkfifo("pipe.py")
    assert repository._others(Script(ast.parse(""), Path())) == ([], None)
    os.mkfifo("pipe.yaml")
    Path("link.yaml").symlink_to("pipe.yaml")
    Path("device.yaml").symlink_to("/dev/zero")
    assert run("check", ".").exit_code == 2
    Path("fine.yaml").write_text(FINE)
    for requested in (".", "*.yaml"):
        result = run("check", requested)
        assert (result.exit_code, result.stdout.count("certified")) == (0, 1)


@pytest.mark.soak
def test_a_pipe_that_is_named_is_read(affidavit: Any) -> None:
    mended = affidavit("check", "/dev/stdin", "--fix", stdin=WEAK)
    assert (mended.returncode, "fixed" in mended.stderr) == (1, False)


@pytest.mark.ordinary("493")
@pytest.mark.parametrize("mode", [0o640, 0o600, 0o755])
def test_a_fix_is_made_where_a_link_leads_and_the_mode_stays(run: Any, mode: int) -> None:
    Path("plans").mkdir()
    target = Path("plans/target.yaml")
    target.write_text(WEAK)
    target.chmod(mode)
    Path("link.yaml").symlink_to(target)
    assert run("check", "link.yaml", "--fix").exit_code == 0
    assert Path("link.yaml").readlink() == target
    assert "0.8123" not in target.read_text()
    assert stat.S_IMODE(target.stat().st_mode) == mode
    assert run("check", str(target)).exit_code == 0


# ---- the cache -----------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("AFFIDAVIT_CACHE", str(folder))
    return folder


@pytest.mark.usefixtures("empty_cache")
def test_an_answer_is_judged_once_until_its_text_changes(
    checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("plan.yaml").write_text(WEAK)
    first = checked("plan.yaml")
    monkeypatch.setattr("affidavit.gate.checking.evaluate.certify", None)
    assert checked("plan.yaml") == first
    for text in (WEAK + "# more\n", WEAK.replace("0.8123", "0.8124")):
        Path("plan.yaml").write_text(text)
        code, document = checked("plan.yaml")
        (finding,) = document["plans"][0]["findings"]
        assert (code, finding["rule"]) == (3, "internal_error")


@pytest.mark.parametrize("place", ["repository/sub", "repository", "."])
def test_a_cache_that_a_pull_request_may_write_to_is_not_used(
    run: Any, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    Path("repository/sub").mkdir(parents=True)
    Path("repository/.git").mkdir()
    monkeypatch.chdir("repository/sub")
    Path("plan.yaml").write_text(WEAK)
    assert run("check", "plan.yaml").exit_code == 1
    (entry,) = empty_cache.glob("*.json")
    judged = json.loads(entry.read_text())["judged"] | {"exit": 0, "findings": []}
    inside = Path.cwd().parents[1] / place / "cache"
    inside.mkdir()
    forged = {"checksum": digest_of(judged), "judged": judged}
    (inside / entry.name).write_text(json.dumps(forged))
    monkeypatch.setenv("AFFIDAVIT_CACHE", str(inside))
    result = run("check", "plan.yaml")
    assert (result.exit_code, "skipped" in result.stderr) == (
        (0, False) if place == "." else (1, True)
    )


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", None])
def test_a_corrupt_cache_is_never_zero(
    run: Any, checked: Any, content: bytes | None, empty_cache: Path
) -> None:
    Path("plan.yaml").write_text(FINE)
    assert run("check", "plan.yaml").exit_code == 0
    (entry,) = empty_cache.glob("*.json")
    forged = entry.read_bytes().replace(b'"exit": 0', b'"exit": 1').replace(b"certified", b"cert")
    entry.write_bytes(forged if content is None else content)
    code, document = checked("plan.yaml")
    assert code == 3
    assert document["plans"][0]["verdict"] == "certified"
    assert document["plans"][-1]["findings"][0]["rule"] == "corrupt_cache"
    assert checked("plan.yaml")[0] == 0


# ---- what changed --------------------------------------------------------------------


def test_the_change_that_moved_epsilon_comes_first(run: Any) -> None:
    sampled = WEAK.replace("full_batch", "poisson, lot_size: 256")
    Path("plan.yaml").write_text(sampled)
    for arguments in (
        ("init", "-q"),
        ("add", "."),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first"),
    ):
        subprocess.run(["git", *arguments], check=True)
    changed = sampled.replace("steps: 15", "steps: 3600").replace("60000", "59000")
    Path("plan.yaml").write_text(changed.replace("0.8123", "2.5"))
    told = run("check", "plan.yaml", "--diff", "HEAD").stderr.splitlines()
    moved = [line.split(":")[0].strip() for line in told if " alone: " in line]
    assert moved[0] == "/releases/0/noise_multiplier"
    assert set(moved) == {"/releases/0/noise_multiplier", "/dataset/size", "/steps"}
    assert "alone: ε ≤" in "".join(told)
    Path("base.yaml").write_text(sampled)
    assert run("check", "plan.yaml", "--diff", "base.yaml").stderr.splitlines() == told


def test_a_folder_in_the_form_of_a_repository_is_not_compared_with(run: Any) -> None:
    """A pull request can add one, with a branch of any name in which nothing is changed."""

    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *arguments], check=True, capture_output=True)

    for folder, plan in (("plans", WEAK), ("copy", WEAK.replace("0.8123", "0.2"))):
        Path(folder).mkdir()
        Path(folder, "plan.yaml").write_text(plan)
    git("init", "-qb", "trusted")
    git("add", "plans")
    git("commit", "-qm", "first")
    assert " alone: " not in run("check", "plans/plan.yaml", "--diff=trusted").stderr
    git("init", "-qb", "trusted", "copy")
    git("-C", "copy", "add", ".")
    git("-C", "copy", "commit", "-qm", "forged")
    git("-C", "copy", "config", "core.bare", "true")
    for part in Path("copy/.git").iterdir():
        part.rename(Path("plans", part.name))
    Path("plans/plan.yaml").write_text(WEAK.replace("0.8123", "0.2"))
    result = run("check", "plans/plan.yaml", "--diff=trusted")
    assert result.exit_code == 2 or " alone: " in result.stderr


@pytest.mark.parametrize("base", ["no-such-ref", "--output=x", "HEAD", "x" * 300])
def test_a_base_that_is_none_is_a_mistake_of_use(run: Any, base: str) -> None:
    Path("plan.yaml").write_text(WEAK)
    result = run("check", "plan.yaml", f"--diff={base}")
    assert result.exit_code == 2
    assert "--diff:" in result.stderr


@pytest.mark.parametrize("name", ["link.yaml", "l*.yaml", "away/plan.yaml", "../other/plan.yaml"])
def test_what_the_settings_name_lies_in_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A pull request may write them, and a comment quotes what they match."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "plan.yaml").write_text("secret: 1\n")
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "repository")
    Path("link.yaml").symlink_to(tmp_path / "other" / "plan.yaml")
    Path("away").symlink_to(tmp_path / "other")
    for stated in (name, str(tmp_path / "repository" / name)):
        Path("pyproject.toml").write_text(f"[tool.affidavit]\nplans = ['{stated}']\n")
        with pytest.raises(MalformedPlan) as refused:
            list(candidates([]))
        assert refused.value.reasons[0].code == "nothing_checked"
    Path("plan.yaml").write_text("")
    Path("pyproject.toml").write_text("[tool.affidavit]\nplans = ['p*.yaml']\n")
    assert [item.file for item in candidates([])] == ["plan.yaml"]


def test_excluded_files_are_told_and_read_only_by_name() -> None:
    Path("pyproject.toml").write_text(
        '[tool.affidavit]\nplans = ["."]\nexclude = ["vendor/**", "**/tests/**", "old"]\n'
    )
    for file in ("a.yaml", "vendor/x/b.yaml", "tests/c.yaml", "in/tests/d.yaml", "old/e.yaml"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(WEAK)
    found = list(candidates(()))
    read = {item.file for item in found if isinstance(item, Candidate)}
    assert read == {"a.yaml", "pyproject.toml"}
    told = {item.file: item.why for item in found if isinstance(item, Skipped)}
    assert told.keys() == {"vendor/**", "**/tests/**", "old"}
    assert "2" in told["**/tests/**"]
    named = [item.file for item in candidates(["vendor/x/b.yaml"])]
    assert named == ["vendor/x/b.yaml"]


def test_scripts_of_vendored_code_and_tests_are_left_out_and_told_unless_named() -> None:
    files = ("train.py", "tests/test_train.py", "in/vendor/x/train.py", "tests/plan.yaml")
    for file in files:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text("")
    found = list(candidates(["."]))
    assert {item.file for item in found} == {"train.py", "tests/plan.yaml", "tests", "vendor"}
    assert sum(isinstance(item, Skipped) for item in found) == 2
    assert len(list(candidates(["tests"]))) == 2


def test_patterns_that_are_no_list_are_refused() -> None:
    Path("pyproject.toml").write_text("[tool.affidavit]\nplans = ['.']\nexclude = 'vendor'\n")
    with pytest.raises(MalformedPlan, match="exclude"):
        list(candidates(()))
