"""A replay record in words."""

from __future__ import annotations

from collections.abc import Iterator

from affidavit.evidence import ReplayRecord

VERDICTS = {"not_refuted": "Not refuted", "refuted": "Refuted", "undecided": "Not decided"}
CHECKS = {"not_tested": "not tested", "undecided": "not decided"}


def to_text(record: ReplayRecord) -> str:
    """Return the lines that a person reads."""
    return "\n".join(_lines(record))


def _lines(record: ReplayRecord) -> Iterator[str]:
    yield f"{VERDICTS[record.verdict]}: {record.program}"
    ran = sum(len(file.lines) for file in record.files)
    yield (
        f"  {record.steps} releases ({', '.join(record.releases) or 'none'}) on "
        f"{record.neighbours} neighbouring data sets; {ran} lines ran; the loop ended "
        f"{record.ended}."
    )
    for name, check in record.checks:
        stated = record.shown if check == "shown" else CHECKS.get(check, check)
        yield f"  {name.replace('_', '-')}: {stated}"
    if record.verdict != "refuted" and record.largest_move is not None:
        yield (
            f"  The largest move of a release is {record.largest_move:.3f} of what its clip norm "
            "allows."
        )
    for finding in record.findings:
        yield f"  {'FAIL' if finding.refutes else 'note'} {finding.code}: {finding.message}"
        if finding.where:
            yield f"       at {finding.where}"
        yield f"       to do: {finding.remedy}"
        if finding.neighbour is not None:
            yield f"       shown by {finding.neighbour}"
    for note in record.notes:
        yield f"  note {note}"
    for name in record.unstable:
        yield f"  note {name} differs between two runs on the same data, and was not compared."
    if record.verdict == "not_refuted":
        yield "  A replay proves nothing: other lines, records and devices may differ."
