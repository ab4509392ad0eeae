"""A search without its trainers: how many trials there are, and what is left of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from affidavit.evidence import SearchOpening
from affidavit.plan import Selection
from affidavit.trainer import search
from tests.trainer.loop.small_run import bundle_of, plan_with

SELECTION = {"kind": "repeat_and_select", "name": "s", "distribution": "geometric", "mean": 8}


class Trainers:
    """What stands in for the trainer: the loss of a trial, or None where it dies on its way."""

    def __init__(self, losses: Any) -> None:
        self.losses, self.begun, self.opened = losses, [], []

    def __call__(self, command: list[str], **_: Any) -> None:
        (out,) = (Path(word[6:]) for word in command if word.startswith("--out="))
        (trial,) = (word[8:] for word in command if word.startswith("--trial="))
        self.opened.append(json.loads(Path(trial).read_text())["search"])
        loss = self.losses(len(self.begun))
        self.begun.append((int(out.name), "--resume" in command))
        for name in ("record.jsonl", "weights.pt", "checkpoint.pt"):
            (out / name).write_text(f"{out.name}\n")
        if loss is not None:
            (out / "score").write_text(repr(loss))


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    plan = plan_with(extra=[SELECTION])
    (tmp_path / "plan.json").write_text(plan.model_dump_json(exclude_none=True, by_alias=True))
    (tmp_path / "bundle.json").write_bytes(bundle_of(plan))
    (tmp_path / "choices.json").write_text('{"learning_rate": [0.1, 1.0], "warmup": [0, 3]}')
    options = {"certificate": "bundle.json", "plan": "plan.json", "choices": "choices.json"}
    return [
        *(f"--{name}={tmp_path / file}" for name, file in options.items()),
        *("--data=d", "--model=m", "--score=digits", f"--out={tmp_path / 'out'}"),
    ]


def run(arguments: list[str], trainers: Trainers, patch: pytest.MonkeyPatch) -> Any:
    patch.delenv("RAY_ADDRESS", raising=False)
    patch.setattr(subprocess, "run", trainers)
    return CliRunner().invoke(search.app, arguments)


def opening_in(out: Path) -> SearchOpening:
    return SearchOpening.read(json.loads((out / "search.json").read_text()))


def test_only_the_best_is_left(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    trainers = Trainers(lambda number: abs(number - 1) + 0.5)
    ended = run(arguments, trainers, monkeypatch)
    assert ended.exit_code == 0, ended.output
    opening = opening_in(out)
    drawn = opening.trials(Selection.model_validate(SELECTION))
    assert [number for number, _ in trainers.begun] == [*range(drawn)]
    assert set(trainers.opened) == {opening.digest}  # it was there before the first
    assert opening.digest in ended.output
    assert opening.draw not in ended.output
    assert {path.name for path in out.iterdir()} == {"search.json", "run"}
    assert (out / "run" / "weights.pt").read_text() == f"{min(1, drawn - 1)}\n"
    assert not (out / "run" / "score").exists()
    assert (out / "search.json").stat().st_mode & 0o077 == 0
    assert run(arguments, trainers, monkeypatch).exit_code == 2  # it is over


def test_an_interrupted_search_goes_on_and_draws_nothing_again(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Trainers(lambda _: None)
    assert run(arguments, first, monkeypatch).exit_code == 1
    opening = opening_in(tmp_path / "out")
    (tmp_path / "out" / "trials" / "0" / "record.jsonl").write_text("")  # it had not begun
    again = Trainers(lambda _: 1.0)
    assert run(arguments, again, monkeypatch).exit_code == 0
    assert opening_in(tmp_path / "out") == opening
    assert again.begun == [(number, number > 0) for number, _ in first.begun]


def test_a_search_is_certified_as_one(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.json").write_text(
        plan_with().model_dump_json(exclude_none=True, by_alias=True)
    )
    trainers = Trainers(lambda _: 1.0)
    assert run(arguments, trainers, monkeypatch).exit_code == 2
    assert not trainers.begun


def test_a_certificate_that_cannot_be_read_is_said_to_be_one(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bundle.json").write_text('{"envelope": {}}')
    trainers = Trainers(lambda _: 1.0)
    stopped = run(arguments, trainers, monkeypatch)
    assert stopped.exit_code == 2
    assert "cannot read the certificate" in " ".join(stopped.stderr.split())
    assert trainers.begun == []


def test_what_a_trainer_refused_is_shown_line_by_line(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, stdout: Any, **__: Any) -> None:
        stdout.write(b"Usage: affidavit train\nNo such option: --a\x1b")

    shown = run(arguments, refused, monkeypatch).stderr  # type: ignore[arg-type]
    assert "train\nNo such option: --a\\x1b" in shown


@pytest.mark.soak
def test_the_command_line_hands_a_search_to_its_program() -> None:
    command = [sys.executable, "-m", "affidavit", "search", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (told.returncode, "--choices" in told.stdout) == (0, True), told.stderr
