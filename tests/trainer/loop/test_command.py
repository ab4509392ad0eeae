"""The command: certify, train, compare; its exit codes; and a gate that needs no PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from affidavit.gate import app, invocation
from affidavit.plan import as_document
from affidavit.trainer.__main__ import app as trainer
from affidavit.trust import KeyStore
from tests.trainer.loop.small_run import DEVICE, entries_of, plan_with

OWN = """
from tests.trainer.loop.small_run import MadeUpData, SmallModel

def data(argument):
    return MadeUpData(int(argument or 60))

def model(argument, data):
    assert len(data)
    return SmallModel()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan, its certificate by a key of one's own, and adapters of one's own."""
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path / "home"))
    KeyStore(tmp_path / "home" / "keys").new("tests")
    (tmp_path / "plan.json").write_text(json.dumps(as_document(plan_with())))
    (tmp_path / "own.py").write_text(OWN)
    plan, bundle = str(tmp_path / "plan.json"), str(tmp_path / "bundle.json")
    assert CliRunner().invoke(app, ["certify", plan, "--out", bundle]).exit_code == 0
    return tmp_path


def arguments_of(*options: str) -> list[str]:
    """The arguments of a run, with ``options`` instead of some of them."""
    provided = {"--plan": "plan.json", "--certificate": "bundle.json", "--out": "run",
             "--data": "python:own:data", "--model": "python:own:model"}  # fmt: skip
    provided |= dict(zip(options[::2], options[1::2], strict=True))
    return ["--device", DEVICE, *(text for pair in provided.items() for text in pair)]


@pytest.fixture
def trained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """The trainer's command, in the folder, as it ends with these options."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    yield lambda *options: CliRunner().invoke(trainer, arguments_of(*options))
    sys.modules.pop("own", None)


def test_a_certified_plan_is_trained_and_its_record_conforms(
    folder: Path, trained: Callable[..., Result]
) -> None:
    done = trained("--checkpoint-every", "3", "--schedule", "linear")
    assert done.exit_code == 0, done.stderr
    assert "trained 12 of 12 charged steps" in done.stdout
    assert entries_of(folder / "run")[-1]["digest"] in done.stdout
    assert "loss" not in done.stdout + done.stderr
    compared = CliRunner().invoke(
        app,
        ["conformance", "--record", str(folder / "run" / "record.jsonl"),
         "--certificate", str(folder / "bundle.json"), "--json"],
    )  # fmt: skip
    assert compared.exit_code == 0
    assert json.loads(compared.stdout)["steps"]["to_charge"] == 12


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--data", "python:own:data:59"), 1, "dataset_size"),
        (("--plan", "none.yaml"), 2, "cannot read"),
        (("--plan", "/dev/zero"), 2, "too_large"),
        (("--certificate", "/dev/zero"), 1, "more than 8388608 bytes"),
        (("--status", "/dev/zero"), 1, "more than 33554432 bytes"),
        (("--data", "nowhere"), 2, "unknown data"),
        (("--data", "nowhere\x1b[2J"), 2, r"nowhere\x1b[2J"),  # no text steers the terminal
        pytest.param(
            ("--device", "cuda"),
            2,
            "finds no CUDA device",
            marks=pytest.mark.skipif(DEVICE != "cpu", reason="there is a GPU"),
        ),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_begun(
    folder: Path, trained: Callable[..., Result], options: tuple[str, ...], code: int, said: str
) -> None:
    done = trained(*options)
    assert done.exit_code == code
    assert said in done.stderr.replace("\n", " ")
    assert isinstance(done.exception, SystemExit)
    assert not (folder / "run").exists()


def test_the_gate_runs_the_trainer_with_everything_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(invocation, "run_program", lambda *program: started.append(program) or 3)
    done = CliRunner().invoke(app, ["train", "--plan", "p.yaml", "--resume", "--help"])
    assert started == [("trainer.__main__", ["--plan", "p.yaml", "--resume", "--help"])]
    assert done.exit_code == 3


MISSING = {"--plan": "none.yaml", "--certificate": "none.json", "--data": "digits",
           "--model": "mlp:32,seed=1", "--out": "run"}  # fmt: skip


@pytest.mark.parametrize(
    "code",
    [
        "from affidavit.gate import cli, runs; assert 'affidavit.trainer' not in sys.modules",
        "from affidavit.trainer import app; "
        f"app({[text for pair in MISSING.items() for text in pair]}, standalone_mode=False)",
    ],
    ids=["gate", "trainer without its files"],
)
def test_torch_is_not_loaded(code: str) -> None:
    code = f"import sys; {code}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
