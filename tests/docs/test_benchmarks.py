"""The pages of benchmarks have a place for each bench, which measuring fills, and it alone."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.document_blocks import ROOT

PAGES = ("docs/explanation/benchmarks.md", "contributing/benchmarks.md")
MARKER = re.compile(r"<!-- (bench|end): ([\w-]+) -->")
MEASURED = re.compile(r"\d(\.\d+)? ?(ms|MiB|times|x)\b|\d ?s\b|median \d|load \d")
TABLE = "| a | b |\n|---|---|\n| 1 | 2 |"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``bench.all``, which keeps what is printed in ``tmp_path``."""
    monkeypatch.syspath_prepend(ROOT)
    result = importlib.import_module("bench.all")
    monkeypatch.setattr(result, "KEPT", tmp_path / "kept")
    return result


@pytest.fixture
def sections(bench: Any) -> Any:
    """``bench.sections``."""
    del bench  # it makes the folder importable
    return importlib.import_module("bench.sections")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page with a place for the bench ``some``."""
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- bench: some -->\nold\n<!-- end: some -->\nafter\n")
    return path


def ran(bench: Any, page: Path, program: str, minutes: float = 1.0) -> str:
    one = bench.Bench(name="some", command=("-c", program), minutes=minutes, document=page)
    return str(bench.measure(one))


def test_every_bench_has_its_place_and_its_program(bench: Any) -> None:
    expected = [(str(bench.document.relative_to(ROOT)), bench.name) for bench in bench.BENCHES]
    result = [
        (page, name)
        for page in PAGES
        for kind, name in MARKER.findall((ROOT / page).read_text(encoding="utf-8"))
        if kind == "bench"
    ]
    assert sorted(result) == sorted(expected)
    for item in bench.BENCHES:
        assert bench.section(item.document.read_text(encoding="utf-8"), item.name).strip()
        program = item.command[item.command[0] == "-m"]
        path = program if program.endswith(".py") else f"{program.replace('.', '/')}.py"
        assert (ROOT / path).exists()


@pytest.mark.parametrize("page", PAGES)
def test_what_was_measured_stands_between_markers_only(page: str) -> None:
    """So that measuring anew leaves no old figure behind; what is aimed at may be anywhere."""
    text = (ROOT / page).read_text(encoding="utf-8")
    prose = re.sub(r"<!-- bench: .*?<!-- end: [\w-]+ -->", "", text, flags=re.DOTALL)
    assert "\n|" not in prose
    for paragraph in prose.split("\n\n"):
        stated = re.sub(r"Goals?:.*", "", paragraph, flags=re.DOTALL)
        assert not MEASURED.search(stated), paragraph


def test_what_is_printed_takes_the_place_of_what_was(bench: Any, page: Path) -> None:
    assert ran(bench, page, f"print({TABLE!r})") == ""
    text = page.read_text()
    assert text.startswith("before\n<!-- bench: some -->\n20")
    assert text.endswith(f"\n\n{TABLE}\n\n<!-- end: some -->\nafter\n")
    assert f"Python {sys.version.split()[0]}" in text
    assert "old" not in text


@pytest.mark.parametrize(
    ("program", "minutes", "why"),
    [
        ("print('no table')", 1.0, "printed no table"),
        (f"print({TABLE!r}); raise SystemExit(3)", 1.0, "ended with 3"),
        (
            # Who runs the tests may ignore the interrupt that is sent first, and so would it.
            "import signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); "
            f"print({TABLE!r}); time.sleep(60)",
            0.02,
            "stopped after 0.02 minutes",
        ),
    ],
    ids=["no table", "failed", "too long"],
)
def test_a_bench_that_did_not_end_well_changes_nothing(
    bench: Any, page: Path, program: str, minutes: float, why: str
) -> None:
    before = page.read_text()
    assert ran(bench, page, program, minutes).startswith(why)
    assert page.read_text() == before


RATIOS = """
| a / b | median | least | most |
|---|---:|---:|---:|
| cold | {} |
| warm | 0.37 | 0.24 | 0.48 |

