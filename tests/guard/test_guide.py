"""The page about the guard: what it shows runs, and its codes are those of the guard."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from affidavit.gate.cli import app
from affidavit.plan import canonical_json, explain
from affidavit.trust import KeyStore, SigningKey

PAGE = (Path(__file__).resolve().parents[2] / "docs/how-to/guard.md").read_text()


def test_the_loop_on_the_page_runs_and_conforms(
    certified: Any, key: SigningKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    monkeypatch.setenv("AFFIDAVIT_HOME", str(home))
    KeyStore(home / "keys").save(key.public)
    predicate, bundle = certified()
    (tmp_path / "bundle.json").write_bytes(bundle)
    (tmp_path / "plan.yaml").write_bytes(canonical_json(predicate["plan"]))
    (shown,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(shown, "guard.md", "exec"), {})
    done = CliRunner().invoke(
        app, ["conformance", "--record", "run/record.jsonl", "--certificate", "bundle.json"]
    )
    assert done.exit_code == 0, done.output


def test_every_code_on_the_page_is_one_of_the_guard() -> None:
    (table,) = re.findall(r"\| what would go unnoticed(.*?)\n\n", PAGE, re.DOTALL)
    cells = "".join(row.split("|")[1] for row in table.split("\n|")[2:])
    codes = set(re.findall(r"`([a-z_]+)`", cells))
    assert len(codes) > 10
    assert not [code for code in codes if not any(item.part == "guard" for item in explain(code))]
