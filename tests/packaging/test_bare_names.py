"""A session in which a room was imported by its bare name fails, and only such a one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOKS = "from tests.support.import_guard import rooms_by_their_full_name_only\n"


def test_every_session_looks(request: pytest.FixtureRequest) -> None:
    assert "rooms_by_their_full_name_only" in request.fixturenames


@pytest.mark.ordinary("gate-1-1")
@pytest.mark.parametrize(
    ("name", "forks", "code"), [("plan", "0", 1), ("gate", "1", 1), ("plants", "0", 0)]
)
def test_a_room_by_its_bare_name_fails_the_session(
    tmp_path: Path, name: str, forks: str, code: int
) -> None:
    (tmp_path / "conftest.py").write_text(LOOKS)
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "test_it.py").write_text(
        f"import {name}\n\n\ndef test_passes() -> None:\n    assert {name}\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.support.forked_workers",
            "--forks",
            forks,
            "-p",
            "no:cacheprovider",
        ],
        cwd=tmp_path,
        # The conftest imports from `tests`; what stands in the working directory is
        # found before the root's rooms. Of the plugins that are installed one is needed.
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stdout
    assert ("without `affidavit.` in front: " + name in done.stdout) == (code == 1)
