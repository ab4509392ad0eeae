"""Other files of the repository that a script imports, or that import from it."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest

from affidavit.importers.scripts import repository
from affidavit.importers.scripts.options import READERS
from affidavit.importers.scripts.syntax import Script
from affidavit.importers.scripts.values import Evaluator

SCRIPT = """\
import torch
from opacus import PrivacyEngine
from torchvision.datasets import MNIST
{imports}
def start(model, optimizer, sigma=1.0):
    first = torch.utils.data.DataLoader(MNIST(".", train=True), batch_size=500)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=first,
        noise_multiplier=1.0, max_grad_norm=1.0)
    for epoch in range(3):
        {loop}
def other():
    pass
model = torch.nn.Linear(784, 10)
start(model, torch.optim.SGD(model.parameters(), lr=0.1))
# affidavit: adjacency=zero_out target_delta=1e-5 epochs=3
"""
LOOP = """for x, y in loader:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)


def test_a_loop_in_another_file_is_asked_about(checked: Any) -> None:
    loop = "run(model, loader, optimizer)"
    Path("train.py").write_text(SCRIPT.format(imports="from helpers import run", loop=loop))
    Path("helpers.py").write_text("def run(model, loader, optimizer):\n    pass\n")
    code, document = checked("train.py")
    (plan,) = document["plans"]
    blocking = [item for item in plan["findings"] if item["blocks"]]
    assert code in (2, 3)
    assert any(loop in item["message"] or "step()" in item["message"] for item in blocking)


def test_the_model_that_a_helper_returns_is_the_model_still(checked: Any) -> None:
    lines = ["model, rows = run(model, loader)  # affidavit: harmless=a_pass", "model.eval()"]
    loop = "\n        ".join([*lines, "torch.save(rows, 'rows.pt')"])
    Path("train.py").write_text(SCRIPT.format(imports="from helpers import run", loop=loop))
    (plan,) = checked("train.py")[1]["plans"]
    messages = " ".join(item["message"] for item in plan["findings"] if item["blocks"])
    assert "torch.save(rows" in messages
    assert "model.eval()" not in messages


@pytest.mark.parametrize(
    ("use", "length"),
    [
        ("print(len(runs), runs[0])", 3), ("for run in runs: print(run)", 3),
        ("runs.append(1)", None), ("del runs[0]", None), ("others = runs", None),
        ("runs[:0] = [1]", None), ("extend(runs)", None),
    ],
)  # fmt: skip
def test_the_length_of_a_list_is_known_if_nothing_changes_it(use: str, length: int | None) -> None:
    script = Script(ast.parse(f"runs = [1, 2, 3]\n{use}\nf(len(runs))\n"))
    (call,) = script.calls_to("f")
    assert Evaluator(script, READERS).known_value(call.args[0]) == length


@pytest.mark.parametrize(
    ("beside", "is_caller"),
    [
        ("from train import start\n", True),
        ("from train import (\n    other,\n    start,\n)\n", True),
        ("import train\ntrain.start()\n", True),
        ("from train import *\nstart()\n", True),
        ("from train import other\nstart = other\n", True),
        ("from elsewhere import start\n", False),
        ("import train\n", False),
    ],
)
def test_a_file_that_runs_the_private_call_of_another_is_asked_about(
    checked: Any, beside: str, is_caller: bool
) -> None:
    Path("train.py").write_text(SCRIPT.format(imports="", loop=LOOP))
    Path("beside.py").write_text(beside)
    code, document = checked("train.py")
    messages = [item["message"] for item in document["plans"][0]["findings"] if item["blocks"]]
    assert any("beside.py" in message for message in messages) is is_caller
    assert (code == 0) is not is_caller


@pytest.mark.parametrize(
    ("limit", "why"),
    [
        ("MAX_FILES", "one of more than 1 Python files"),
        ("MAX_FILE", "large.py, which is too large"),
    ],
)
def test_files_that_are_not_read_are_asked_about(
    checked: Any, monkeypatch: pytest.MonkeyPatch, limit: str, why: str
) -> None:
    monkeypatch.setattr(repository, limit, 1)
    Path("train.py").write_text(SCRIPT.format(imports="import large", loop=LOOP))
    Path("large.py").write_text("x = 1\n")
    code, document = checked("train.py")
    messages = [item["message"] for item in document["plans"][0]["findings"] if item["blocks"]]
    assert code == 3
    assert any(why in message for message in messages)


def test_the_files_of_a_repository_are_found_once_for_all_its_scripts(
    checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        Path(f"train_{number}.py").write_text(SCRIPT.format(imports="import large", loop=LOOP))
    Path("large.py").write_text("x = 1\n")
    walk, walked = os.walk, Path("walked")

    def counted(*args: Any, **named: Any) -> Any:
        with walked.open("a") as file:
            file.write(".")
        return walk(*args, **named)

    monkeypatch.setattr(repository.os, "walk", counted)
    assert len(checked(".")[1]["plans"]) == 3
    assert walked.read_text() == "."
