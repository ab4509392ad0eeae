"""Evidence in which a part is another's genuine part: both verifiers reject it at one step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest

from affidavit.evidence import tell_story
from affidavit.evidence.evidence_file import REPLAY, STORY
from tests.browser.conftest import chromium  # noqa: F401
from tests.service.runs.conftest import ON_SQLITE, Yard
from tests.service.runs.test_evidence import MANIFEST, Made, fetch
from tests.service.runs.test_verifier_page import compare_evidence, page, with_tests  # noqa: F401
from tests.support.verifier_page import VerifierPage

DECLARED = {"about.json", "audit.json", "keys.json"}
"""Of which nothing vouches for what may differ: a time, complaints, and keys for information."""
HARMLESS = {*DECLARED, "status.json", REPLAY}
"""What may be added to the whole file of another: a newer list too, and a replay of its plan."""


def made_and_others(yard: Yard) -> tuple[Made, dict[str, Made]]:
    """The evidence of a run whose certificate was revoked, and that of others or of before."""
    before = with_tests(yard)
    about = json.loads(before.files["about.json"])
    path = f"/v1/certificates/{about['certificate']}"
    others = {
        "before": before,
        "another run": with_tests(yard, again=True),
        "another plan": with_tests(yard, name="other"),
        "no run": replace(before, raw=fetch(yard, f"{path}/evidence")),
    }
    why = {"code": "plan_error", "reason": "wrong"}
    assert yard.ask("POST", f"{path}/revocation", "approve", why).is_success
    return replace(before, raw=fetch(yard, f"/v1/runs/{about['run']}/evidence")), others


def swapped(made: Made, other: Made) -> Iterator[tuple[set[str], bytes]]:
    """One part, two, or all but one are those of ``other``, and the page tells them."""
    mine, theirs = made.files, other.files
    names = sorted({*mine, *theirs} - {MANIFEST, STORY})
    differing = {name for name in names if mine.get(name) != theirs.get(name)}
    chosen = [{name} for name in names] + [set(pair) for pair in combinations(names, 2)]
    chosen += [set(names) - {name} for name in names]
    for swap in chosen:
        changed = swap & differing
        if not changed or changed == differing:
            continue
        changes = {name: theirs.get(name) for name in changed}
        files = {name: changes.get(name, mine.get(name)) for name in names}
        try:
            changes[STORY] = tell_story({n: c for n, c in files.items() if c is not None})
        except (KeyError, IndexError, TypeError):
            changes[STORY] = mine[STORY]
        yield changed, made.with_files(**changes)


@ON_SQLITE
@pytest.mark.soak
def test_both_reject_what_is_another_files(page: VerifierPage, yard: Yard) -> None:  # noqa: F811
    made, others = made_and_others(yard)
    steps = set()
    for what, other in others.items():
        items = list(swapped(made, other))
        differing = set().union(*(changed for changed, _ in items))
        outcomes = compare_evidence(page, [raw for _, raw in items], made)
        for (changed, _), (step, _) in zip(items, outcomes, strict=True):
            alike = changed <= DECLARED or differing - changed <= HARMLESS
            assert step or alike, (what, changed)
            steps.add(step)
    assert steps >= {0, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13}
