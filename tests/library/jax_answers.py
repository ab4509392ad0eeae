"""Records what jax-privacy answers to the rows of docs/library.md.

    .venv-jax/bin/python -m tests.library.jax_answers

JAX is too large for an environment of tests. The program imports nothing of this project: it runs
the page's block about jax-privacy, evaluates the left side of each row below it, and writes
tests/vectors/jax_privacy.json.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    page = (ROOT / "docs/library.md").read_text(encoding="utf-8")
    section = page.partition("## Equivalents of jax-privacy\n")[2]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    rows = re.findall(r"^\| `([^|]+)` \| `[^|]+` \|$", section, re.MULTILINE)
    answers = {theirs: float(eval(theirs, names)) for theirs in rows}
    text = json.dumps(answers, indent=1) + "\n"
    (ROOT / "tests/vectors/jax_privacy.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
