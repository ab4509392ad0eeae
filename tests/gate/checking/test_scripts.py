"""Training scripts as people write them: what is read, what is refused, and what never passes."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from affidavit.importers.scripts import importer
from affidavit.plan import MalformedPlan

LENET = """\
import torch
from torchvision import datasets
from opacus import PrivacyEngine
# affidavit: adjacency=zero_out

BATCH_SIZE = 500
N_EPOCHS = 20
SIGMA = 0.5
DELTA = 1e-5

def train(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.nll_loss(model(x), y).backward()
        optimizer.step()

def main():
    data = datasets.MNIST("data", train=True)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=SIGMA,
        max_grad_norm=1.2,
    )
    for epoch in range(1, N_EPOCHS + 1):
        train(model, loader, optimizer)
        print(engine.get_epsilon(delta=DELTA))

if __name__ == "__main__":
    main()
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)


def write(text: str, name: str = "train.py") -> None:
    Path(name).write_text(textwrap.dedent(text))


def epsilon(checked: Any, name: str = "train.py") -> float:
    code, document = checked(name)
    assert code == 0, document
    return float(document["plans"][0]["result"]["epsilon"]["upper"])


def rules(document: dict[str, Any]) -> set[str]:
    return {item["rule"] for item in document["plans"][0]["findings"] if item["blocks"]}


def pld_epsilon(sigma: float, rate: float, steps: int) -> float:
    """ε at δ = 1e-5, on a grid that moves it by less than a tenth of what is allowed for."""
    step = PoissonSampledDpEvent(rate, GaussianDpEvent(sigma))
    found = PLDAccountant(value_discretization_interval=2.5e-4).compose(step, steps)
    return float(found.get_epsilon(1e-5))


def test_batch_size_and_epochs_are_the_script_s_own(checked: Any) -> None:
    write(LENET)
    small = epsilon(checked)
    assert small == pytest.approx(pld_epsilon(0.5, 1 / 120, 2400), abs=0.03)
    write(LENET.replace("= 500", "= 5000").replace("= 20\n", "= 30\n"))
    assert epsilon(checked) == pytest.approx(pld_epsilon(0.5, 1 / 12, 360), rel=0.01)


@pytest.mark.parametrize(
    "line",
    [
        "lot_size=499",
        "epochs=19",
        "noise_multiplier=0.6",
        "target_delta=1e-6",
        "dataset_size=70000",
    ],
)
def test_a_statement_that_differs_from_the_script_is_an_error(checked: Any, line: str) -> None:
    write(f"{LENET}# affidavit: {line}\n")
    code, document = checked("train.py")
    assert (code, rules(document)) == (2, {"given_conflict"})
    key = "noise_multiplier" if "noise" in line else line.partition("=")[0]
    assert key in document["plans"][0]["findings"][0]["message"]


def test_fields_of_pyproject_that_differ_are_an_error(checked: Any) -> None:
    write(LENET)
    Path("pyproject.toml").write_text('[tool.affidavit.given."train.py"]\nepochs = 2\n')
    code, document = checked("train.py")
    assert (code, rules(document)) == (2, {"given_conflict"})


@pytest.mark.soak
def test_a_rate_that_opacus_rounds_is_the_rounded_one(checked: Any) -> None:
    """q = 1/⌈60000/64⌉ over 938 steps a pass; with drop_last the last lot does not count."""
    write(LENET.replace("= 500", "= 64").replace("= 0.5", "= 1.0"))
    assert epsilon(checked) == pytest.approx(pld_epsilon(1.0, 1 / 938, 18760), abs=0.02)
    write(LENET.replace("= 500", "= 25_000").replace("shuffle=True", "drop_last=True"))
    assert epsilon(checked) == pytest.approx(pld_epsilon(0.5, 1 / 2, 40), rel=0.02)


def test_a_private_divisor_is_never_certified_under_add_remove(checked: Any) -> None:
    text = LENET.replace("adjacency=zero_out", "adjacency=add_remove")
    write(text)
    code, document = checked("train.py")
    assert (code, rules(document)) == (1, {"private_divisor"})
    assert document["plans"][0]["verdict"] == "refused"
    guarded = text.replace("from opacus", "from affidavit import guard\nfrom opacus").replace(
        "    for epoch", "    guard.opacus(engine, optimizer, loader, 'bundle.json')\n    for epoch"
    )
    write(guarded)
    assert epsilon(checked) > 0
    for unguarded in (
        guarded.replace("    guard.opacus", "    if debug: guard.opacus"),
        guarded.replace("from affidavit import guard", "from mine import guard"),
    ):
        write(unguarded)
        assert rules(checked("train.py")[1]) == {"private_divisor"}


