"""Each attack of the threat model names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs/explanation/threat-model.md", ROOT / "contributing/attacks.md"]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_attack_has_a_test_and_every_test_that_is_named_exists() -> None:
    rows = [
        line
        for page in PAGES
        for line in page.read_text().splitlines()
        if line.startswith("| ") and "Shown by" not in line
    ]
    assert len(rows) > 30
    for row in rows:
        named = NAMED.search(row)
        assert named, row
        tree = ast.parse((ROOT / named[1]).read_text())
        result = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert named[2] in result, row
