"""Seven of twelve plans have a mistake: seven findings, at their lines, in every format."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree as Xml

import jsonschema
import junitparser
import pytest
import sarif_pydantic
from pydantic import BaseModel

from affidavit.gate.checking.finding import CheckResult, GateFinding
from affidavit.gate.checking.formats import WRITERS
from affidavit.gate.exit_codes import Exit
from tests.support.random_seeds import examples, seeded

GITLAB = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["description", "check_name", "fingerprint", "severity", "location"],
        "properties": {
            "description": {"type": "string"},
            "check_name": {"type": "string"},
            "fingerprint": {"type": "string", "minLength": 8},
            "severity": {"enum": ["info", "minor", "major", "critical", "blocker"]},
            "location": {
                "type": "object",
                "required": ["path", "lines"],
                "properties": {
                    "path": {"type": "string", "pattern": "^[^./]"},
                    "lines": {
                        "type": "object",
                        "required": ["begin"],
                        "properties": {"begin": {"type": "integer", "minimum": 1}},
                    },
                },
            },
        },
    },
}
"""GitLab documentation, "Code Quality", table of the report's fields."""


def test_exactly_the_planted_mistakes_block_at_their_lines(planted: Any, checked: Any) -> None:
    code, document = checked("plans")
    assert code == 1
    assert len(document["plans"]) == 12
    blocking = [item for plan in document["plans"] for item in plan["findings"] if item["blocks"]]
    assert {entry["file"]: (entry["mistake"], entry["line"]) for entry in blocking} == {
        str(element.file): (element.mistake, element.line) for element in planted
    }
    assert len(blocking) == len(planted) == 7


@pytest.mark.usefixtures("planted")
def test_files_that_hold_no_plan_are_left_alone(checked: Any) -> None:
    assert len(checked(".")[1]["plans"]) == 12
    assert len(checked("plans/*.yaml", "**/*.json", "plans")[1]["plans"]) == 12


@pytest.mark.soak
def test_making_the_fixes_lets_the_repository_pass(planted: Any, run: Any, checked: Any) -> None:
    before = {item.file: item.file.read_text().splitlines() for item in planted}
    assert run("check", ".", "--fix").exit_code == 0
    assert checked(".")[0] == 0
    for file, lines in before.items():
        after = file.read_text().splitlines()
        assert len(after) == len(lines)
        assert after[0] == "# kept as it is"
        changed = [(old, new) for old, new in zip(lines, after, strict=True) if old != new]
        assert changed
        assert all(re.match(r" *-? *noise_multiplier: ", old) for old, _ in changed)


@pytest.mark.usefixtures("planted")
def test_every_proposed_fix_is_certified_when_it_is_made(checked: Any) -> None:
    """A sample of them."""
    fixes = [
        (Path(plan["file"]).read_text(), fix)
        for plan in checked(".")[1]["plans"]
        for item in plan["findings"]
        for fix in item["fixes"]
    ]
    assert len(fixes) >= 7
    for text, fix in Random(seeded(5)).sample(fixes, examples(len(fixes))):
        changed = text
        for edit in sorted(fix["edits"], key=lambda item: -item["start"]):
            changed = changed[: edit["start"]] + edit["after"] + changed[edit["end"] :]
        assert changed != text
        Path("mended.yaml").write_text(changed)
        code, document = checked("mended.yaml", "--no-cache")
        assert code == 0
        assert document["plans"][0]["result"]["epsilon"]["upper"] == fix["epsilon"]


# ---- formats -------------------------------------------------------------------------


@pytest.fixture
def reports(planted: list[Any], run: Any) -> dict[str, str]:
    """Every report of one check."""
    names = [f"--report={kind}=report.{kind}" for kind in WRITERS]
    assert run("check", "plans", *names).exit_code == 1
    assert len(planted) == 7
    return {kind: Path(f"report.{kind}").read_text() for kind in WRITERS}


def _unknown(model: BaseModel) -> list[str]:
    result = list((model.model_extra or {}).keys())
    for _, value in model:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, BaseModel) and type(item).__name__ != "PropertyBag":
                result += _unknown(item)
    return result


def test_sarif_is_sarif_with_the_fixes_in_it(planted: Any, reports: dict[str, str]) -> None:
    log = sarif_pydantic.Sarif.model_validate_json(reports["sarif"])
    assert log.version == "2.1.0"
    assert _unknown(log.runs[0].results[0].locations[0]) == []
    (run,) = json.loads(reports["sarif"])["runs"]
    errors = [entry for entry in run["results"] if entry["level"] == "error"]
    places = {
        (
            element["locations"][0]["physicalLocation"]["artifactLocation"]["uri"],
            element["locations"][0]["physicalLocation"]["region"]["startLine"],
        )
        for element in errors
    }
    assert places == {(str(item.file), item.line) for item in planted}
    rules = [member["id"] for member in run["tool"]["driver"]["rules"]]
    for item in run["results"]:
        assert rules[item["ruleIndex"]] == item["ruleId"]
    for error in errors:
        (change,) = error["fixes"][0]["artifactChanges"]
        lines = Path(change["artifactLocation"]["uri"]).read_text().splitlines()
        for replacement in change["replacements"]:
            region = replacement["deletedRegion"]
            assert region["startLine"] == region["endLine"]
            line = lines[region["startLine"] - 1]
            float(line[region["startColumn"] - 1 : region["endColumn"] - 1])
            float(replacement["insertedContent"]["text"])


def test_gitlab_takes_the_report(planted: Any, reports: dict[str, str]) -> None:
    issues = json.loads(reports["gitlab"])
    jsonschema.validate(issues, GITLAB)
    assert len({entry["fingerprint"] for entry in issues}) == len(issues)
    blockers = [issue for issue in issues if issue["severity"] == "blocker"]
    assert {
        (blocker["location"]["path"], blocker["location"]["lines"]["begin"]) for blocker in blockers
    } == {(str(item.file), item.line) for item in planted}


def test_junit_has_a_case_a_plan(planted: Any, reports: dict[str, str]) -> None:
    suites = junitparser.JUnitXml.fromstring(reports["junit"].encode())
    assert (suites.tests, suites.failures, suites.errors) == (12, 7, 0)
    cases = [case for suite in suites for case in suite]
    failed = {case.name for case in cases if case.result}
    assert failed == {str(item.file) for item in planted}


def test_github_annotates_each_line(planted: Any, reports: dict[str, str]) -> None:
    result = re.findall(
        r"^::error file=([^,]+),title=[^,]+,line=(\d+),col=\d+::", reports["github"], re.M
    )
    assert {(file, int(line)) for file, line in result} == {
        (str(item.file), item.line) for item in planted
    }
    assert reports["github"].count("::error ") == 7


HOSTILE = 'a\n::error::x%\r,:<b>&"\x00\x1b[31m\u202e\ud800'


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_hostile_texts_stay_texts(kind: str) -> None:
    finding = GateFinding(file="p.yaml", rule="r", level="error", message=HOSTILE, line=1, column=1)
    judged = [CheckResult(file="p.yaml", name="p\x00.yaml", exit=Exit.BLOCKED, findings=(finding,))]
    text = WRITERS[kind](judged)
    text.encode("utf-8", "backslashreplace")
    match kind:
        case "github":
            assert text.count("\n") == 1
        case "junit":
            assert Xml.fromstring(text).find("testsuite/testcase/failure") is not None
        case "markdown":
            assert len(text.splitlines()) == 6
            assert not re.search(r"(?<!\\)[<>&]", text.split("\n", 1)[1])
            assert not [
                c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs")
            ]
        case _:
            assert json.loads(text)
