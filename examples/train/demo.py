"""Training as certified: DP-Muon and DP-SGD on digits at one ε, beside training without privacy.

Certifies both plans of this folder, trains each exactly as certified, holds each run's record
against its certificate, and prints the accuracy of what came out on held-out digits. Runs,
keys and bundles go to ``$AFFIDAVIT_HOME``. The keys of the noise are fresh each time, so that
accuracies differ a little from run to run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

from affidavit.trainer import Labelled, digits, mlp
from affidavit.trust import home

HERE = Path(__file__).resolve().parent
HOME = home()
AFFIDAVIT = (sys.executable, "-m", "affidavit")
SHAPE = "64,seed=1"
PLANS = {"DP-Muon": ("digits-dp-muon", "hidden"), "DP-SGD": ("digits-dp-sgd", "all")}

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """Run the demonstration; 0 when both runs did what was certified."""
    os.environ["AFFIDAVIT_HOME"] = str(HOME)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small matrices: a second thread only waits
    torch.set_num_threads(1)
    if not list((HOME / "keys").glob("*.pem")):
        run("keys", "new", "--label", "demo")
    test, rows, conformant = digits("part=test"), [], True
    for name, (plan, blocks) in PLANS.items():
        console.rule(f"{name}: examples/train/{plan}.yaml", align="left")
        module, conforms = trained(plan, blocks)
        conformant &= conforms
        rows.append((name, "ε ≤ 3 at δ = 1e-5", accuracy(module, test)))
    rows.append(("Adam", "none", accuracy(without_privacy(), test)))
    table = Table("training", "privacy of a record", "accuracy on 359 held-out digits")
    for name, privacy, result in rows:
        table.add_row(name, privacy, f"{result:.1%}")
    console.print(table)
    return 0 if conformant else 1


def run(*arguments: str) -> bool:
    """One command of the command line; whether it ended with 0."""
    return subprocess.run([*AFFIDAVIT, *arguments], check=False).returncode == 0


def trained(plan: str, blocks: str) -> tuple[nn.Module, bool]:
    """The module of a certified run, and whether its record conforms."""
    file, folder = str(HERE / f"{plan}.yaml"), HOME / "demo-train" / plan
    bundle, out = folder / "bundle.json", folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if not run("certify", file, "--out", str(bundle)):
        raise SystemExit(f"{file} was not certified")
    shape = f"{SHAPE},blocks={blocks}"
    if not run(
        "train", "--certificate", str(bundle), "--plan", file, "--data", "digits:part=train",
        "--model", f"mlp:{shape}", "--out", str(out), "--microbatch", "1024",
    ):  # fmt: skip
        raise SystemExit(f"{file} was not trained")
    conforms = run(
        "conformance", "--record", str(out / "record.jsonl"), "--certificate", str(bundle)
    )
    module = mlp(shape, digits("part=train")).module
    module.load_state_dict(torch.load(out / "weights.pt", weights_only=True))
    return module, conforms


def without_privacy() -> nn.Module:
    """The same perceptron under Adam, which protects nobody."""
    data = digits("part=train")
    module = mlp(SHAPE, data).module
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    torch.manual_seed(0)
    for _ in range(100):
        inputs, labels = data.collate(torch.randperm(len(data))[:512])
        optimizer.zero_grad()
        functional.cross_entropy(module(inputs), labels).backward()
        optimizer.step()
    return module


def accuracy(module: nn.Module, data: Labelled) -> float:
    """The share of records whose class is guessed."""
    with torch.no_grad():
        guessed = module(data.inputs).argmax(1)
    return float((guessed == data.labels).double().mean())


if __name__ == "__main__":
    raise SystemExit(main())
