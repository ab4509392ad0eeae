"""Report formats of ``affidavit check``: GitHub, GitLab, JSON, JUnit, Markdown and SARIF.

A format is a function from all results to text, and an entry in ``WRITERS``.

References: GitHub Actions, "Workflow commands"; GitLab, "Code Quality", custom tools; the schema of
Jenkins' JUnit plugin (junit-10.xsd); OASIS, Static Analysis Results Interchange Format (SARIF)
2.1.0 plus Errata 01.
"""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import asdict
from decimal import ROUND_CEILING, Context, Decimal
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from affidavit import __version__
from affidavit.gate.checking.finding import CheckResult, Fix, GateFinding
from affidavit.gate.exit_codes import Exit, worst
from affidavit.plan import printable, printable_json

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

UPWARD = Context(prec=28, rounding=ROUND_CEILING)
"""A sum of bounds is one too."""
GITHUB_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}
_MESSAGE: dict[int, str] = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY: dict[int, str] = str.maketrans(
    {"%": "%25", "\r": "%0D", "\n": "%0A", ":": "%3A", ",": "%2C"}
)


def github(results: Sequence[CheckResult]) -> str:
    """Write one workflow command per finding; a waived finding is a notice.

    Percent signs and line breaks of a message are escaped, as GitHub requires, and what else would
    control the terminal on which somebody reads the log.
    """
    return "".join(_command(finding) + "\n" for result in results for finding in result.findings)


def _command(finding: GateFinding) -> str:
    level = "notice" if finding.waiver is not None else GITHUB_LEVELS[finding.level]
    properties = {"file": repository_path(finding.file), "title": f"affidavit: {finding.rule}"}
    if finding.line is not None:
        properties |= {"line": str(finding.line), "col": str(finding.column or 1)}
    text = ",".join(f"{key}={_plain(value, _PROPERTY)}" for key, value in properties.items())
    waived = "waived: " if finding.waiver is not None else ""
    return f"::{level} {text}::{_plain(waived + finding.text, _MESSAGE)}"


def _plain(text: str, escapes: dict[int, str]) -> str:
    return "".join(char if ord(char) in escapes else printable(char) for char in text).translate(
        escapes
    )


SEVERITIES = {"error": "blocker", "warning": "minor", "note": "info"}


def gitlab(results: Sequence[CheckResult]) -> str:
    """Write a code quality report, in which a waived finding is information."""
    issues = [
        {
            "description": finding.text,
            "check_name": f"affidavit/{finding.rule}",
            "fingerprint": fingerprint(result, finding),
            "severity": "info" if finding.waiver is not None else SEVERITIES[finding.level],
            "location": {
                "path": repository_path(finding.file),
                "lines": {"begin": finding.line or 1},
            },
        }
        for result in results
        for finding in result.findings
    ]
    return printable_json(issues, indent=1)


def fingerprint(result: CheckResult, finding: GateFinding) -> str:
    """Return an id that is stable between runs, even if the finding moves to another line."""
    parts = (result.name, finding.rule, finding.pointer, finding.message)
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def json_document(results: Sequence[CheckResult]) -> str:
    """Write ``{"exit", "plans": [{"file", "name", "exit", "verdict", "result", "findings"}]}``."""
    document = {
        "exit": int(worst(result.exit for result in results)),
        "plans": [
            {
                "file": result.file,
                "name": result.name,
                "exit": int(result.exit),
                "verdict": "refused" if result.result is None else result.result["verdict"],
                "result": result.result,
                "findings": [
                    {**asdict(finding), "blocks": finding.blocks} for finding in result.findings
                ],
            }
            for result in results
        ],
    }
    return printable_json(document)


_HIDDEN = ("Cc", "Cf", "Cs")
"""Unicode's control, format (direction) and surrogate characters."""
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(results: Sequence[CheckResult]) -> str:
    """Write one test case per plan; an unreadable or undecided plan is an error."""
    from xml.etree import ElementTree as Xml  # no other format needs it

    failures = sum(result.exit is Exit.BLOCKED for result in results)
    errors = sum(result.exit in (Exit.USAGE, Exit.UNDECIDED) for result in results)
    counts = {"tests": str(len(results)), "failures": str(failures), "errors": str(errors)}
    root = Xml.Element("testsuites", counts)
    suite = Xml.SubElement(root, "testsuite", {"name": "affidavit check", **counts})
    for result in results:
        _case(suite, result)
    Xml.indent(root)
    # Encoding "unicode" would declare the encoding of the terminal.
    content: bytes = Xml.tostring(root, encoding="utf-8", xml_declaration=True)
    # What would control a terminal becomes a reference to the same character.
    return "".join(
        char if char.isprintable() or char == "\n" else f"&#{ord(char)};"
        for char in f"{content.decode()}\n"
    )


def _case(suite: Element, result: CheckResult) -> None:
    from xml.etree import ElementTree as Xml

    case = Xml.SubElement(suite, "testcase", {"name": _xml(result.name), "classname": "affidavit"})
    blocking = [finding for finding in result.findings if finding.blocks]
    if blocking:
        kind = "failure" if result.exit is Exit.BLOCKED else "error"
        first = blocking[0]
        element = Xml.SubElement(case, kind, {"type": first.rule, "message": _xml(first.text)})
        element.text = _xml("\n".join(finding.line_text() for finding in blocking))
    others = [finding for finding in result.findings if not finding.blocks]
    if others:
        output = "\n".join(finding.line_text() for finding in others)
        Xml.SubElement(case, "system-out").text = _xml(output)


