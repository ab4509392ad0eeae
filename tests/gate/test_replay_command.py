"""``affidavit replay``: its exit codes, its record, and what it leaves alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from affidavit.evidence import BadReplayRecord, read_replay_record
from affidavit.gate import app

LOOP = """\
import random
import affidavit

rows = affidavit.records([[1.0], [4.0], [2.0], [3.0]] * 4)
weight = 0.0
for step in range(3):
    lot = affidavit.lot([place for place in range(16) if random.random() < 0.5])
    total = sum((min(1.0, rows[place][0]) for place in lot), 0.0)
    noisy = total + random.gauss(0, 1.1)
    noisy = affidavit.release(total, noisy, clip_norm=1.0, noise_multiplier=1.1)
    weight += noisy
with open("weight.txt", "w") as file:
    file.write(str(weight))
"""


@pytest.mark.parametrize(
    ("old", "new", "exit_code", "code"),
    [
        ("", "", 0, None),
        ("min(1.0, rows[place][0])", "rows[place][0]", 1, "sensitivity_exceeded"),
        ("str(weight)", "str(rows[0])", 1, "file_differs"),
        ("import random", "import missing", 3, None),
        ('open("weight.txt", "w")', 'open("../weight.txt", "w")', 3, None),
    ],
)
def test_the_exit_code_is_the_verdict(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    old: str,
    new: str,
    exit_code: int,
    code: str | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(LOOP.replace(old, new) if old else LOOP)
    arguments = ["replay", "--record", "replay.json", "--records", "1"]
    result = CliRunner().invoke(app, [*arguments, "--", sys.executable, "train.py"])
    assert result.exit_code == exit_code, result.output
    assert not list(tmp_path.parent.rglob("weight.txt"))
    if exit_code == 3:
        assert "loop_failed" in result.output
        return
    record = read_replay_record((tmp_path / "replay.json").read_bytes())
    assert code in [finding.code for finding in record.findings] or code is None
    assert record.files[0].path == "train.py"
    assert set(record.files[0].lines) == {1, 2, *range(4, 14)}


def test_what_is_no_record_is_refused() -> None:
    for raw in (b"", b"[]", json.dumps({"type": "affidavit.replay/1"}).encode()):
        with pytest.raises(BadReplayRecord):
            read_replay_record(raw)