def test_lots_that_are_not_poisson_are_not_accounted_as_poisson(checked: Any) -> None:
    text = LENET.replace("max_grad_norm", "poisson_sampling=False,\n        max_grad_norm")
    write(text)
    shuffled = epsilon(checked)
    write(LENET)
    assert shuffled > 3 * epsilon(checked)
    for scheme in ("poisson", "b_min_sep"):
        write(text + f"# affidavit: scheme={scheme}\n")
        assert rules(checked("train.py")[1]) == {"given_conflict"}
    write(text.replace("poisson_sampling=False", "poisson_sampling=flag()"))
    assert checked("train.py")[0] == 2


CALIBRATED = LENET.replace("make_private(", "make_private_with_epsilon(").replace(
    "noise_multiplier=SIGMA", "target_epsilon=4.0, target_delta=DELTA, epochs=N_EPOCHS"
)
CALIBRATED = CALIBRATED.replace("= 500", "= 6000").replace("= 20\n", "= 2\n")


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_noise_that_opacus_calibrates_is_judged_as_opacus_calibrates_it(checked: Any) -> None:
    from opacus.accountants.utils import get_noise_multiplier

    write(CALIBRATED)
    code, document = checked("train.py")
    assert code == 0, document
    sigma = get_noise_multiplier(
        target_epsilon=4.0, target_delta=1e-5, sample_rate=1 / 10, epochs=2, accountant="prv"
    )
    (release,) = document["plans"][0]["result"]["noise_multiplier"]["releases"]
    assert release["given"] == sigma
    # The central limit lies below the truth, so the noise that it calibrates is too little.
    write(CALIBRATED.replace("PrivacyEngine()", "PrivacyEngine(accountant='gdp')"))
    assert rules(checked("train.py")[1]) == {"under_noised"}
    # The loop that runs counts, not the epochs that the calibration was told.
    write(CALIBRATED.replace("range(1, N_EPOCHS + 1)", "range(3 * N_EPOCHS)"))
    assert rules(checked("train.py")[1]) == {"under_noised"}


@pytest.mark.parametrize(
    "change",
    [
        ("    main()", "    for seed in range(5):\n        main()"),
        (
            "    engine = P",
            "    for k in clients:\n        engine = PrivacyEngine()\n    engine = P",
        ),
        ("    main()", "    import flwr  # affidavit: epochs=21\n    flwr.start(client_fn=main)"),
    ],
)
def test_an_accountant_that_starts_anew_is_named(checked: Any, change: tuple[str, str]) -> None:
    write(LENET.replace(*change))
    code, document = checked("train.py")
    assert (code, "accountant_reset" in rules(document)) == (1, True)


SETTINGS = {
    "argparse": (
        "import argparse\n"
        "def get_args():\n"
        "    parser = argparse.ArgumentParser()\n"
        "    parser.add_argument('--noise', type=float, default=0.5)\n"
        "    return parser.parse_args()\n"
        "cfg = get_args()\n",
        "cfg.noise",
    ),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass Config:\n    noise: float = 0.5\n"
        "cfg = Config()\n",
        "cfg.noise",
    ),
    "dictionary": ("cfg = {'dp': {'noise': 1 / 2}}\n", "cfg['dp']['noise']"),
    "json": ("import json\nwith open('cfg.json') as f:\n    cfg = json.load(f)\n", "cfg['noise']"),
    "yaml": ("import yaml\ncfg = yaml.safe_load(open('cfg.yaml'))\n", "cfg['dp']['noise']"),
    "omegaconf": ("from omegaconf import OmegaConf\ncfg = OmegaConf.load('cfg.yaml')\n",
                  "cfg.dp.noise"),
    "flags": (
        "from absl import flags\nflags.DEFINE_float('noise', 0.5, 'Noise.')\n"
        "FLAGS = flags.FLAGS\n",
        "FLAGS.noise",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SETTINGS)
def test_settings_are_read_from_where_they_are(checked: Any, kind: str) -> None:
    before, noise = SETTINGS[kind]
    Path("cfg.json").write_text(json.dumps({"noise": 0.5}))
    Path("cfg.yaml").write_text("dp: {noise: 0.5}\n")
    write(LENET)
    expected = epsilon(checked)
    write(LENET.replace("SIGMA = 0.5\n", before).replace("=SIGMA", f"={noise}"))
    assert epsilon(checked) == expected


