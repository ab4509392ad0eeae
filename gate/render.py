"""Render assessments, certificates and excerpts of files as text.

A reason is one line that editors can jump to (``file:line:col``), with its code, numbers and
remedy. Upper bounds are rounded up and lower bounds down.

    >>> print(*describe_certificate({
    ...     "verdict": "refused", "plan": {"name": "a", "dataset": {"name": "b"}},
    ...     "guarantee": None, "reasons": [{"code": "no_theorem", "message": "None is known."}],
    ...     "accountants": [], "obligations": [],
    ...     "validity": {"not_before": "2026-01-01", "not_after": "2027-01-01"}}), sep="\\n")
    plan: a, on data set b
    guarantee: none
    because: no_theorem: None is known.
    declarations not checked: What the plan says about its data and its loop is taken as stated.
    valid: 2026-01-01 to 2027-01-01

docs/reference/certificate.md describes every field of a certificate.

An excerpt shows the line of a reason with carets, as rustc does.

>>> print(*frame_excerpt("rate: {q: 1}  # of a lot", 3, 1, "unknown_field"), sep="\\n")
  |
3 | rate: {q: 1}  # of a lot
  | ^^^^
>>> print(*frame_excerpt("steps: ten  # soon", 14, 1, "wrong_type"), sep="\\n")
   |
14 | steps: ten  # soon
   | ^^^^^^^^^^
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape

from affidavit import certificate as certificates
from affidavit.accountants import decimal_down, decimal_up
from affidavit.plan import Reason, printable, read_inside

if TYPE_CHECKING:
    from rich.table import Table

    from affidavit.accountants import GaussianBound
    from affidavit.assessment import Assessment, GroupBound

STYLE = {"certified": "green", "under_noised": "red", "refused": "red"} | dict.fromkeys(
    ("unproved", "undecided"), "yellow"
)
DIGITS = 6
BRACKET_DIGITS = 8


def reason_line(name: str, reason: Reason) -> str:
    """Return a reason as one printable line."""
    place = f":{reason.line}:{reason.column}" if reason.line is not None else ""
    field = f" {reason.pointer}" if reason.pointer else ""
    return printable(
        f"{name}{place}: {reason.code}{field}: {reason.message} {reason.remedy}".rstrip()
    )


def upper_bound(value: float | None) -> str:
    """Return a bound of the API as text; null is "not bounded"."""
    return "not bounded" if value is None or math.isinf(value) else decimal_up(value)


def plain_table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """Return a borderless table with columns of texts, then of numbers."""
    from rich.table import Table  # most commands print none

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in texts:
        table.add_column(heading)
    for heading in numbers:
        # Texts are wrapped first: a truncated number would be a different number.
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def print_assessment(
    console: Console, name: str, reasons: tuple[Reason, ...], assessment: Assessment
) -> None:
    """Print an assessment; ``reasons`` are its reasons with positions in the file."""
    style = STYLE[assessment.verdict]
    console.print(f"[bold {style}]{escape(assessment.headline)}[/]")
    for reason in reasons:
        console.print(escape(reason_line(name, reason)))
        print_excerpt(console, name, reason.line, reason.column, reason.code)
    if assessment.releases:
        console.print(_noise_table(assessment))
    for line in _fact_lines(assessment):
        console.print(escape(line))
    if assessment.planning:
        console.print("planning figures (for information, not guaranteed):")
    for entry in assessment.planning:
        console.print(f"  {escape(_planning_line(entry))}")
    for warning in assessment.warnings:
        console.print(f"[yellow]warning[/] {warning.code}: {escape(warning.message)}")


def _noise_table(assessment: Assessment) -> Table:
    table = plain_table("noise multipliers", ("release",), ("blocks", "given", "required"))
    for release in assessment.releases:
        table.add_row(
            release.name if release.phase is None else f"{release.phase}/{release.name}",
            str(release.count),
            "" if release.given is None else f"{release.given:.7g}",
            "" if release.required is None else f"{release.required:.7g}",
        )
    return table


def _fact_lines(assessment: Assessment) -> list[str]:
    facts = []
    if assessment.joint is not None:
        facts.append(f"joint noise multiplier of a step: {decimal_down(assessment.joint, DIGITS)}")
    if assessment.mu is not None:
        facts.append(f"exactly Gaussian, μ = {decimal_up(assessment.mu, DIGITS)}")
    elif (bound := assessment.gaussian) is not None:
        facts.append(gaussian_bound_line(bound))
    if (problem := assessment.gaussian_problem) is not None:
        facts.append(f"no Gaussian bound ({problem.code}: {problem.message.rstrip('.')})")
    facts += [_strategy_line(entry) for entry in assessment.strategies]
    saving = (assessment.allocation or {}).get("saving")
    if saving:
        kind = (assessment.allocation or {})["kind"]
        facts.append(f"the {kind} allocation needs {saving:.1%} less noise energy than uniform")
    facts += [_sampling_line(entry) for entry in assessment.sampling]
    for opinion in assessment.accountants:
        low = decimal_down(opinion.epsilon.lower, BRACKET_DIGITS)
        high = decimal_up(opinion.epsilon.upper, BRACKET_DIGITS)
        level = opinion.confidence
        confidence = "" if level is None else f" {level} over draws from seed {level.seed}"
        proved = f"in [{low}, {high}]" if opinion.epsilon.lower > 0 else f"≤ {high}"
        facts.append(f"{opinion.name} ({opinion.version}): ε {proved}{confidence}")
    facts += [_group_line(bound, assessment.unit) for bound in assessment.groups]
    return facts


def gaussian_bound_line(bound: GaussianBound) -> str:
    """Return the Gaussian curve that bounds a guarantee, in words."""
    return (
        f"at most Gaussian: δ(ε) is at most that of μ = {decimal_up(bound.mu, DIGITS)}, plus "
        f"{decimal_up(bound.remainder, 2)}, at every ε (regret {decimal_up(bound.regret, 3)}: how "
        "far the trade-off function may be from that Gaussian's, in both errors)"
    )


def _group_line(bound: GroupBound, unit: str) -> str:
    group = f"{bound.records} {unit}{'' if bound.records == 1 else 's'} under {bound.relation}"
    if bound.epsilon is None:
        why = "; ".join(f"{reason.code}: {reason.message}" for reason in bound.reasons)
        return f"{group}: no proved bound ({why.rstrip('.')})"
    low = decimal_down(bound.epsilon.lower, BRACKET_DIGITS)
    high = decimal_up(bound.epsilon.upper, BRACKET_DIGITS)
    confidence = "" if bound.confidence is None else f" {bound.confidence}"
    return f"{group}: ε in [{low}, {high}]{confidence}"


def _strategy_line(entry: dict[str, Any]) -> str:
    bound = "" if entry["exact"] else " at most"
    parts = [
        f"{entry['kind']} noise: sensitivity{bound} {decimal_up(entry['sensitivity'], DIGITS)}"
    ]
    if entry["rms_error"] is not None:
        parts.append(f"rms error {entry['rms_error']:.5g} and maximum {entry['max_error']:.5g}")
    return ", ".join([*parts, f"{entry['buffers']} buffers"])


PLANNING_FIGURES = {
    "noise_std_of_mean": "noise std per coordinate: per step",
    "prefix_sum_std": "after all steps",
    "signal_to_noise_at_most": "signal-to-noise at most",
    "noise_share_at_least": "ρ at least",
    "momentum_norm": "‖M‖_F of the noise",
    "probe_std": "ρ_t =",
}
"""Labels of the planning figures."""


def _planning_line(entry: dict[str, Any]) -> str:
    name = f"{entry['phase']}/{entry['release']}" if "phase" in entry else entry["release"]
    figures = [
        f"{label} {entry[key]:.3g}".replace("e-0", "e-")
        for key, label in PLANNING_FIGURES.items()
        if key in entry
    ]
    return f"{name}: {', '.join(figures)}"


def _sampling_line(entry: dict[str, Any]) -> str:
    parts = [f"sampling: {entry['scheme']}"]
    if entry["probability"] is not None:
        parts.append(f"q = {entry['probability']:.6g}")
    if entry.get("lot_size") is not None:
        parts.append(f"lots of {entry['lot_size']}")
    if entry["steps"] is not None:
        parts.append(f"{entry['steps']} steps")
    if "participations" in entry:
        parts.append(f"{entry['participations']} participations of a record")
    return ", ".join(parts)


NEIGHBOURS = {
    "add_remove": "{unit} is added or removed",
    "replace_one": "{unit} is replaced by another",
    "zero_out": "{unit} contributes nothing",
}
"""How neighbouring data sets differ."""


def describe_certificate(predicate: Mapping[str, Any]) -> list[str]:
    """Return a verified certificate as lines of text, without its empty fields.

    ``predicate`` must come from a verified statement. ε is in nats, δ a probability and noise in
    clip norms, with the digits of the statement. Never raises: a section in the format of a later
    release is reported as such.
    """
    lines: list[str] = []
    for title, section in SECTIONS.items():
        try:
            lines += section(predicate)
        except (AttributeError, KeyError, TypeError, ValueError):
            lines.append(f"{title}: in a format of a later release; see --json")
    return [printable(line) for line in lines]


def _plan_lines(predicate: Mapping[str, Any]) -> Iterator[str]:
    plan = predicate["plan"]
    dataset = plan.get("dataset") or {}
    size = f" of {dataset['size']} records" if dataset.get("size") else ""
    on = f", on data set {dataset['name']}{size}" if dataset.get("name") else ""
    yield f"plan: {plan.get('name', 'unnamed')}{on}"


def _guarantee_lines(predicate: Mapping[str, Any]) -> Iterator[str]:
    guarantee = predicate["guarantee"]
    if guarantee is None:
        yield "guarantee: none"
        return
    unit = f"one {guarantee['unit']}"
    neighbours = NEIGHBOURS.get(guarantee["adjacency"], "{unit}").format(unit=unit)
    is_shared = (predicate["plan"].get("dataset") or {}).get("users_per_record") is not None
    yield (
        f"protects: {unit}; neighbouring data sets: {neighbours} ({guarantee['adjacency']})"
        + ", with the same public owners of each record" * is_shared
    )
    level = guarantee.get("confidence")
    confidence = "" if level is None else f", with confidence {level}"
    epsilon, delta = _bounds("ε", guarantee["epsilon"]), _bounds("δ", guarantee["delta"])
    yield f"guarantee: {epsilon}, {delta}{confidence}"
    target = guarantee["target"]
    signs = (("epsilon", "ε"), ("delta", "δ"))
    if goals := [f"{sign} = {target[name]}" for name, sign in signs if target[name] is not None]:
        yield f"target: {', '.join(goals)}"


def _bounds(sign: str, bracket: Mapping[str, str]) -> str:
    lower, upper = bracket["lower"], bracket["upper"]
    return f"{sign} = {upper}" if lower == upper else f"{sign} between {lower} and {upper}"


def _run_lines(predicate: Mapping[str, Any]) -> Iterator[str]:
    for phase in predicate.get("sampling", ()):
        rate = "" if phase["probability"] is None else f", q = {phase['probability']}"
        yield f"sampling: {phase['scheme']}{rate}, {phase['steps']} steps"
    for release in predicate.get("noise_multiplier", {}).get("releases", ()):
        noise = release["required"] if release["given"] is None else release["given"]
        blocks = "" if release["count"] == 1 else f", each of {release['count']} blocks"
        yield f"noise: {release['name']}{blocks}: {noise} clip norms"


def _reason_lines(predicate: Mapping[str, Any]) -> Iterator[str]:
    for field, title in (("reasons", "because"), ("warnings", "warning"), ("waived", "waived")):
        for reason in predicate.get(field, ()):
            waiver = reason.get("waiver")
            by = f" (by {waiver['granted_by']}: {waiver['reason']})" if waiver else ""
            yield f"{title}: {reason['code']}: {reason['message']}{by}"


def _condition_lines(predicate: Mapping[str, Any]) -> Iterator[str]:
    for obligation in predicate.get("obligations", ()):
        checked = "checked by the trainer" if obligation["checked_by"] == "trainer" else "declared"
        yield f"obligation ({checked}): {obligation['text']}"
    for assumption in predicate.get("assumptions", ()):
        yield f"assumed: {assumption}"


def _check_lines(predicate: Mapping[str, Any]) -> Iterator[str]:
    for check in certificates.checks_of(predicate):
        yield f"{check.covers} {'checked' if check.is_done else 'not checked'}: {check.sentence}"


def _origin_lines(predicate: Mapping[str, Any]) -> Iterator[str]:
    for engine in predicate.get("accountants", ()):
        yield f"accounted by: {engine['name']} {engine['version']}"
    if policy := predicate.get("policy"):
        yield f"policy: {policy['name']}, version {policy['version']}"
    if requester := predicate.get("requester"):
        yield f"requested by: {requester}"
    if approvals := predicate.get("approvals"):
        names = ", ".join(approval["name"] for approval in approvals["given"])
        yield f"approvals: {approvals['required']} required{names and ', given by ' + names}"
    validity = predicate["validity"]
    yield f"valid: {validity['not_before']} to {validity['not_after']}"


SECTIONS: dict[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    "plan": _plan_lines,
    "guarantee": _guarantee_lines,
    "sampling and noise": _run_lines,
    "reasons": _reason_lines,
    "obligations": _condition_lines,
    "checks": _check_lines,
    "who and when": _origin_lines,
}
"""The lines of each section, in order."""


MAX_EXCERPT_FILE_BYTES = 1 << 20
MAX_EXCERPT_COLUMNS = 100
ABSENT_FIELD_CODES = ("missing_field", "incomplete")
"""Codes about a field that is not in the file."""
FIELD_NAME_CODES = ("unknown_field", "conflict")
"""Codes about the name of a field, not its value."""
_NAME = re.compile(r'"(?:[^"\\]|\\.)*+"|[\w.-]++')
_COMMENT = re.compile(r"\s#")


def print_excerpt(
    console: Console, file: str, line: int | None, column: int | None, code: str
) -> None:
    """Print the line of a file with carets at the column, if the file is a readable text."""
    path = Path(file)
    if line is None or code in ABSENT_FIELD_CODES or path.suffix == ".ipynb":
        return
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return
    lines = _lines_of(path.absolute(), state.st_ino, state.st_size, state.st_mtime_ns)
    if 0 < line <= len(lines):
        for text in frame_excerpt(lines[line - 1], line, column or 1, code):
            console.print(escape(text), style="dim")


@lru_cache(maxsize=1)
def _lines_of(path: Path, *_: int) -> list[str]:
    """Return the lines of a text, read once for all findings in it, or none if it is unreadable."""
    here = Path.cwd()
    folder = here if Path(os.path.abspath(path)).is_relative_to(here) else path.parent
    try:
        raw = read_inside(path, folder, MAX_EXCERPT_FILE_BYTES)
    except (OSError, ValueError):
        return []
    return raw.decode("utf-8", "replace").split("\n") if len(raw) <= MAX_EXCERPT_FILE_BYTES else []


def _end_of_value(text: str) -> int:
    """Return where a line ends without its comment and opening brackets."""
    comment = _COMMENT.search(text)
    return len(text.rstrip(" ,{[") if comment is None else text[: comment.start()].rstrip())


def frame_excerpt(text: str, line: int, column: int, code: str) -> list[str]:
    """Return ``text``, the ``line`` of a file, with carets from ``column`` on."""
    if len(text) > 8 * MAX_EXCERPT_COLUMNS:  # a line of data, which may hold thousands of plans
        left = max(0, min(column - 1, len(text)) - MAX_EXCERPT_COLUMNS)
        text, column = text[left : left + 4 * MAX_EXCERPT_COLUMNS], column - left
    text = "".join(char if char.isprintable() else " " for char in text).rstrip()
    start = min(column - 1, len(text))
    start += len(text[start:]) - len(text[start:].lstrip())
    name = _NAME.match(text, start) if code in FIELD_NAME_CODES else None
    end = _end_of_value(text) if name is None else name.end()
    first = 0 if end <= MAX_EXCERPT_COLUMNS else max(0, start - MAX_EXCERPT_COLUMNS // 4)
    shown = text[first : first + MAX_EXCERPT_COLUMNS]
    carets = max(1, cell_len(text[start : min(end, first + MAX_EXCERPT_COLUMNS)]))
    margin = " " * len(str(line))
    return [
        f"{margin} |",
        f"{line} | {shown}".rstrip(),
        f"{margin} | {' ' * cell_len(text[first:start])}{'^' * carets}",
    ]
