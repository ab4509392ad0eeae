"""The command line in this process or as a real one, with a home and plans of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from affidavit.client import calls
from affidavit.gate import check, init
from affidavit.gate.checking.box import Limits, Work
from affidavit.gate.cli import app

Run = Callable[..., Result]
Save = Callable[..., str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An AFFIDAVIT_HOME without keys."""
    result = tmp_path / "home"
    monkeypatch.setenv("AFFIDAVIT_HOME", str(result))
    monkeypatch.setenv("AFFIDAVIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calls, "FIRST_RETRY_SECONDS", 0.01)
    return result


@pytest.fixture(autouse=True)
def without_box(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read repositories in this process: to fork one that has all tests takes most of a test.

    The module is about the box if it sets ``IN_A_BOX``.
    """
    if getattr(request.module, "IN_A_BOX", False):
        return

    def unpack(work: Work[Any], **_: bool) -> Iterator[Any]:
        return (message for message in work(frozenset()) if not isinstance(message, Limits))

    for module in (check, init):
        monkeypatch.setattr(module, "run_in_box", unpack)


@pytest.fixture(scope="session")
def run() -> Run:
    """Run one command in this process."""

    def invoke(*arguments: str, stdin: bytes | None = None) -> Result:
        result = CliRunner().invoke(app, list(arguments), input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        return result

    return invoke


@pytest.fixture(scope="session")
def answer(run: Run) -> Callable[..., tuple[int, dict[str, Any]]]:
    """The exit code and the only JSON document of one command."""

    def invoke(*arguments: str, stdin: bytes | None = None) -> tuple[int, dict[str, Any]]:
        result = run(*arguments, stdin=stdin)
        (line,) = result.stdout.splitlines()
        return result.exit_code, json.loads(line)

    return invoke


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Write a document or a text to a file and return its path."""

    def write(content: Any, name: str = "plan.json") -> str:
        path = tmp_path / name
        raw = content if isinstance(content, bytes | str) else json.dumps(content)
        path.write_bytes(raw if isinstance(raw, bytes) else raw.encode())
        return str(path)

    return write


@pytest.fixture
def affidavit() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run one command as a process of its own."""

    def invoke(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "affidavit", *arguments],
            input=stdin,
            capture_output=True,
            check=False,
            text=True,
            env=dict(os.environ),
            timeout=300,
        )

    return invoke
