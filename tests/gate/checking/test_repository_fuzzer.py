"""Hostile and random repositories: a check ends at its deadline, with what it found."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from affidavit.gate.checking import repository_check
from affidavit.gate.checking.box import Limits
from tests.gate.checking.test_hanging_repositories import OPTION, PLAN, SCRIPT
from tests.support.random_seeds import seeded

LIMITS = Limits(file_seconds=0.5, total_seconds=1.0, memory_mebibytes=2048)

WEAK = PLAN.replace("epsilon: 9", "epsilon: 1")
PIECES = (
    *("[", "{", "(", '"', "'", "]", "}", ")", "\\", "#", "=", ":", ",", ".", " ", "\n", "\t", "\r"),
    *(
        "$@",
        "${A}",
        "f(){",
        "from (",
        "import ",
        "export ",
        "include '",
        "affidavit: ",
        "a=(",
        "- ",
    ),
    *(
        "&a ",
        "*a",
        "<<: *a",
        "!!x ",
        "---\n",
        "? ",
        "| ",
        "10**64",
        "0x",
        "e9",
        "-",
        "\0",
        "\ufeff",
    ),
    *("plans:", "plan", "lambda x: ", "if 1:\n ", "f(", "**", "@", "%", "\x1b[2J", "é", "\ud800"),
    *(
        "epochs",
        "steps",
        "target",
        "dataset",
        "noise_multiplier",
        "make_private",
        "train",
        "..",
        "/",
    ),
)
NAMES = (
    *("a.yaml", "b.yml", "c.json", "d.toml", "train.py", "n.ipynb", "run.sh", "Makefile", "e.PY"),
    *("pyproject.toml", "cfg.yaml", "sub/f.yaml", "sub/g.py", ".github/workflows/ci.yml"),
)
BASES = (PLAN, WEAK, SCRIPT.replace("NOISE", "1.0"), OPTION, json.dumps({"plan": {"epochs": 1}}))


def noise(draw: random.Random) -> str:
    """Return a text of repeated pieces, up to some hundred kilobytes."""
    parts = []
    for _ in range(draw.randint(1, 4)):
        unit = "".join(draw.choices(PIECES, k=draw.randint(1, 5)))
        parts.append(unit * int(10 ** draw.uniform(0, 4)))
    return "".join(parts)[: 1 << 17]


def mutated(draw: random.Random) -> str:
    """Return a plan or a script with noise put in, cut out or repeated."""
    text = draw.choice(BASES)
    for _ in range(draw.randint(1, 3)):
        start, end = sorted(draw.choices(range(len(text) + 1), k=2))
        inner = draw.choice(("", noise(draw), text[start:end] * draw.randint(2, 200)))
        text = text[:start] + inner + text[end:]
    return text[: 1 << 17]


def write_bytes(draw: random.Random, path: Path) -> None:
    raw = draw.randbytes(int(10 ** draw.uniform(0, 5)))
    path.write_bytes(raw)


def write_text(make: Callable[[random.Random], str]) -> Callable[[random.Random, Path], None]:
    def write(draw: random.Random, path: Path) -> None:
        path.write_bytes(make(draw).encode("utf-8", "surrogatepass"))

    return write


def link(draw: random.Random, path: Path) -> None:
    targets = (".", "..", "/proc/self", "/dev/zero", "/etc/passwd", "a.yaml", path.name, "../..")
    path.symlink_to(draw.choice(targets))


def write_notebook(draw: random.Random, path: Path) -> None:
    cells = [{"cell_type": "code", "source": [draw.choice((noise, mutated))(draw)]}]
    path.write_bytes(json.dumps({"cells": cells}).encode("utf-8", "surrogatepass"))


def pipe(_: random.Random, path: Path) -> None:
    os.mkfifo(path)


WRITERS = (
    *(write_text(mutated),) * 4,
    *(write_text(noise),) * 4,
    *(write_text(lambda draw: draw.choice(BASES)),) * 2,
    *(write_bytes, link, write_notebook, pipe),
)


def write_repository(draw: random.Random) -> list[str]:
    """Write a repository to the current folder, and return what to check in it."""
    for name in draw.sample(NAMES, draw.randint(1, 4)):
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        draw.choice(WRITERS)(draw, path)
    for _ in range(draw.randint(0, 2)):
        odd = bytes(draw.choices(range(1, 256), k=4)).replace(b"/", b"x") + b".yaml"
        with contextlib.suppress(FileExistsError):
            link(draw, Path(os.fsdecode(odd)))
    if draw.random() < 0.3:
        patterns = ("**/*.yaml", "*", "**", "*/*/*", "../*", "/etc/*", "sub", "train.py", "a.yaml")
        plans = json.dumps(draw.choices(patterns, k=2))
        beside = "" if draw.random() < 0.7 else noise(draw)
        text = f"[tool.affidavit]\nplans = {plans}\n{beside}"
        with contextlib.suppress(OSError):
            Path("pyproject.toml").unlink(missing_ok=True)
            Path("pyproject.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    asked = draw.choice(([], ["."], ["."], ["**/*.yaml", "*.py"], ["train.py"], ["a.yaml", "sub"]))
    return [name for name in asked if not Path(name).is_fifo()]  # a pipe that is named is read


def check_one(run: Any, folder: Path, seed: int | str) -> None:
    """Check one repository; an assertion says what is wrong with the answer."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.chdir(folder)
    asked = write_repository(random.Random(str(seed)))
    before, own = resource.getrusage(resource.RUSAGE_CHILDREN), os.times()
    result = run("check", *asked, "--format", "json")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < LIMITS.total_seconds + 1, (seed, spent)
    assert os.times().user - own.user < 1, seed
    assert "Traceback" not in result.output, seed
    assert "root:" not in result.output, seed  # of /etc/passwd
    document = json.loads(result.stdout)
    verdicts = [(plan["verdict"], plan["exit"]) for plan in document["plans"]]
    assert document["exit"] == result.exit_code, seed
    if result.exit_code == 0:
        assert verdicts, seed
        assert set(verdicts) == {("certified", 0)}, seed
    elif result.exit_code == 1:
        assert any(code == 1 for _, code in verdicts), seed
        assert all(code != 2 for _, code in verdicts), seed
    else:
        assert result.exit_code in (2, 3), seed


@pytest.fixture
def repositories(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Check this many random repositories."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(repository_check, "limits", lambda: LIMITS)

    def check(number: int) -> None:
        for place in range(number):
            check_one(run, tmp_path / "repository", seeded(f"{place}"))

    return check


def test_a_random_repository_is_checked_within_its_deadline(repositories: Any) -> None:
    repositories(40)


@pytest.mark.soak
def test_ten_thousand_random_repositories_are(repositories: Any) -> None:
    repositories(10_000)
