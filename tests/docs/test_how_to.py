"""The pages for operators: their commands run, and nothing they list is left out."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from affidavit.gate import app
from affidavit.service import settings
from affidavit.service.web.gauges import GAUGES
from affidavit.service.web.telemetry import ENDPOINT_VARIABLES, Metrics
from affidavit.trust import signers

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "how-to"
UNREACHABLE = 3


def commands(page: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_the_commands_about_keys_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path / "home"))
    plan = str(ROOT / "examples" / "e2e-lora-dp-adam.yaml")
    run = CliRunner()
    lines = commands("rotate-keys.md")
    assert len(lines) > 12
    for line in lines:
        words = shlex.split(line.replace("PLAN", plan), comments=True)
        provided = [path for word in words[1:] for path in _expanded(word, tmp_path)]
        result = run.invoke(app, provided)
        requested = UNREACHABLE if "publish" in provided else 0
        assert result.exit_code == requested, (line, result.output)


def _expanded(word: str, directory: Path) -> list[str]:
    """As a shell expands a star."""
    return [str(path) for path in directory.glob(word)] if "*" in word else [word]


def test_every_setting_is_on_the_page_of_settings() -> None:
    page = (PAGES / "operate.md").read_text()
    documented = f"{settings.__doc__}{signers.__doc__}"
    names = set(re.findall(r"``(AFFIDAVIT_[A-Z0-9_]+|DATABASE_URL)``", documented))
    assert len(names) > 12
    assert not [name for name in names | {ENDPOINT_VARIABLES[0]} if f"`{name}`" not in page]


def test_every_metric_is_on_its_page_and_no_other() -> None:
    page = (PAGES / "operate.md").read_text()
    told = set(re.findall(r"`(affidavit_[a-z_]+)(?:\{[a-z,]+\})?`", page))
    meters = Metrics()
    shown = meters.exposition().decode()
    counted = set(re.findall(r"^# HELP (affidavit_[a-z_]+) ", shown, re.MULTILINE))
    assert len(GAUGES) > 8
    assert told == counted | GAUGES.keys()
