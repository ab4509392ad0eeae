"""A hostile body is refused as malformed, saying where, and within a second."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from affidavit.plan.diagnostics import MalformedPlan, Reason
from affidavit.plan.parse import parse_plan
from affidavit.plan.strict_parsing import Syntax
from tests.support.processor_time import best_of_three

TEXT = """\
{"version": 1,
 "adjacency": "zero_out",
 "sampling": {"scheme": "full_batch"},
 "steps": 10,
 "releases": [{"name": "all",
               "clip_norm": 1,
               "noise_multiplier": 5}],
 "target": {"delta": 1.0e-5}}
"""
"""A plan that is JSON and YAML alike."""

SECONDS = 3.0
AT_STEPS = (4, 2)
AT_CLIP_NORM = (6, 16)


def steps(literal: str) -> bytes:
    """The plan with ``literal`` for its steps."""
    return TEXT.replace('"steps": 10', f'"steps": {literal}').encode()


def clip_norm(literal: str) -> bytes:
    """The plan with ``literal`` for its clip norm."""
    return TEXT.replace('"clip_norm": 1', f'"clip_norm": {literal}').encode()


CLIP_NORM = "/releases/0/clip_norm"
BOMB = b"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]\n"

Case = tuple[bytes, str, str, tuple[int, int] | None]
BOTH: dict[str, Case] = {
    "1e400": (clip_norm("1e400"), "number_out_of_range", CLIP_NORM, AT_CLIP_NORM),
    "subnormal": (clip_norm("1e-310"), "number_out_of_range", CLIP_NORM, AT_CLIP_NORM),
    "vanishing": (clip_norm("1e-4000"), "number_out_of_range", CLIP_NORM, AT_CLIP_NORM),
    "-0.0": (clip_norm("-0.0"), "invalid_value", CLIP_NORM, AT_CLIP_NORM),
    "-0": (steps("-0"), "invalid_value", "/steps", AT_STEPS),
    "true for 1": (clip_norm("true"), "wrong_type", CLIP_NORM, AT_CLIP_NORM),
    "true for one step": (steps("true"), "wrong_type", "/steps", AT_STEPS),
    "a string for 3": (clip_norm('"3"'), "wrong_type", CLIP_NORM, AT_CLIP_NORM),
    "a string for 3 steps": (steps('"3"'), "wrong_type", "/steps", AT_STEPS),
    "duplicate key": (steps('10, "steps": 11'), "duplicate_key", "/steps", (4, 15)),
    "lone surrogate": (steps('10, "name": "\\ud800"'), "bad_text", "/name", (4, 15)),
    "lone surrogate in a key": (steps('10, "\\udfff": 1'), "bad_text", "", (1, 1)),
    "10^5 brackets": (b"[" * 100_000, "", "", None),
    "10^5 braces": (b'{"a":' * 100_000, "", "", None),
    "3 10^4 brackets that close": (b"[" * 30_000 + b"]" * 30_000, "too_deep", "", None),
    "brackets that close": (b"[" * 900 + b"]" * 900, "too_deep", "", None),
    "300-digit integer": (steps("9" * 300), "number_out_of_range", "/steps", AT_STEPS),
    "2^53": (steps(str(2**53)), "number_out_of_range", "/steps", AT_STEPS),
    "2^53 as a float": (steps(f"{2**53}.0"), "invalid_value", "/steps", AT_STEPS),
    "1e300 steps": (steps("1e300"), "invalid_value", "/steps", AT_STEPS),
    "half a step": (steps("1.5"), "wrong_type", "/steps", AT_STEPS),
    "unknown field": (steps('10, "sigma": 1'), "unknown_field", "/sigma", (4, 15)),
    "a key that is an index": (steps('10, "0": 1'), "unknown_field", "/0", (4, 15)),
    "empty": (b"", "empty", "", None),
    "blank": (b" \n\t\n", "empty", "", None),
    "10 MB": (b" " * 10_000_000 + b"1", "too_large", "", None),
    "not UTF-8": (steps('10, "name": "a"').replace(b'"a"', b'"\xff"'), "bad_text", "", None),
    "a list": (b"[1, 2]", "wrong_type", "", (1, 1)),
    "a scalar": (b"3", "wrong_type", "", (1, 1)),
    "a NUL": (b"\x00", "syntax", "", None),
}
JSON_ONLY: dict[str, Case] = {
    "a key of 5000 digits": (
        steps(f'10, "{"9" * 5000}": 1'),
        "unknown_field",
        "/" + "9" * 5000,
        None,
    ),
    "NaN": (clip_norm("NaN"), "not_finite", CLIP_NORM, AT_CLIP_NORM),
    "Infinity": (clip_norm("Infinity"), "not_finite", CLIP_NORM, AT_CLIP_NORM),
    "-Infinity": (clip_norm("-Infinity"), "not_finite", CLIP_NORM, AT_CLIP_NORM),
    "a comment": (b"// a plan\n" + TEXT.encode(), "syntax", "", (1, 1)),
    "a trailing comma": (b'{"version": 1,\n}', "syntax", "", None),
    "two documents": (TEXT.encode() + b"{}", "syntax", "", (9, 1)),
    "10^5 unknown fields": (
        json.dumps({f"f{i}": 1 for i in range(70_000)}).encode(),
        "missing_field",
        "/version",
        None,
    ),
    "10^5 bad releases": (
        TEXT.replace("[{", "[" + "0," * 300_000 + "{").encode(),
        "invalid_value",
        "/releases",
        None,
    ),
    "10^5 bad coefficients": (
        steps('10, "noise": {"kind": "toeplitz", "coefficients": [' + '"",' * 90_000 + "1]}"),
        "wrong_type",
        "/noise/coefficients/0",
        None,
    ),
}
YAML_ONLY: dict[str, Case] = {
    "comments alone": (b"# a plan\n\n# is to follow\n", "empty", "", None),
    ".nan": (clip_norm(".nan"), "not_finite", CLIP_NORM, AT_CLIP_NORM),
    ".inf": (clip_norm(".inf"), "not_finite", CLIP_NORM, AT_CLIP_NORM),
    "-.INF": (clip_norm("-.INF"), "not_finite", CLIP_NORM, AT_CLIP_NORM),
    "NaN is a string": (clip_norm("NaN"), "wrong_type", CLIP_NORM, AT_CLIP_NORM),
    "octal is a string": (steps("0o17"), "wrong_type", "/steps", AT_STEPS),
    "yes is a string": (steps("yes"), "wrong_type", "/steps", AT_STEPS),
    "YAML bomb": (BOMB, "yaml_alias", "/a", (1, 1)),
    "YAML merge": (b"a: &a {x: 1}\nb: {<<: *a}\n", "yaml_alias", "/a", (1, 1)),
    "YAML tag": (clip_norm("!!float 1"), "yaml_tag", CLIP_NORM, AT_CLIP_NORM),
    "YAML object": (b"a: !!python/object/apply:os.system [ls]\n", "yaml_tag", "/a", (1, 1)),
    "YAML 1.1": (b"%YAML 1.1\n---\n" + TEXT.encode(), "yaml_directive", "", (2, 1)),
    "two documents": (TEXT.encode() + b"---\n{}\n", "syntax", "", None),
    "a key that is a list": (b"? [a]\n: 1\n", "syntax", "", (1, 1)),
    "no character": (b'name: "\\UFFFFFFFF"\n', "syntax", "", None),
    "5000 zeros": (steps("-" + "0" * 5000), "invalid_value", "/steps", AT_STEPS),
    "10^4 unknown fields": (
        "\n".join(f"f{i}: 1" for i in range(4_000)).encode(),
        "missing_field",
        "/version",
        (1, 1),
    ),
    "too large for YAML": (b"#" * 65_537, "too_large", "", None),
}


def cases() -> list[Any]:
    """Every body in every syntax that it is hostile in."""
    tables: list[tuple[Syntax, dict[str, Case]]] = [
        ("json", {**BOTH, **JSON_ONLY}),
        ("yaml", {**BOTH, **YAML_ONLY}),
    ]
    return [
        pytest.param(syntax, *case, id=f"{syntax}: {name}")
        for syntax, table in tables
        for name, case in table.items()
    ]


def refused(body: bytes, syntax: Syntax) -> Reason:
    """The first reason for which ``body`` is malformed."""
    with pytest.raises(MalformedPlan) as caught:
        parse_plan(body, syntax)
    return caught.value.reasons[0]


def test_the_plan_itself_is_fine() -> None:
    assert parse_plan(TEXT.encode(), "json") == parse_plan(TEXT.encode(), "yaml")


@pytest.mark.ordinary(
    "not yaml: 3 10^4 *", "not json: 10^5 unknown fields", "not json: 10^5 bad releases"
)
@pytest.mark.parametrize(("syntax", "body", "code", "pointer", "position"), cases())
def test_a_hostile_body_is_refused_where_it_is_wrong_and_soon(
    syntax: Syntax, body: bytes, code: str, pointer: str, position: tuple[int, int] | None
) -> None:
    reason, took = best_of_three(lambda: refused(body, syntax), SECONDS, time.process_time)
    assert took < SECONDS
    assert reason.code == (code or reason.code)
    if reason.code != "too_deep":
        assert reason.pointer == pointer
    if position is not None:
        assert (reason.line, reason.column) == position


@pytest.mark.parametrize("syntax", ["json", "yaml"])
def test_no_more_reasons_than_a_person_reads(syntax: Syntax) -> None:
    body = json.dumps({f"f{i}": 1 for i in range(100)}).encode()
    with pytest.raises(MalformedPlan) as caught:
        parse_plan(body, syntax)
    assert len(caught.value.reasons) == 20


def test_the_deepest_document_that_is_read() -> None:
    for depth, code in ((32, "wrong_type"), (33, "too_deep")):
        body = b"[" * (depth + 1) + b"]" * (depth + 1)
        assert {refused(body, syntax).code for syntax in ("json", "yaml")} == {code}


@pytest.mark.parametrize("syntax", ["json", "yaml"])
def test_a_negative_zero_is_zero(syntax: Syntax) -> None:
    rows = '"noise": {"kind": "matrix", "rows": [[1.0, -0.0], [-0, 1.0]]}, "steps": 2'
    (phase,) = parse_plan(TEXT.replace('"steps": 10', rows).encode(), syntax).phases
    assert repr(phase.noise).endswith("rows=((1.0, 0.0), (0.0, 1.0)), file=None, sha256=None)")