def _xml(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)


SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)


def sarif(results: Sequence[CheckResult]) -> str:
    """Write a SARIF run with the applicable fixes; positions count Unicode code points."""
    rules = sorted({finding.rule for result in results for finding in result.findings})
    files = sorted({as_uri(result.file) for result in results})
    document = {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "affidavit",
                        "semanticVersion": __version__,
                        "rules": [{"id": rule} for rule in rules],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "artifacts": [{"location": {"uri": uri}} for uri in files],
                "results": [
                    _result(result, finding, rules.index(finding.rule))
                    for result in results
                    for finding in result.findings
                ],
            }
        ],
    }
    return printable_json(document, indent=1)


def _result(result: CheckResult, finding: GateFinding, index: int) -> dict[str, Any]:
    document: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": finding.level,
        "message": {"text": finding.text},
        "locations": [{"physicalLocation": _location(finding)}],
        "partialFingerprints": {"affidavit/v1": fingerprint(result, finding)},
        "properties": {"pointer": finding.pointer, "mistake": finding.mistake, **finding.numbers},
    }
    if fixes := [_fix(finding.file, fix) for fix in finding.fixes if fix.edits]:
        document["fixes"] = fixes
    if finding.waiver is not None:
        reason = str(finding.waiver.get("reason", "waived"))
        document["suppressions"] = [{"kind": "external", "justification": reason}]
    return document


def _location(finding: GateFinding) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": as_uri(finding.file)}}
    if finding.line is not None:
        place["region"] = {"startLine": finding.line, "startColumn": finding.column or 1}
    return place


def _fix(file: str, fix: Fix) -> dict[str, Any]:
    return {
        "description": {"text": fix.description},
        "artifactChanges": [
            {
                "artifactLocation": {"uri": as_uri(file)},
                "replacements": [
                    {
                        "deletedRegion": {
                            "startLine": edit.line,
                            "startColumn": edit.column,
                            "endLine": edit.end_line,
                            "endColumn": edit.end_column,
                        },
                        "insertedContent": {"text": edit.after},
                    }
                    for edit in fix.edits
                ],
            }
        ],
    }


def as_uri(file: str) -> str:
    """Return the path of ``file`` as a URI."""
    return quote(repository_path(file), errors="surrogateescape")


def repository_path(file: str) -> str:
    """Return a path with slashes, relative to this folder if it is inside, for code hosts."""
    if os.path.isabs(file):
        relative = os.path.relpath(file)
        file = file if relative.startswith("..") else relative
    return os.path.normpath(file).replace(os.sep, "/")


MARKER = "<!-- affidavit check -->"
"""First line of a comment, by which a later run finds the comment to replace."""


def markdown(results: Sequence[CheckResult]) -> str:
    """Write a comment for a pull or merge request.

    It has a table of plans, the blocking findings, and what the verdicts assume.
    """
    rows = [
        f"| {_cell(result.name)} | {_cell(result.headline or 'cannot be read')} |\n"
        for result in results
    ]
    blocking = [
        f"- {_cell(finding.line_text())}\n"
        for result in results
        for finding in result.findings
        if finding.blocks
    ]
    assumed = [
        f"- {_cell(f'{result.name}: {finding.message}')}\n"
        for result in results
        for finding in result.findings
        if finding.rule == "assumed"
    ]
    table = "| plan | verdict |\n|---|---|\n" + "".join(rows)
    return (
        f"{MARKER}\n{table}"
        + ("\n" + "".join(blocking) if blocking else "")
        + ("\nAssumed:\n\n" + "".join(assumed) if assumed else "")
    )


def badge(results: Sequence[CheckResult]) -> str:
    """Write a badge for the endpoint of shields.io: "not certified", or the largest ε.

    That of a script with several private calls is their sum.
    """
    blocked = [result for result in results if result.exit is not Exit.CERTIFIED]
    bounds: dict[str, Decimal] = {}
    for one in results:
        if one.result and not blocked:
            place = one.file if one.adds_up else one.name
            bounds[place] = UPWARD.add(
                bounds.get(place, Decimal()), Decimal(str(one.result["epsilon"]["upper"]))
            )
    largest = max(bounds.values(), default=None)
    message = "not certified" if largest is None else f"ε ≤ {largest}"
    color = "red" if blocked else "brightgreen" if bounds else "lightgrey"
    label = "differential privacy"
    document = {"schemaVersion": 1, "label": label, "message": message, "color": color}
    return printable_json(document)


def add_changes(comment: str, changes: Sequence[str]) -> str:
    """Append the changes that moved ε to a comment, one line per field."""
    if not changes:
        return comment
    return f"{comment}\nChanges that moved ε:\n\n" + "".join(
        f"- {_cell(line)}\n" for line in changes
    )


def _cell(text: str) -> str:
    """Return text on one line, with Markdown, HTML and direction marks made harmless."""
    escaped = re.sub(r"([\\`*_\[\]<>|#@!~&])", r"\\\1", " ".join(text.split()))
    return "".join("\ufffd" if unicodedata.category(c) in _HIDDEN else c for c in escaped)


Writer = Callable[[Sequence[CheckResult]], str]

WRITERS: dict[str, Writer] = {
    "badge": badge,
    "github": github,
    "gitlab": gitlab,
    "json": json_document,
    "junit": junit,
    "markdown": markdown,
    "sarif": sarif,
}
