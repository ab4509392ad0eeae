"""JUnit XML: a test case a plan, so that any test runner's page shows the gate.

Reference: the schema of Jenkins' JUnit plugin (junit-10.xsd), which others follow.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree as Xml

from affidavit.gate.checking.finding import Finding
from affidavit.gate.checking.verdict import Judged
from affidavit.gate.exits import Exit

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(judged: Sequence[Judged]) -> str:
    """One suite; a blocked plan is a failure, and one that could not be judged an error."""
    failures = sum(one.exit is Exit.BLOCKED for one in judged)
    errors = sum(one.exit in (Exit.USAGE, Exit.UNDECIDED) for one in judged)
    counts = {"tests": str(len(judged)), "failures": str(failures), "errors": str(errors)}
    root = Xml.Element("testsuites", counts)
    suite = Xml.SubElement(root, "testsuite", {"name": "affidavit check", **counts})
    for one in judged:
        _case(suite, one)
    Xml.indent(root)
    return Xml.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: Xml.Element, one: Judged) -> None:
    case = Xml.SubElement(suite, "testcase", {"name": _xml(one.name), "classname": "affidavit"})
    blocking = [finding for finding in one.findings if finding.blocks]
    if blocking:
        kind = "failure" if one.exit is Exit.BLOCKED else "error"
        first = blocking[0]
        told = Xml.SubElement(case, kind, {"type": first.rule, "message": _xml(first.text)})
        told.text = _xml("\n".join(map(_line, blocking)))
    others = [item for item in one.findings if not item.blocks]
    if others:
        Xml.SubElement(case, "system-out").text = _xml("\n".join(map(_line, others)))


def _line(found: Finding) -> str:
    place = f":{found.line}:{found.column}" if found.line is not None else ""
    waived = " (waived)" if found.waiver is not None else ""
    return f"{found.file}{place}: {found.rule}{waived}: {found.text}"


def _xml(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
