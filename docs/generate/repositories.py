"""``repositories.md``: what the gate answers to the scripts of public repositories.

The cases are those of ``tests/gate/checking/repositories.yaml``, which a test runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from docs.generate.tables import table

CASES = Path(__file__).resolve().parents[2] / "tests/gate/checking/repositories.yaml"
HEAD = """# Scripts of public repositories

Written by `make docs` from `tests/gate/checking/repositories.yaml`, which a test runs.

What `affidavit check` answers to the forms in which public repositories train privately. The cases
are short scripts of our own with the same calls and numbers. The lines are those that somebody
adds as `# affidavit:` comments; noise that a library calibrates while the script runs is a number
of our choice. A case says nothing about the results that a repository publishes.

"""
SCRIPTS = "https://github.com/{repository}/blob/HEAD/{file}"


def page() -> str:
    """The whole page."""
    cases: list[dict[str, Any]] = YAML(typ="safe").load(CASES.read_text("utf-8"))
    rows = [
        [
            f"[{case['repository']}]({SCRIPTS.format(**case)})",
            case["form"],
            " ".join(f"`{line}`" for line in case["lines"]) or "none",
            ", ".join(f"`{code}`" for code in case.get("blocks", ())) or "certified",
        ]
        for case in cases
    ]
    repositories = {case["repository"] for case in cases}
    count = f"{len(cases)} forms from {len(repositories)} repositories.\n\n"
    return HEAD + count + table(("repository", "form", "lines added", "answer"), rows)