def test_a_number_that_is_unknown_is_named_with_the_line_to_add(checked: Any) -> None:
    write(LENET.replace("BATCH_SIZE = 500", "BATCH_SIZE = pick()"))
    code, document = checked("train.py")
    (finding,) = [item for item in document["plans"][0]["findings"] if item["blocks"]]
    assert code == 2
    assert "BATCH_SIZE" in finding["message"]
    assert "# affidavit: lot_size=" in finding["remedy"]
    write(LENET.replace("BATCH_SIZE = 500", "BATCH_SIZE = pick()") + "# affidavit: lot_size=500\n")
    assert epsilon(checked) > 0


def test_scripts_and_notebooks_in_folders_are_looked_into(checked: Any) -> None:
    Path("src").mkdir()
    write(LENET, "src/train.py")
    write("print('nothing private')\n", "src/other.py")
    cells = [
        {"cell_type": "markdown", "source": ["# text"]},
        {"cell_type": "code", "source": ["%pip install opacus\n", "!ls\n"]},
        {"cell_type": "code", "source": LENET.splitlines(keepends=True)},
    ]
    Path("src/lenet.ipynb").write_text(json.dumps({"cells": cells}))
    code, document = checked(".")
    assert code == 0
    assert {plan["file"] for plan in document["plans"]} == {"src/train.py", "src/lenet.ipynb"}


def test_a_script_without_such_a_call_is_not_said_to_be_without_privacy(checked: Any) -> None:
    write("from privatise import private\nprivate(model, noise_multiplier=1.0)\n")
    code, document = checked("train.py")
    assert (code, rules(document)) == (2, {"no_plan"})
    assert "that Affidavit reads" in document["plans"][0]["findings"][0]["message"]


