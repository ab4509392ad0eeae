"""Tests that run in forked processes pass and fail as others do, whatever ends their process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULE = """
import os, signal, sys, threading, time
import pytest

@pytest.mark.parametrize("number", range(5))
def test_passes(number, tmp_path): (tmp_path / "file").touch()
def test_is_killed(): os.kill(os.getpid(), signal.SIGKILL)
def test_ends_its_process(): os._exit(0)
def test_fails():
    print("printed before")
    assert sys.stdout is None
def test_leaves_a_thread(): threading.Thread(target=time.sleep, args=[1000], daemon=True).start()

@pytest.fixture(scope="session")
def resource():
    yield
    with open("released", "a") as file:
        file.write("once")

def test_uses_it(resource): pass
def test_is_interrupted(resource): os.kill(os.getppid(), signal.SIGINT); time.sleep(1000)
"""


def run(folder: Path, *options: str) -> str:
    (folder / "test_it.py").write_text(MODULE)
    words = ["-p", "tests.support.forked_workers", "-p", "no:cacheprovider", "--forks", "2"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *words, *options], cwd=folder, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    return ended.stdout


def test_a_process_that_ends_fails_its_test_and_the_others_run(tmp_path: Path) -> None:
    printed = run(tmp_path, "-k", "not interrupted")
    assert "3 failed, 7 passed" in printed
    assert "the process of the test ended with -9" in printed
    assert "the process of the test ended with 0" in printed
    assert "printed before" in printed


def test_an_interrupted_session_releases_what_its_tests_hold(tmp_path: Path) -> None:
    assert "KeyboardInterrupt" in run(tmp_path, "-k", "uses_it or interrupted")
    assert set((tmp_path / "released").read_text().split("once")) == {""}
