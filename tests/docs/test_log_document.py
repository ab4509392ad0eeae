"""What docs/reference/log.md has auditors do by hand leads to the signed root, and to no other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.logged_certificate import KEY, certified, log_of

DOCUMENT = Path(__file__).parents[2] / "docs/reference/log.md"


@pytest.mark.ordinary("6-7", "0-1")
@pytest.mark.parametrize(("index", "size"), [(0, 1), (11, 40), (6, 7), (32, 33)])
def test_the_script_by_hand(document: Any, tmp_path: Path, index: int, size: int) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    log = log_of(certified(document(), KEY), index, size)
    bundle = log.bundle(size)
    assert _told(script, tmp_path, bundle) == "in the log"
    bundle["log"]["leafIndex"] = size
    assert _told(script, tmp_path, bundle) == "NOT IN THE LOG"
    bundle = log.bundle(size)
    bundle["envelope"]["signatures"][0]["keyid"] = "0" * 64
    assert _told(script, tmp_path, bundle) == "NOT IN THE LOG"


def _told(script: str, directory: Path, bundle: Any) -> str:
    (directory / "bundle.json").write_text(json.dumps(bundle, indent=2))
    command = [sys.executable, "-c", script, str(directory / "bundle.json")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
