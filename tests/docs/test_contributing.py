"""Where a newcomer is sent: every row of CONTRIBUTING.md's table leads to files that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to change what")[2]
ROWS = re.findall(r"^\| (?!change \||---)(.+?) \| (.+?) \|$", TABLE, re.MULTILINE)


@pytest.mark.parametrize(("change", "where"), ROWS, ids=[change for change, _ in ROWS])
def test_a_change_is_made_in_files_that_exist(change: str, where: str) -> None:
    """A name without a folder is a file beside the one before, or stands in the one after."""
    named = re.findall(r"`([^`]+)`", where)
    paths = [ROOT / name for name in named if "/" in name]
    assert paths, change
    for path in paths:
        assert path.exists(), path
    for place, name in enumerate(named):
        if "/" in name:
            continue
        if name.endswith(".py"):
            before = next(item for item in reversed(named[:place]) if "/" in item)
            assert (ROOT / before).with_name(name).is_file(), name
        else:
            after = next(item for item in named[place:] if "/" in item)
            assert name in (ROOT / after).read_text(), name


def test_the_table_has_the_tasks_of_a_first_week() -> None:
    """Each by its first guess: the words of the task are those of one row."""
    tasks = {
        "a field of the certificate page": "service/web/pages",
        "a sampling scheme": "mechanisms/sampling_schemes.py",
        "a noise strategy": "mechanisms/strategies",
        "a known mistake": "assessment/diagnosis/catalogue",
        "a policy rule": "certificate/policy/rules.py",
        "a verification step": "certificate/verification/bundle_verification.py",
        "an endpoint": "service/web/routes",
        "a command": "gate/cli.py",
        "exit codes": "gate/exit_codes.py",
        "a request of the HTTP client, and when it is repeated": "client/calls.py",
    }
    rows = dict(ROWS)
    assert {task for task, where in tasks.items() if where not in rows.get(task, "")} == set()


def test_first_guesses_are_of_files_that_exist() -> None:
    guesses = tomllib.loads((Path(__file__).parent / "first_guesses.toml").read_text())["tasks"]
    assert len(guesses) == 20
    assert not [path for path in guesses.values() if not (ROOT / path).is_file()]
    assert not set(guesses) & set(dict(ROWS))
