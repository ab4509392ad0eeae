"""docs/how-to/gate.md: its commands run, and it lists what the gate takes and writes."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from affidavit.gate import app
from affidavit.gate.checking.box import Limits
from affidavit.gate.checking.formats import WRITERS
from affidavit.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how-to/gate.md").read_text()


@pytest.mark.soak
def test_the_commands_about_examples_end_as_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AFFIDAVIT_CACHE", str(tmp_path / "cache"))
    lines = [line for line in PAGE.splitlines() if line.startswith("affidavit check examples")]
    assert len(lines) == 3
    for line in lines:
        command, _, told = line.partition(" || ")
        result = CliRunner().invoke(app, command.split()[1:])
        assert result.exit_code == (1 if "blocked" in told else 0), result.output


def test_the_settings_shown_are_fields_of_a_plan() -> None:
    texts = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    tables = [tomllib.loads(text)["tool"]["affidavit"] for text in texts]
    (provided,) = next(table["given"] for table in tables if "given" in table).values()
    (limits,) = (table["limits"] for table in tables if "limits" in table)
    assert Limits(**limits) == Limits()
    assert set(provided) <= set(Plan.model_fields) | {"sampling", "epochs"}


def test_every_format_is_named() -> None:
    assert not [name for name in WRITERS if f"`{name}`" not in PAGE]
