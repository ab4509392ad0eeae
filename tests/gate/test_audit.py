"""``affidavit audit`` as people run it: a process that becomes the service's own program."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest


def test_an_audit_without_a_database_ends_as_the_service_says(affidavit: Any, home: Path) -> None:
    refused = affidavit("audit", "verify")
    assert (refused.returncode, "affidavit migrate" in refused.stderr) == (2, True)
    assert not (home / "affidavit.db").exists()


@pytest.mark.soak
def test_an_audit_from_the_command_line(affidavit: Any, home: Path, migrated_sqlite: Path) -> None:
    home.mkdir()
    shutil.copy(migrated_sqlite, home / "affidavit.db")
    told = affidavit("audit", "verify", "--json")
    assert (told.returncode, told.stderr) == (0, "")
    assert json.loads(told.stdout)["consistent"] is True
