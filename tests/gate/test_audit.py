"""``affidavit audit`` as people run it: a process that becomes the service's own program."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_an_audit_from_the_command_line(affidavit: Any, home: Path, tmp_path: Path) -> None:
    refused = affidavit("audit", "verify")
    assert (refused.returncode, "affidavit migrate" in refused.stderr) == (2, True)
    assert not (home / "affidavit.db").exists()
    assert affidavit("migrate").returncode == 0
    assert affidavit("tokens", "new", "--name", "ci", "--scope", "submit").returncode == 0
    told = affidavit("audit", "verify")
    assert (told.returncode, told.stderr) == (0, "")
    assert "0 entries: log and tables say the same; 1 wait" in told.stdout
    unsigned = affidavit("audit", "export-checkpoint", str(tmp_path / "checkpoint"))
    assert (unsigned.returncode, "no checkpoint yet" in unsigned.stderr) == (2, True)
    assert affidavit("audit", "verifier-key").returncode == 2
    missing = affidavit("audit", "verify", "--checkpoint", str(tmp_path / "none"), "--json")
    assert (missing.returncode, missing.stdout) == (2, "")
