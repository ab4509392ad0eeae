"""A folder of thousands of files: what holds no plan is not parsed, and nothing is parsed twice."""

from __future__ import annotations

import ast
import errno
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from affidavit.gate.checking import source
from affidavit.gate.checking.cache import Evaluator
from affidavit.gate.checking.repository_check import Checked, RepositoryCheck
from affidavit.importers import documents
from affidavit.importers.scripts import launches, repository
from bench.gate import SCRIPT

MODULES, CIRCLE, SCRIPTS = 30, 5, 5


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules that import each other in circles, scripts, their launch files, and data."""
    monkeypatch.chdir(tmp_path)
    for place in ("package", "scripts", "data"):
        (tmp_path / place).mkdir()
    for number in range(MODULES):
        text = f"from package.module_{(number + 1) % CIRCLE} import build\nNUMBER = {number}\n"
        (tmp_path / f"package/module_{number}.py").write_text(text)
    for number in range(SCRIPTS):
        (tmp_path / f"scripts/train_{number}.py").write_text(SCRIPT.format(number=number))
        command = f"python scripts/train_{number}.py --noise 1.0\n"
        (tmp_path / f"scripts/run_{number}.sh").write_text(command)
    rows = [{"epochs": 3, "steps": 1, "dataset": "x", "text": "a plan: b"} for _ in range(50)]
    for name, data in (("rows", {"rows": rows}), ("words", ["a word"] * 50), ("other", {"a": 1})):
        (tmp_path / f"data/{name}.json").write_text(json.dumps(data))
    return tmp_path


def counted(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, key: Callable[..., str]
) -> Counter[str]:
    """Count the calls of a function by a key of their arguments."""
    calls: Counter[str] = Counter()
    original = getattr(place, name)

    def call(*arguments: Any, **options: Any) -> Any:
        calls[key(*arguments)] += 1
        return original(*arguments, **options)

    monkeypatch.setattr(place, name, call)
    return calls


def check(*names: str) -> list[Checked]:
    """Check in this process, where calls are counted."""
    work = RepositoryCheck(names, Evaluator(False, None, None), None, fix=False, base=None)
    return [message for message in work(frozenset()) if isinstance(message, Checked)]


def test_a_folder_parses_only_scripts_and_what_they_import(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def text_of(text: str | bytes, *_: Any) -> str:
        return text if isinstance(text, str) else text.decode()

    parsed = counted(monkeypatch, ast, "parse", text_of)
    sections = counted(monkeypatch, source, "find_sections", text_of)
    strict = counted(monkeypatch, documents, "load_json", text_of)
    loaded = counted(monkeypatch, json, "loads", text_of)
    searched = counted(monkeypatch, source, "_is_plan_below", lambda *_: "")
    assert len(check(".")) == SCRIPTS
    data = [path.read_text() for path in folder.glob("data/*")]
    with_names = [text for text in data if "epochs" in text]  # of a plan's fields
    assert sum(len(text) * loaded[text] for text in data) == len(*with_names)
    assert not searched
    whole = {path.read_text() for path in folder.glob("*/*.py")}
    counts = Counter({text: parsed[text] for text in parsed if text in whole})
    assert len(counts) == SCRIPTS + CIRCLE
    assert set(counts.values()) == {1}
    assert not sections
    assert not strict


def test_a_launch_file_is_read_once_for_all_scripts_beside_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = counted(monkeypatch, launches, "read_inside", lambda path, *_: Path(path).name)
    imported = counted(monkeypatch, repository, "read_inside", lambda path, *_: Path(path).name)
    listed = counted(monkeypatch, os, "listdir", str)
    assert len(check(".")) == SCRIPTS
    assert max(listed[str(place)] for place in (folder, *folder.iterdir())) <= 2
    assert {reads[path.name] for path in folder.glob("scripts/*")} == {1}
    assert max(imported.values(), default=0) <= 2


def test_more_launch_files_than_are_read_leave_an_option_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "scripts/run_0.sh").unlink()

    def rules() -> list[str]:
        (found,) = check("scripts/train_0.py")
        return [item.rule for item in found.result.findings if item.blocks]

    settled = rules()
    monkeypatch.setattr(launches, "MAX_FILES", 2)
    (found,) = check("scripts/train_0.py")
    assert rules() != settled
    assert "more than" in found.result.findings[-1].text


@pytest.mark.parametrize(("module", "function"), [(os, "listdir"), (launches, "read_inside")])
def test_a_launch_file_that_the_system_cannot_give_leaves_an_option_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: Any, function: str
) -> None:
    def fail(path: str, *_: object) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    assert (folder / "scripts/run_0.sh").exists()
    monkeypatch.setattr(module, function, fail)
    (found,) = check("scripts/train_0.py")
    texts = " ".join(item.text for item in found.result.findings if item.blocks)
    assert "which cannot be read (Too many open files)" in texts


@pytest.mark.parametrize(
    ("launch", "is_told"),
    [
        ("python scripts/train_0.py --noise 9\n", True),
        ("python3 -m scripts.train_0 --noise 9\n", True),
        ('run: ["python", "-m", "scripts.Train_0", "--noise", "9"]\n', True),
        ("python scripts/tr\0ain_0.py --noise 9\n", True),
        ("python scripts/train_1.py --noise 9\n", False),
        ("", False),
    ],
)
def test_a_launch_file_that_is_too_large_leaves_an_option_open(
    folder: Path, launch: str, is_told: bool
) -> None:
    def texts() -> list[str]:
        (found,) = check("scripts/train_0.py")
        return [item.text for item in found.result.findings]

    settled = texts()
    padding = "# nothing\n" * 30_000
    for text in (padding + launch, "#!/bin/sh\n" + launch + padding):
        (folder / "scripts/large.sh").write_text(text)
        assert (texts() != settled) == is_told
        assert any("large.sh" in text for text in texts()) == is_told


def test_a_shell_skips_a_nul_and_so_does_the_check(folder: Path) -> None:
    (folder / "scripts/run_0.sh").write_text("#!/bin/sh\npython scripts/tr\0ain_0.py --noise 2.0\n")
    (found,) = check("scripts/train_0.py")
    assert any("run_0.sh names noise" in item.text for item in found.result.findings)


def test_a_launch_file_that_changes_is_read_again(folder: Path) -> None:
    def noise() -> Any:
        (found,) = check("scripts/train_0.py")
        return found.result.headline, [item.rule for item in found.result.findings if item.blocks]

    first = noise()
    (folder / "scripts/run_0.sh").write_text("python scripts/train_0.py\n")
    second = noise()
    assert first != second


@pytest.mark.parametrize(
    "text",
    [
        '{"rows": [1], "epochs": 1, "steps": 2, "dataset": {"size": 3}}',
        '[[{"epochs": 1, "steps": 2, "dataset": {"size": 3}}]]',
        '{"a": {"plan": {"epochs": 1, "steps": 2, "dataset": 3}}}',
        '{"pl\\u0061n": {"epochs": 1, "steps": 2, "dataset": 3}}',
        '{"plan": {"epochs": 1, "steps": 2, "dataset": 3}, "plan": 1}',
        '{"plan": {"epochs": 1, "steps": 2, "dataset": 3, "x": ' + "9" * 5_000 + "}}",
        '{"plan": {"epochs": 1, "steps": 2, "dataset": 3, "x": 1e999}}',
        '{"plans": {"a": {"epochs": 1, "steps": 2, "dataset": 3}}}',
    ],
)
def test_a_plan_anywhere_in_a_json_text_is_parsed(text: str) -> None:
    assert source.may_have_json_plan(text)
    assert source.may_contain_plan(text)
