"""Evidence in which a part is another's genuine part: both verifiers reject it at one step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import combinations
from typing import Any

import pytest

from affidavit.evidence import Canaries, EvidenceError, tell_story, verify_evidence
from affidavit.evidence.evidence_file import AUDIT, REPLAY, STORY
from affidavit.plan import canonical_json
from affidavit.service.core.database import writer
from affidavit.service.identity.actor import CommandContext
from affidavit.service.runs import repository
from tests.browser.conftest import chromium  # noqa: F401
from tests.service.runs.conftest import ON_SQLITE, Yard
from tests.service.runs.test_evidence import CANARIES, MANIFEST, Made, audited, fetch, made_of
from tests.service.runs.test_verifier_page import (
    case_of,
    compare_evidence,
    page,  # noqa: F401
    with_tests,
)
from tests.support.verifier_page import VerifierPage, outcome_of

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


def lie(what: str, audit: dict[str, Any]) -> dict[str, Any]:
    other = Canaries.of(b"7" * 32, CANARIES.count, None)
    changes: dict[str, dict[str, Any]] = {
        "right": {"right": audit["right"] + 1},
        "losses": {"losses": audited(right=6)["losses"]},
        "fewer losses": {"losses": audit["losses"][1:]},
        "plan": {"plan": "sha256:" + "0" * 64},
        "type": {"type": "affidavit.replay/1"},
        "canaries": {"canaries": json.loads(other.as_bytes())},
        "count": {"canaries": {**audit["canaries"], "count": CANARIES.count + 2}},
        "verdict": {"verdict": "refuted"},
        "bound": {"epsilon_at_least": "0.1"},
    }
    return {**audit, **changes[what]}


BOUNDS = {"verdict", "bound"}
"""What only Python computes."""


@ON_SQLITE
@pytest.mark.soak
@pytest.mark.parametrize(
    "what",
    ["right", "losses", "fewer losses", "plan", "type", "canaries", "count", *sorted(BOUNDS)],
)
def test_both_reject_an_audit_about_which_the_service_lies(
    page: VerifierPage,  # noqa: F811
    yard: Yard,
    what: str,
) -> None:
    """It stores and logs another result than that of canaries and losses."""
    honest = with_tests(yard)
    made = made_of(yard, 10, canaries=True, again=True)
    run = json.loads(made.files["about.json"])["run"]
    context = CommandContext(actor="token:admin", at=datetime.now(UTC))
    forged = canonical_json(lie(what, json.loads(honest.files[AUDIT])))
    with writer(yard.engine).begin() as connection:
        repository.add_test(connection, run, "audit", forged, context)
    raw = fetch(yard, f"/v1/runs/{run}/evidence")
    with pytest.raises(EvidenceError) as caught:
        verify_evidence(raw, made.trusted)
    assert (caught.value.step, caught.value.code) == (13, "evidence_mismatch")
    (result,) = page.results([case_of(raw, made.trusted)])
    if what in BOUNDS:
        assert outcome_of(result) == (0, "held")
        assert not result["steps"][12]["checked"]
    else:
        assert outcome_of(result) == (13, "evidence_mismatch")
