"""Training loops that stand in another file than the private call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPT = """\
import torch
from opacus import PrivacyEngine
from helpers import run, lossy, own, many, Joining, Turns
first = torch.utils.data.DataLoader(data, batch_size=500)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=first,
    noise_multiplier=1.0, max_grad_norm=1.0)
for epoch in range(3):
    run(model, loader, optimizer)
MANY = 1
# affidavit: adjacency=zero_out target_delta=1e-5 dataset_size=50000 epochs=3
"""
HELPERS = """\
def run(model, loader, optimizer, clears=True, epochs=1):
    for _ in range(epochs):
        turn(model, loader, optimizer, clears)

def turn(model, loader, optimizer, clears):
    for x in loader:
        loss(model(x)).backward()
        if clears:
            optimizer.step()
            optimizer.zero_grad()

def many(model, loader, optimizer):
    for _ in range(MANY):
        turn(model, loader, optimizer, True)

def lossy(model, loader, optimizer):
    for x in loader:
        value = loss(model(x))
        value.backward()
        optimizer.step()
    return value

def own(model, loader, optimizer):
    other = SGD(model.parameters())
    for x in loader:
        loss(model(x)).backward()
        other.step()

TURNS = 3

class Turns:
    def __init__(self, model, lots, optimizer):
        self.model, self.lots = model, lots
        self.step = optimizer

    def go(self):
        for _ in range(TURNS):
            for x in self.lots:
                loss(self.model(x)).backward()
                self.step.step()

class Joining(Module):
    def forward(self, x):
        return x - x.mean(0)

def plain(model, loader, optimizer):
    for x in loader:
        loss(model(x)).backward()
        if late(x):
            optimizer.step()
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(
    ("old", "new", "rules"),
    [
        ("", "", set()),
        ("optimizer)\nMANY", "optimizer, False)\nMANY", {"accumulated_lots"}),
        ("optimizer)\nMANY", "optimizer, some())\nMANY", {"accumulated_lots"}),
        ("run", "plain", {"accumulated_lots", "skipped_lots"}),
        ("from helpers import run, lossy, own, many, Joining, Turns\n",
         "import helpers\nrun = helpers.plain\n", {"accumulated_lots", "skipped_lots"}),
        ("optimizer)\nMANY", "optimizer, epochs=2)\nMANY", {"given_conflict"}),
        ("for epoch in range(3)", "for fold in folds.split(data)", set()),
        ("optimizer)\nMANY", "optimizer, epochs=3)\nMANY", {"given_conflict"}),
        (" epochs=3\n", "\n", set()),
        ("    run(model, loader, optimizer)\nMANY",
         "    pass\nTurns(model, loader, optimizer).go()\nMANY", set()),
        ("    run(model, loader, optimizer)\nMANY",
         "    pass\nTurns(model, first, optimizer).go()\nMANY", {"other_loader"}),
        ("run(model, loader", "run(model, first", {"other_loader"}),
        ("    run(", "    if evaluate(model, first) > 9:\n        break\n    run(",
         {"data_dependent_stop"}),
        ("    run(", "    if spread > 9:\n        break\n    spread = run(", set()),
        ("    run(", "    if seen > 9:\n        break\n    seen = lossy(",
         {"data_dependent_stop"}),
        ("    run(", "    own(", {"other_optimizer"}),
        ("module=model", "module=Joining()", {"joined_records"}),
    ],
)  # fmt: skip
def test_a_loop_in_another_file_is_judged_as_it_is_called(
    checked: Any, old: str, new: str, rules: set[str]
) -> None:
    Path("train.py").write_text(SCRIPT.replace(old, new))
    Path("helpers.py").write_text(HELPERS)
    _, document = checked("train.py")
    (plan,) = document["plans"]
    blocking = [item for item in plan["findings"] if item["blocks"]]
    faults = {item["rule"] for item in blocking} - {"open_use"}
    assert bool(blocking) is bool(rules)
    assert faults <= rules
    if "accumulated_lots" in faults:
        (named,) = [item for item in blocking if item["rule"] == "accumulated_lots"]
        assert "of helpers.py" in named["message"]


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ("plain(model, loader, optimizer)\n", 2),
        ("if 0:\n    plain(model, loader, optimizer)\n", 0),
        ("report(model, loader, optimizer)\n", 3),
    ],
)
def test_a_helper_that_trains_beside_the_loop_has_the_length_asked_for(
    checked: Any, beside: str, expected: int
) -> None:
    own = "    for x in loader:\n        loss(model(x)).backward()\n        optimizer.step()\n"
    script = SCRIPT.replace("    run(model, loader, optimizer)\n", own + beside)
    Path("train.py").write_text(script.replace("import run", "import plain, report, run")
                                .replace(" epochs=3\n", "\n"))  # fmt: skip
    Path("helpers.py").write_text(HELPERS + "\ndef report(model, loader, optimizer):\n    pass\n")
    code, document = checked("train.py")
    (plan,) = document["plans"]
    assert code == expected
    asked = any("of helpers.py" in item["message"] for item in plan["findings"])
    assert asked is (expected == 2)


def test_a_name_that_a_helper_does_not_bind_is_not_the_scripts(checked: Any) -> None:
    script = SCRIPT.replace("    run(", "    many(").replace(" epochs=3", "")
    Path("train.py").write_text(script)
    Path("helpers.py").write_text("from foreign import *\n" + HELPERS)
    assert checked("train.py")[0] != 0
    Path("helpers.py").write_text("MANY = 1\n" + HELPERS)
    assert checked("train.py")[0] == 0


def test_what_other_scripts_pass_to_a_helper_does_not_count(checked: Any) -> None:
    Path("train.py").write_text(SCRIPT)
    Path("helpers.py").write_text(HELPERS)
    Path("other.py").write_text("from helpers import run\nrun(m, l, o, False)\n")
    assert checked("train.py")[0] == 0