def test_a_comment_names_every_plan_and_what_blocks_it(run: Any) -> None:
    write(LENET.replace("adjacency=zero_out", "adjacency=add_remove"), "a_|_<b>.py")
    write(LENET, "right.py")
    result = run("check", "a_|_<b>.py", "right.py", "--report", "markdown=comment.md")
    assert result.exit_code == 1
    first, *lines = Path("comment.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert first.startswith("<!--")
    assert len(rows) == 4
    assert all(row.replace("\\|", "").count("|") == 3 for row in rows)
    assert "<b>" not in "".join(lines)
    assert any("divisor" in line for line in lines if line.startswith("- "))


BRANCHES = """
from opacus import PrivacyEngine
engine = PrivacyEngine()
if config["epsilon"] is not None:
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, target_delta=1e-5,
        target_epsilon=8.0, epochs=3, max_grad_norm=1.0)
else:
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader,
        noise_multiplier=config["noise"], max_grad_norm=1.0)
for epoch in range(3):
    for batch in loader:
        loss(batch).backward()
        optimizer.step()
# affidavit: dataset_size=50000 lot_size=500 adjacency=zero_out target_delta=1e-5
"""
NOISE = "# affidavit: noise_multiplier=1.0 target_epsilon=8\n"


@pytest.mark.parametrize(
    ("text", "code", "rule"),
    [
        (BRANCHES, 2, "not_imported"),
        (BRANCHES + NOISE, 0, None),
        (BRANCHES.replace('config["noise"]', "0.3") + NOISE, 2, "given_conflict"),
        (BRANCHES.replace("\nelse:", "\nif True:") + NOISE, 2, "given_conflict"),
    ],
)
def test_of_calls_that_exclude_each_other_one_noise_is_stated(
    checked: Any, text: str, code: int, rule: str | None
) -> None:
    Path("train.py").write_text(text)
    exit_code, document = checked("train.py")
    (plan,) = document["plans"]
    blocking = {item["rule"] for item in plan["findings"] if item["blocks"]}
    assert (exit_code, blocking) == (code, set() if rule is None else {rule}), plan["findings"]


ENGINE = """
from opacus import PrivacyEngine
from torch.utils.data import DataLoader
{made}
def run(train_loader, epochs=3):
    engine = {engine}
    {before}model, optimizer, train_loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=train_loader,
        noise_multiplier=1.1, max_grad_norm=1.0)
    {after}
    for epoch in range(epochs):
        for batch in train_loader:
            loss(batch).backward()
            optimizer.step()
loader = DataLoader(load(), batch_size=500)
run(loader)
# affidavit: dataset_size=50000 adjacency=zero_out target_delta=1e-5 target_epsilon=8
"""
MAKER = "def make():\n    return PrivacyEngine(accountant='rdp')\n"
OTHER = "def make():\n    return Cheap(PrivacyEngine())\n"
GOES_ON = "except Exception as error:\n        print(error)"
STOPS = "except ValueError as error:\n        print(error)\n        raise"


@pytest.mark.parametrize(
    ("form", "code", "rule"),
    [
        ({"engine": "PrivacyEngine()"}, 0, None),
        ({"engine": "make()", "made": MAKER}, 0, None),
        ({"engine": "make()", "made": OTHER}, 3, "open_use"),
        ({"engine": "PrivacyEngine()", "before": "try:\n        ", "after": GOES_ON}, 1,
         "private_call_skipped"),
        ({"engine": "PrivacyEngine()", "before": "try:\n        ", "after": STOPS}, 0, None),
    ],
)  # fmt: skip
def test_engines_of_functions_and_loaders_of_callers_are_followed(
    checked: Any, form: dict[str, str], code: int, rule: str | None
) -> None:
    Path("train.py").write_text(ENGINE.format(**{"made": "", "before": "", "after": ""} | form))
    exit_code, document = checked("train.py")
    (plan,) = document["plans"]
    blocking = {item["rule"] for item in plan["findings"] if item["blocks"]}
    assert (exit_code, blocking) == (code, set() if rule is None else {rule}), plan["findings"]
    if code == 0:
        truth = pld_epsilon(1.1, 0.01, 300)
        assert plan["result"]["epsilon"]["upper"] == pytest.approx(truth, rel=0.01)


def test_a_delta_that_cannot_be_read_is_asked_for_and_not_answered(checked: Any) -> None:
    script = (
        "from opacus import PrivacyEngine\nfrom torch.utils.data import DataLoader\n"
        "loader = DataLoader(data, batch_size=64)\nengine = PrivacyEngine()\n"
        "model, optimizer, loader = engine.make_private(module=m, optimizer=o,\n"
        "    data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)\n"
        "for e in range(3):\n    for x in loader:\n        f(x).backward()\n"
        "        optimizer.step()\nprint(engine.get_epsilon(delta=1 / size))\n"
        "# affidavit: dataset_size=60000 adjacency=zero_out target_epsilon=2\n"
    )
    Path("train.py").write_text(script)
    code, document = checked("train.py")
    (finding,) = [f for f in document["plans"][0]["findings"] if f["blocks"]]
    assert (code, finding["pointer"]) == (2, "/target/delta")
    assert "1 / size" in finding["message"]
    Path("train.py").write_text(script + "# affidavit: target_delta=1e-6\n")
    assert checked("train.py")[0] == 0


def test_a_number_in_one_place_of_a_script_is_fixed_there(run: Any) -> None:
    weak = LENET.replace("zero_out", "zero_out target_epsilon=4")
    write(weak)
    assert run("check", "train.py").exit_code == 1
    assert run("check", "train.py", "--fix").exit_code == 0
    lines = zip(weak.splitlines(), Path("train.py").read_text().splitlines(), strict=True)
    ((old, new),) = [(old, new) for old, new in lines if old != new]
    assert old == "SIGMA = 0.5"
    assert float(new.removeprefix("SIGMA = ")) > 0.5


@pytest.mark.parametrize(
    "change",
    [
        ("SIGMA = 0.5", "SIGMA = 1.0 / 2"),
        ("SIGMA = 0.5", "SIGMA = 0.5 * 0.5 * 4 * 0.5"),
    ],
)
def test_a_number_that_stands_in_no_single_place_is_left_alone(
    run: Any, change: tuple[str, str]
) -> None:
    weak = LENET.replace("zero_out", "zero_out target_epsilon=4").replace(*change)
    write(weak)
    assert run("check", "train.py", "--fix").exit_code == 1
    assert Path("train.py").read_text() == weak


def test_the_line_that_moved_epsilon_is_that_of_the_number(run: Any) -> None:
    write(LENET, "before.py")
    write(
        LENET.replace("N_EPOCHS = 20", "N_EPOCHS = 40").replace(
            "BATCH_SIZE = 500", "BATCH_SIZE = 700"
        )
    )
    told = run("check", "train.py", "--diff", "before.py").stderr
    moved = {line.split(":")[0].strip(): line for line in told.splitlines() if " alone: " in line}
    lines = LENET.splitlines()
    for pointer, text in (
        ("/steps", "N_EPOCHS = 20"),
        ("/sampling/probability", "BATCH_SIZE = 500"),
    ):
        assert f"(line {lines.index(text) + 1})" in moved[pointer]


def test_a_folder_tells_which_scripts_it_looked_into(run: Any) -> None:
    write("import opacus\n", "model.py")
    write("x = 1\n", "other.py")
    assert "scripts searched: 2" in run("check", ".").stderr
    write(LENET)
    told = run("check", ".").stderr
    assert "scripts searched: 3" in told
    assert "train.py" in told.splitlines()[-1]


AT_EPSILON_8 = """
from opacus import PrivacyEngine
from torch.utils.data import DataLoader
loader = DataLoader(data, batch_size=500)
model, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=loader, target_delta=1e-5,
    target_epsilon=8.0, epochs=3, max_grad_norm=1.0)
for epoch in range(3):
    for batch in loader:
        loss(batch).backward()
        optimizer.step()
# affidavit: dataset_size=50000 adjacency=zero_out
"""


@pytest.mark.parametrize(
    ("noise", "rule"), [("5.0", "given_conflict"), ("0.5", "under_noised")], ids=["more", "less"]
)
def test_a_statement_of_more_noise_than_opacus_calibrates_is_refused(
    checked: Any, noise: str, rule: str
) -> None:
    Path("train.py").write_text(f"{AT_EPSILON_8}# affidavit: noise_multiplier={noise}\n")
    _, document = checked("train.py")
    (plan,) = document["plans"]
    assert {item["rule"] for item in plan["findings"] if item["blocks"]} == {rule}


SWEEP = """
from tensorflow_privacy import DPKerasSGDOptimizer
EPSILONS = [1, 2, 5, 10]
for eps in EPSILONS:
    optimizer = DPKerasSGDOptimizer(
        l2_norm_clip=1.0, noise_multiplier=1.0 / eps, num_microbatches=64)
    model.compile(optimizer=optimizer)
    model.fit(x, y, epochs=30, batch_size=64)
# affidavit: noise_multiplier=0.1 dataset_size=32000 adjacency=zero_out target_delta=1e-5
"""


@pytest.mark.parametrize(
    ("text", "epochs"),
    [
        (SWEEP, 4 * 30),
        (SWEEP.replace("in EPSILONS", "in (1, 2, 5)"), 3 * 30),
        (SWEEP.replace("for eps", "EPSILONS.append(3)\nfor eps"), None),
    ],
    ids=["named", "written", "changed"],
)
def test_a_loop_over_a_written_list_repeats_the_training(text: str, epochs: int | None) -> None:
    partial = importer.read(text.encode())
    assert partial is not None
    assert partial.data.get("epochs") == epochs


TWICE = """
import torch
from fastDP import PrivacyEngine
def train():
    loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = PrivacyEngine(model, batch_size=64, sample_size=50000, noise_multiplier=6.0)
    engine.attach(optimizer)
    for epoch in range(1):
        for batch in loader:
            loss(batch).backward()
            optimizer.step()
def timed():
    engine = PrivacyEngine(model, batch_size=64, sample_size=50000, noise_multiplier=0.1)
if __name__ == "__main__":
    train()
# affidavit: adjacency=zero_out target_delta=1e-5
"""


@pytest.mark.parametrize(
    ("added", "code"),
    [
        ("", 0),
        ("timed()", 3),
        ("[timed][0]()", 3),
        ("import __main__\ngetattr(__main__, 'timed')()", 3),
        ("def other():\n    timed()\nother()", 3),
        ("def other():\n    timed()\n", 0),
    ],
    ids=["unused", "called", "listed", "by name", "through another", "by an unused one"],
)
def test_a_private_call_in_a_function_that_nothing_mentions_is_left_out(
    checked: Any, added: str, code: int
) -> None:
    Path("train.py").write_text(TWICE + added)
    assert checked("train.py")[0] == code


def test_a_script_that_is_not_python_is_refused_on_its_line(checked: Any) -> None:
    Path("train.py").write_text("from opacus import PrivacyEngine\nmake_private(a=1 b=2)\n")
    code, document = checked("train.py")
    (finding,) = document["plans"][0]["findings"]
    assert (code, finding["rule"], finding["line"]) == (2, "not_imported", 2)


@pytest.mark.parametrize("place", ["opacus.py", "opacus/__init__.py", "sub/opacus.py", "torch.py"])
def test_a_file_that_hides_the_package_is_not_the_library(place: str, tmp_path: Path) -> None:
    text = "import sys\nsys.path.insert(0, 'sub')\n" + LENET
    partial = importer.read(text.encode(), tmp_path)
    assert partial is not None
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("class PrivacyEngine: ...\n")
    with pytest.raises(MalformedPlan, match="in place of the package"):
        importer.read(text.encode(), tmp_path)
