"""Every block that readers may paste is run or read, here or by the test that is named.

A block that is not is an excerpt, and says why in a comment above it (``document_blocks.py``).
The README has its own test, and so have the cases.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from affidavit.certificate.policy import parse_policy
from affidavit.plan import Plan, parse_plan, plan_from
from tests.support.document_blocks import DOCS, ROOT, Block, blocks, commands, perform

ELSEWHERE = {
    "how-to/approvals-and-revocation.md": "tests/service/certificates/test_page.py",
    "how-to/backup-and-restore.md": "tests/service/operation/test_backup.py",
    "how-to/gate.md": "tests/docs/test_gate_page.py",
    "how-to/guard.md": "tests/guard/test_guide.py",
    "how-to/rotate-keys.md": "tests/docs/test_how_to.py",
    "reference/library.md": "tests/library/test_guide.py",
    "reference/log.md": "tests/docs/test_log_document.py",
    "how-to/models-and-data.md": "tests/trainer/models/test_documents.py",
    "how-to/tour.md": "tests/docs/test_documents.py",
}
"""Pages whose blocks a test of their own runs; it has to read the page."""
NOT_RUN = {
    "how-to/train.md": "the tour's commands train and compare the same way",
    "how-to/run-a-worker.md": "needs a service and a worker; tests run examples/train/demo_run.py",
}
"""Pages whose commands another page's test runs in the same way."""
PAGES = sorted(
    path
    for path in DOCS.rglob("*.md")
    if "cases" not in path.parts and str(path.relative_to(DOCS)) not in {*ELSEWHERE, *NOT_RUN}
)
SHOWN = {"text", "", "sql"}
"""What is shown and not pasted: output, formulas, what a database's owner types."""


@pytest.mark.parametrize(("page", "test"), sorted(ELSEWHERE.items()), ids=str)
def test_a_page_with_a_test_of_its_own_is_read_there(page: str, test: str) -> None:
    assert (DOCS / page).exists()
    assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many pages check the same plans."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.ordinary("not */strategies.md", "not */claims.md")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_block_of_a_page_runs_or_is_read(
    page: Path, one_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, in a folder of its own that has the examples; the first plan is ``plan.yaml``."""
    for folder in ("examples", "claims"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AFFIDAVIT_CACHE", str(one_cache))
    printed = ""
    for block in blocks(page):
        place = f"{page.name}:{block.line}"
        if block.excerpt:
            assert len(block.excerpt.split()) > 2, f"{place}: say why it is not run"
        elif block.language == "sh":
            ran = [perform(line) for line in commands(block.text)]
            assert all(item.as_told for item in ran), (place, ran)
            printed = "".join(entry.output for entry in ran)
        elif block.language == "text" and printed:
            lines = [line.strip() for line in block.text.splitlines()]
            assert not [line for line in lines if line not in printed], (place, printed)
            printed = ""
        elif block.language not in SHOWN:
            assert block.language in READERS, f"{place}: run it, or mark it as an excerpt"
            READERS[block.language](block)


def _yaml(block: Block) -> None:
    if "schema_version:" in block.text:
        parse_policy(block.text.encode(), "yaml")
        return
    parse_plan(block.text.encode(), "yaml")
    Path("plan.yaml").write_text(block.text, encoding="utf-8")


def _json(block: Block) -> None:
    result = json.loads(block.text)
    if "version" in result and "releases" in result:
        assert isinstance(plan_from(result), Plan)


def _toml(block: Block) -> None:
    tomllib.loads(block.text)


READERS: dict[str, Callable[[Block], None]] = {"yaml": _yaml, "json": _json, "toml": _toml}


def test_an_excerpt_is_marked_where_its_block_begins() -> None:
    """A comment that is not right above a fence would mark nothing."""
    for page in DOCS.rglob("*.md"):
        marked = [block for block in blocks(page) if block.excerpt]
        assert page.read_text(encoding="utf-8").count("<!-- excerpt:") == len(marked), page
