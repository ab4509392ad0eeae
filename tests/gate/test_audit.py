"""``affidavit audit`` as people run it: a process that becomes the service's own program."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any


def test_an_audit_from_the_command_line(affidavit: Any, home: Path, migrated_sqlite: Path) -> None:
    refused = affidavit("audit", "verify")
    assert (refused.returncode, "affidavit migrate" in refused.stderr) == (2, True)
    assert not (home / "affidavit.db").exists()
    home.mkdir(exist_ok=True)
    shutil.copy(migrated_sqlite, home / "affidavit.db")
    told = affidavit("audit", "verify", "--json")
    assert (told.returncode, told.stderr) == (0, "")
    assert json.loads(told.stdout)["consistent"] is True
