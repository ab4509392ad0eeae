"""Every notebook runs from its first cell to its last, and does what its words say."""

from __future__ import annotations

import ast
import json
import operator
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

import affidavit
from tests.support.document_blocks import DOCS

mpl.use("agg")
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def run(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """The names that the notebook defines, and what each code cell shows."""
    names: dict[str, Any] = {}
    shown = []
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"], 1):
        text = "".join(cell["source"])
        if cell["cell_type"] != "code" or text.startswith("%pip"):
            continue
        tree = ast.parse(text, f"{path.name}, cell {number}")
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"{path.name}, cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), path.name, "eval"), names))
    return names, shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_stored_without_output(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_names_only_what_affidavit_has(path: Path) -> None:
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code" and not cell["source"][0].startswith("%pip"):
            text = "".join(cell["source"])
            for name in re.findall(r"\baffidavit((?:\.[A-Za-z_]\w*)+)", text):
                operator.attrgetter(name[1:])(affidavit)


@pytest.mark.soak
def test_three_optimisers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    path = DOCS / "notebooks" / "three-optimisers.ipynb"
    assert len(json.loads(path.read_text(encoding="utf-8"))["cells"]) == 12
    names, shown = run(path)
    noise = {name: answer.noise_multiplier for name, answer in names["answers"].items()}
    assert noise["DP-SGD"] == noise["DP-Adam"]
    assert noise["DP-Muon"] == pytest.approx(7 * noise["DP-SGD"], rel=1e-5)
    assert len(names["left"].get_lines()) == 3
    assert len(names["right"].get_lines()) >= 2
    assert "independent_blocks" in names["mistake"].summary
    assert float(names["verified"].predicate["guarantee"]["epsilon"]["upper"]) <= 8
    assert [value for value in shown if hasattr(value, "_repr_html_")]
