"""Repositories that once hung the gate, and variations: each is checked within its deadline."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from affidavit.gate.checking import repository_check
from affidavit.gate.checking.box import Limits

IN_A_BOX = True

FILE_SECONDS = 0.4

PLAN = """\
version: 1
dataset: {size: 60000}
adjacency: add_remove
sampling: {scheme: poisson, lot_size: 256}
epochs: 15
releases:
  - {name: all, clip_norm: 1, noise_multiplier: 0.8123}
target: {epsilon: 9, delta: 1.0e-5}
"""
SCRIPT = """\
import torch
from opacus import PrivacyEngine
loader = torch.utils.data.DataLoader(data, batch_size=500)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader,
    noise_multiplier=NOISE, max_grad_norm=1.0)
for epoch in range(3):
    for batch in loader:
        loss(batch).backward()
        optimizer.step()
# affidavit: adjacency=zero_out target_delta=1e-5 dataset_size=50000
"""
OPTION = (
    SCRIPT.replace("import torch", "import argparse, torch")
    .replace(
        "loader = torch",
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--noise', type=float, default=1.0)\n"
        "args = parser.parse_args()\nloader = torch",
        1,
    )
    .replace("NOISE", "args.noise")
)
DATA = json.dumps({"epochs": 1, "steps": 2, "dataset": {"size": 3}, "rows": [[1.5, 2]] * 20})
SMALL = "{epochs: 1, steps: 1, target: 1}"


def settings(text: str) -> Callable[[], None]:
    return lambda: (Path("pyproject.toml").write_text(text), None)[1]


def files(**texts: str) -> Callable[[], None]:
    def write() -> None:
        for name, text in texts.items():
            Path(name.replace("_", ".")).write_text(text)

    return write


def script(text: str, **beside: str) -> Callable[[], None]:
    return files(train_py=text, **beside)


REPOSITORIES: dict[str, Callable[[], None]] = {
    "headers": settings("[" + " a" * 1_000),
    "headers of spaces": settings("[[" + " " * 20_000 + "x"),
    "headers of dots": settings("[a" + " . a" * 5_000),
    "keys of quotes": settings('"' * 20_001 + "\n" + "a" * 20_000),
    "integers": script(
        "A = 10**64\nB = A**64\nC = B**64\nD = C**64\n" + SCRIPT.replace("NOISE", "D**64")
    ),
    "an integer of digits": script(f"A = 0x{'f' * 200_000}\n" + SCRIPT.replace("NOISE", "A*A*A")),
    "an integer of products": script(
        "A = 10**64\n"
        + "".join(f"A{i + 1} = A{i or ''} * A{i or ''}\n" for i in range(38)).replace("A0 ", "A ")
        + SCRIPT.replace("NOISE", "A38")
    ),
    "a rounded integer": script(SCRIPT.replace("NOISE", "round(15, -10**9)")),
    "imports without an end": script(SCRIPT.replace("NOISE", "1.0"), b_py="from (\n" * 30_000),
    "imports before one end": script(
        SCRIPT.replace("NOISE", "1.0"), b_py="import(\n" * 30_000 + ")x"
    ),
    "imports of spaces": script(SCRIPT.replace("NOISE", "1.0"), b_py=("from" + " " * 9) * 20_000),
    "imports that are indented": script(
        SCRIPT.replace("NOISE", "1.0"), b_py=" " * 200_000 + "from"
    ),
    "blank lines": script(OPTION, run_sh="\n" * 200_000 + "train.py"),
    "blank lines of spaces": script(OPTION, run_sh=" \n" * 100_000 + "train.py"),
    "words that set nothing": script(OPTION, run_sh="a= " * 80_000 + "train.py"),
    "comments in a line": script(OPTION, run_sh=" #" * 120_000 + "train.py"),
    "small plans of YAML": files(plans_yaml="plans:\n" + f"  - {SMALL}\n" * 1_700),
    "small plans of JSON": files(
        plans_json='{"plans": [' + ", ".join(['{"epochs":1,"steps":1,"target":1}'] * 15_000) + "]}"
    ),
    "flow of YAML": files(plans_yaml=PLAN + "x: " + "[" * 60_000),
    "keys of YAML": files(plans_yaml=PLAN + "? " * 30_000),
    "calls of calls": script("f(f(f(1)))\n" * 20_000 + SCRIPT.replace("NOISE", "1.0")),
    "a deep call": script("f(" * 150 + "1" + ")" * 150 + "\n" + SCRIPT.replace("NOISE", "f(1)")),
    "names of names": script(
        "".join(f"a{i + 1} = a{i}\n" for i in range(8_000)) + SCRIPT.replace("NOISE", "a8000")
    ),
    "functions of a script": script(
        "".join(f"def f{i}(x): return f{i + 1}(x)\n" for i in range(4_000))
        + SCRIPT.replace("NOISE", "f0(1)")
    ),
    "a statement of letters": script(
        SCRIPT.replace("NOISE", "1.0") + "# affidavit: " + "a" * 200_000
    ),
    "data of JSON": files(
        **{f"d{i}_json": "[" + ", ".join([DATA] * 2_000) + "]" for i in range(9)}
    ),
    "a line of spaces": files(a_yaml=PLAN.replace("epochs: 15", "epochs: [" + "  " * 30_000 + "]")),
}
"""The ten that were found, and variations of each."""


@pytest.mark.by_turns
@pytest.mark.parametrize("name", REPOSITORIES)
def test_a_repository_that_hung_is_checked_within_its_deadline(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    limit = Limits(file_seconds=FILE_SECONDS, total_seconds=2 * FILE_SECONDS)
    monkeypatch.setattr(repository_check, "limits", lambda: limit)
    REPOSITORIES[name]()
    Path("zz.yaml").write_text(PLAN)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = os.times()
    result = run("check", ".", "--format", "json")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < limit.total_seconds + 1
    assert os.times().user - own.user < 2
    document = json.loads(result.stdout)
    rules = {item["rule"] for plan in document["plans"] for item in plan["findings"]}
    assert result.exit_code in ((1, 2, 3) if "limit_reached" in rules else (0, 1, 2))
    if "limit_reached" not in rules:
        assert document["plans"][-1]["verdict"] == "certified"