| step | over plain | spread |
|---|---|---|
| cold | 1.1 | {} |
"""


def test_what_became_slower_by_more_than_the_spread_is_told(
    bench: Any, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for table in (
        RATIOS.format("0.72 | 0.43 | 0.90", "1.05-1.20"),
        RATIOS.format("0.95 | 0.91 | 0.99", "1.19-1.50"),
        RATIOS.format("0.80 | 0.79 | 0.95", "1.51-1.60"),
    ):
        assert ran(bench, page, f"print({table!r})") == ""
    assert capsys.readouterr().out.splitlines() == [
        "slower: cold: 0.91 to 0.99, before 0.43 to 0.9",
        "slower: cold: 1.51 to 1.6, before 1.19 to 1.5",
    ]


def test_a_section_is_old_after_a_hundred_commits_and_on_another_branch(
    sections: Any, tmp_path: Path
) -> None:
    assert sections.age("commit abcdef0", tmp_path) == 0  # no repository
    run = partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True, text=True)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.invalid")
    stream = "".join(
        f"commit refs/heads/{branch}\ncommitter {branch} <a@b.invalid> {number} +0000\ndata 0\n"
        for branch, count in (("main", 102), ("other", 1))
        for number in range(count)
    )
    run(["git", "init", "-q", "-b", "main"])
    run(["git", *identity, "fast-import", "--quiet"], input=stream)
    other, old, fresh = (
        run(["git", "rev-parse", "--short=7", name]).stdout.strip()
        for name in ("other", "main~101", "main~100")
    )
    assert sections.age(f"commit {fresh}", tmp_path) == 100
    assert sections.age(f"commit {fresh} with changes; commit {old}: x", tmp_path) == 101
    assert sections.age(f"commit {other}", tmp_path) == float("inf")
    assert sections.age("commit 0123456", tmp_path) == float("inf")
    text = "".join(
        f"<!-- bench: {name} -->\ncommit {name}: x\n\n<!-- end: {name} -->\n"
        for name in (old, fresh)
    )
    marked = sections.with_marks(text, tmp_path)
    assert marked.count(sections.OLD) == 1
    assert marked.index(sections.OLD) < marked.index(f"bench: {fresh}")
    assert sections.with_marks(marked, tmp_path) == marked


@pytest.mark.parametrize("page", PAGES)
def test_old_sections_of_the_page_are_marked(sections: Any, page: str) -> None:
    """``python -m bench.sections`` marks them. Half as many commits may go by until it is run."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = {name: sections.section(text, name) for name in sections.SECTION.findall(text)}
    assert not [
        name
        for name, inside in found.items()
        if sections.age(inside) > 1.5 * sections.MOST_COMMITS and sections.OLD not in inside
    ]


def test_a_page_without_the_place_is_told_before_anything_is_measured(
    bench: Any, page: Path
) -> None:
    page.write_text("<!-- end: some -->\n<!-- bench: some -->")
    with pytest.raises(ValueError, match="bench: some"):
        ran(bench, page, "raise SystemExit(3)")


def test_some_can_be_chosen_and_what_cannot_run_is_left_out(
    bench: Any, page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"no bench is called gat; there are gate, "):
        bench.main(["gate", "gat"])
    one = bench.Bench(name="some", command=("-c", f"print({TABLE!r})"), minutes=1, document=page)
    absent = replace(one, name="absent", lacks=lambda: "there is none here")
    monkeypatch.setattr(bench, "BENCHES", (absent, one))
    assert bench.main([]) == 0
    told = capsys.readouterr().out
    assert "[1/2] absent: left out, there is none here" in told
    assert re.search(r"\[2/2\] some: \d+ s, in page.md", told)
    assert bench.main(["absent"]) == 1
