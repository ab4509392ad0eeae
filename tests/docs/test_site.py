"""The site builds without a warning, and what is written from the code is what the code says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from ruamel.yaml import YAML

from affidavit.certificate.verification.bundle_verification import PREDICATE_TYPE
from affidavit.plan import code_meanings
from docs.generate import PAGES
from docs.generate.codes import ROOMS, says_something, uses
from docs.generate.plan_schema import schema
from tests.support.document_blocks import DOCS, ROOT

PLANS = sorted(path for path in (ROOT / "examples").rglob("*.yaml") if "policies" not in path.parts)


def test_no_link_leads_nowhere_and_every_page_is_in_the_contents(tmp_path: Path) -> None:
    """A page that no contents in docs/index.md lead to fails too."""
    options = ["--quiet", "--fail-on-warning", "--keep-going", "--nitpicky", "--builder", "dummy"]
    command = [sys.executable, "-m", "sphinx", *options, DOCS, tmp_path]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / ".doctrees/cases/cholesky.doctree").exists()


@pytest.mark.ordinary("not */claims.md")  # tests/assessment/diagnosis has most of its numbers
@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_reference_is_what_the_code_says(name: str) -> None:
    """`make docs` writes it."""
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run make docs"


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_every_example_fits_the_schema(path: Path) -> None:
    jsonschema.Draft202012Validator(schema()).validate(YAML(typ="safe").load(path.read_text()))


@pytest.mark.parametrize("change", [{"stepz": 3}, {"steps": "10"}, {"adjacency": "both"}])
def test_the_schema_refuses_what_is_no_plan(change: dict[str, object]) -> None:
    plan = YAML(typ="safe").load((ROOT / "examples/e2e-lora-dp-adam.yaml").read_text())
    assert not jsonschema.Draft202012Validator(schema()).is_valid({**plan, **change})


def test_every_field_of_the_predicate_is_told_with_its_type_and_no_other() -> None:
    page = (DOCS / "reference/certificate.md").read_text(encoding="utf-8")
    fields = page.split("### Fields")[1].split("\n## ")[0]
    told = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", fields, re.MULTILINE))
    stated = json.loads((DOCS / "reference/certificate.example.json").read_text())["predicate"]
    assert set(told) == set(stated)
    kinds = {"list": list, "object": dict, "integer": int, "true": bool}
    kinds |= {"text": str, "decimal": str}
    for name, value in stated.items():
        kind = kinds[re.split(r"\W", told[name])[0]]
        assert isinstance(value, kind) or (value is None and "null" in told[name]), name
    assert f"Type URI: `{PREDICATE_TYPE}`" in page


def test_codes_that_programs_meet_are_found() -> None:
    """A sample by hand: of reasons, problems, steps of verification, stops and refusals."""
    result = {use.code for room in ROOMS for use in uses(room)}
    assert {"unknown_field", "under_noised", "over_budget", "bad_status", "out_of_reach"} <= result
    assert {"tensor_not_noised", "unsound_optimizer", "rules_changed", "key_revoked"} <= result


def test_every_code_says_what_happened_and_what_to_do() -> None:
    meanings = [item for items in code_meanings().values() for item in items]
    assert len(meanings) > 400
    assert [item for item in meanings if not says_something(item.message)] == []
    assert [item for item in meanings if not says_something(item.remedy)] == []


@pytest.mark.parametrize("path", sorted(DOCS.glob("pictures/*.svg")), ids=lambda path: path.stem)
def test_pictures_say_what_they_show_and_follow_a_dark_page(path: Path) -> None:
    picture = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    name = {"svg": "http://www.w3.org/2000/svg"}
    assert picture.findtext("svg:title", namespaces=name)
    assert picture.findtext("svg:desc", namespaces=name)
    assert "prefers-color-scheme:dark" in (picture.findtext("svg:style", namespaces=name) or "")


def test_pages_outside_the_site_lead_to_files_that_are_there() -> None:
    """The site does not hold them, and so does not check their links."""
    wrong = [
        (page.name, link)
        for page in (*ROOT.glob("*.md"), *ROOT.glob("contributing/**/*.md"))
        for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]
    assert not wrong


ROOMS_AND_MORE = (
    *ROOMS,
    "tests",
    "bench",
    "examples",
    "claims",
    "migrations",
    "deploy",
    "docs",
    "contributing",
    "ci",
)


def test_every_file_that_a_page_names_is_there() -> None:
    """In code marks, from the root; what a reader is to write has a name in capitals."""
    named = re.compile(rf"`((?:{'|'.join(ROOMS_AND_MORE)})/[\w./-]+)`")
    missing = {
        (page.name, path)
        for page in (*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("contributing/**/*.md"))
        if page.name != "mutation.md"  # a report on an earlier revision
        for path in named.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / path).exists() and not {"NEW.py", "VERSION"} & set(path.split("/"))
    }
    assert not missing
