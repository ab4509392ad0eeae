"""Hostile and random repositories: a check ends at its deadline, with what it found."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from affidavit.gate import check as module
from affidavit.gate.check import FORMATS, check
from affidavit.gate.checking.box import Begun, Ended, Limits, run_in_box
from affidavit.gate.checking.cache import Evaluator
from affidavit.gate.checking.repository_check import SEARCH, RepositoryCheck
from tests.gate.checking.test_hanging_repositories import OPTION, PLAN, SCRIPT
from tests.support.random_seeds import seeded

IN_A_BOX = True

LIMITS = Limits(file_seconds=0.1, memory_mebibytes=2048)
TOGETHER = 50
"""Repositories that a child process reads."""

EXACT = """\
version: 1
dataset: {size: 1000}
adjacency: add_remove
sampling: {scheme: full_batch}
steps: 10
releases:
  - {name: all, clip_norm: 1, noise_multiplier: 20}
target: {epsilon: 8, delta: 1.0e-5}
"""
"""A plan that is accounted in milliseconds."""
WEAK = EXACT.replace("epsilon: 8", "epsilon: 0.1")
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
BASES = (
    PLAN,
    EXACT,
    EXACT,
    WEAK,
    SCRIPT.replace("NOISE", "1.0"),
    OPTION,
    json.dumps({"plan": {"epochs": 1}}),
)


def noise(draw: random.Random) -> str:
    """Return a text of repeated pieces, up to some hundred kilobytes."""
    parts = []
    for _ in range(draw.randint(1, 4)):
        unit = "".join(draw.choices(PIECES, k=draw.randint(1, 5)))
        parts.append(unit * int(10 ** draw.uniform(0, 4)))
    return "".join(parts)[: 1 << 17]


def mutated(draw: random.Random) -> str:
    """Return a plan or a script with a piece or noise put in, cut out or repeated."""
    text = draw.choice(BASES)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        start, end = sorted(draw.choices(range(len(text) + 1), k=2))
        if draw.random() < 0.7:
            end = min(end, start + draw.randint(0, 3))
        inner = draw.choice(("", draw.choice(PIECES), noise(draw), text[start:end] * 100))
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
    *(write_text(mutated),) * 5,
    *(write_text(noise),) * 2,
    *(write_text(lambda draw: draw.choice(BASES)),) * 4,
    *(write_bytes, link, write_notebook, pipe),
)


@dataclass(frozen=True)
class Repository:
    """A random repository, the names to check in it, and whether a weak plan is among its files."""

    folder: Path
    names: list[str]
    is_weak: bool


def write_repository(draw: random.Random, folder: Path) -> Repository:
    """Write a repository, and choose what to check in it."""
    folder.mkdir()
    os.chdir(folder)
    for name in draw.sample(NAMES, draw.randint(1, 4)):
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        draw.choice(WRITERS)(draw, path)
    for _ in range(draw.choice((0, 0, 1, 2))):
        odd = bytes(draw.choices(range(1, 256), k=4)).replace(b"/", b"x") + b".yaml"
        with contextlib.suppress(FileExistsError):
            draw.choice((link, write_text(mutated)))(draw, Path(os.fsdecode(odd)))
    has_settings = draw.random() < 0.3
    if has_settings:
        patterns = ("**/*.yaml", "*", "**", "*/*/*", "../*", "/etc/*", "sub", "train.py", "a.yaml")
        plans = json.dumps(draw.choices(patterns, k=2))
        beside = "" if draw.random() < 0.7 else noise(draw)
        text = f"[tool.affidavit]\nplans = {plans}\n{beside}"
        with contextlib.suppress(OSError):
            Path("pyproject.toml").unlink(missing_ok=True)
            Path("pyproject.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    is_weak = draw.random() < 0.3
    if is_weak:
        Path("sub").mkdir(exist_ok=True)
        Path("sub/weak.yaml").write_text(WEAK)
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_fifo()]
    one = [draw.choice(files)] if files else ["."]
    names = draw.choice((["."], ["."], ["."], one, [] if has_settings else ["."]))
    return Repository(folder, names, is_weak=is_weak and names == ["."])


# ---- their check ---------------------------------------------------------------------


def told_in(repositories: Sequence[Repository]) -> dict[Path, list[Any]]:
    """Return what the child process tells of each repository.

    One child reads repository after repository, where each would take a fork of its own: copying
    the tables of the tests' memory would take ten times as long as the checks.
    """
    told: dict[Path, list[Any]] = {each.folder: [] for each in repositories}

    def work(done: frozenset[str]) -> Iterator[Any]:
        yield LIMITS
        for each in repositories:
            if any(isinstance(item, Ended) and item.is_over for item in told[each.folder]):
                continue
            os.chdir(each.folder)
            place = f"{each.folder}/"
            own = frozenset(item.removeprefix(place) for item in done if item.startswith(place))
            check = RepositoryCheck(each.names, Evaluator(False, None, None), None, False, None)
            for message in check(own):
                if isinstance(message, Begun):
                    yield each.folder, time.process_time(), message.item
                    yield Begun(place + message.item)
                elif not isinstance(message, Limits):
                    yield each.folder, message

    last: tuple[Path, float, str] | None = None
    before = time_of_children()
    for message in run_in_box(work):
        match message:
            case (folder, float(at), str(item)):
                assert last is None or at - last[1] < LIMITS.file_seconds + 1, last
                last = (folder, at, item)
            case (folder, inner):
                told[folder].append(inner)
            case Ended(why=why):
                assert last is not None, why
                folder, at, item = last
                assert time_of_children() - before - at < LIMITS.file_seconds + 1, last
                told[folder].append(Ended(item, why, is_over=item == SEARCH))
                last, before = None, time_of_children()
    return told


def time_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_check(names: list[str], format_: str, report: Path) -> tuple[int, str]:
    """Run the command without its parser of options, which takes longer than most repositories.

    Returns the exit code, and standard output with standard error.
    """
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        with pytest.raises(typer.Exit) as ended:
            check(names, format_=format_, report=[f"json={report}"])
        stream.flush()
    return ended.value.exit_code, stream.buffer.getvalue().decode()


def exit_of(repository: Repository, format_: str, report: Path) -> int:
    """Tell what was found in a repository; an assertion says what is wrong with it."""
    os.chdir(repository.folder)
    before = time.process_time()
    code, output = run_check(repository.names, format_, report)
    assert time.process_time() - before < 1
    for text in ("Traceback", "internal error", "root:", "\x1b"):  # the third of /etc/passwd
        assert text not in output
    if format_ != "github":
        assert not re.search(r"^\s*::", output, re.M)  # a command to the host of a workflow
    document = json.loads(report.read_text())
    verdicts = [(plan["verdict"], plan["exit"]) for plan in document["plans"]]
    assert document["exit"] == code
    if code == 0:
        assert verdicts
        assert set(verdicts) == {("certified", 0)}
        assert not repository.is_weak
    elif code == 1:
        assert any(each == 1 for _, each in verdicts)
        assert all(each != 2 for _, each in verdicts)
    else:
        assert code in (2, 3)
    return int(code)


@pytest.fixture
def repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Check this many random repositories; returns how often each exit code was seen."""
    monkeypatch.chdir(tmp_path)

    def check_all(number: int) -> Counter[int]:
        codes: Counter[int] = Counter()
        for first in range(0, number, TOGETHER):
            seeds = [seeded(f"{place}") for place in range(first, min(first + TOGETHER, number))]
            draws = {tmp_path / f"{seed}": random.Random(str(seed)) for seed in seeds}
            several = [write_repository(draw, folder) for folder, draw in draws.items()]
            told = told_in(several)
            for each in several:
                messages = iter(told[each.folder])
                monkeypatch.setattr(module, "run_in_box", lambda *_, told=messages, **__: told)
                code = exit_of(each, draws[each.folder].choice(FORMATS), tmp_path / "report.json")
                codes[code] += 1
                shutil.rmtree(each.folder)
        return codes

    return check_all


def test_a_random_repository_is_checked_within_its_deadline(repositories: Any) -> None:
    assert repositories(100).keys() >= {0, 1, 2}


@pytest.mark.soak
def test_ten_thousand_random_repositories_are(repositories: Any) -> None:
    repositories(10_000)
