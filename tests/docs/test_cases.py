"""Each case file: its commands do what it says, and print every number that it calls true."""

from __future__ import annotations

import re
from decimal import ROUND_HALF_EVEN, ROUND_UP, Decimal
from pathlib import Path

import pytest

from tests.support.document_blocks import DOCS, ROOT, Ran, blocks, commands, run

OTHERS = ("README.md", "dp-muon-at-a-true-epsilon.md")
"""Pages that are no claim of somebody."""
CASES = sorted(path for path in (DOCS / "cases").glob("*.md") if path.name not in OTHERS)
NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*:)")


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("AFFIDAVIT_CACHE", str(tmp_path))


def section(page: Path, title: str) -> str:
    text = page.read_text(encoding="utf-8")
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def ran(page: Path) -> list[Ran]:
    shells = [block for block in blocks(page) if block.language == "sh"]
    return [run(line) for block in shells for line in commands(block.text)]


def test_every_case_is_listed_with_its_numbers() -> None:
    """Certified values are rounded up, so that the list never says less than the case."""
    listed = re.findall(
        r"^\| \[[^]]+\]\(([\w-]+\.md)\) \| (\S+) \| (\S+) \|",
        (DOCS / "cases" / "README.md").read_text(),
        re.MULTILINE,
    )
    assert sorted(name for name, _, _ in listed) == [page.name for page in CASES]
    for name, claimed, certified in listed:
        page = DOCS / "cases" / name
        assert claimed in section(page, "What was claimed"), name
        numbers = [Decimal(result) for result in NUMBER.findall(section(page, "What is true"))]
        rounded = {number.quantize(Decimal("0.01"), ROUND_UP) for number in numbers}
        assert Decimal(certified) in rounded, name


every_case = pytest.mark.parametrize("page", CASES, ids=lambda page: page.stem)


@pytest.mark.ordinary("not shuffled-as-poisson")
@every_case
def test_the_commands_end_and_print_as_the_page_says(page: Path) -> None:
    before: list[Ran] = []
    for block in blocks(page):
        if block.language == "sh":
            before = [run(line) for line in commands(block.text)]
            assert all(item.as_told for item in before), before
        elif block.language == "text":
            printed = "".join(entry.output for entry in before)
            for line in block.text.splitlines():
                assert line.strip() in printed, (page.name, line)
    assert before


@pytest.mark.ordinary("not shuffled-as-poisson")
@every_case
def test_every_number_that_is_called_true_is_printed_or_given(page: Path) -> None:
    printed = "".join(item.output for item in ran(page))
    plans = re.findall(r"examples/\S+?\.yaml", page.read_text())
    provided = section(page, "What was claimed") + "".join(
        (ROOT / plan).read_text() for plan in plans
    )
    known = {Decimal(result) for result in NUMBER.findall(printed + provided)}
    for told in NUMBER.findall(section(page, "What is true")):
        place = Decimal(1).scaleb(Decimal(told).as_tuple().exponent)
        assert any(n.quantize(place, ROUND_HALF_EVEN) == Decimal(told) for n in known), told


def test_the_accountant_is_outside_the_proved_bracket_at_small_delta() -> None:
    """The digits are round-off, whose sign differs between processors."""
    rows = [row.split() for row in run("python examples/cases/small_delta.py").output.splitlines()]
    for delta, stated, lower, upper, *rest in rows[2:]:
        if stated != lower:
            assert ("below" in rest) == (float(stated) < float(lower))
        if delta in ("1.0e-13", "1.0e-14"):
            assert not float(lower) <= float(stated) <= float(upper)


def test_every_plan_of_the_cases_has_a_source_and_a_page() -> None:
    pages = "".join(page.read_text() for page in CASES)
    script = (ROOT / "examples/cases/small_delta.py").read_text()
    for plan in (ROOT / "examples/cases").glob("*.yaml"):
        assert "Source" in plan.read_text().split("version:")[0], plan.name
        assert plan.name in pages + script, plan.name
