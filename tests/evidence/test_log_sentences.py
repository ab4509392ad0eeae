"""Every kind of entry and every event of a run has a sentence of its own."""

from __future__ import annotations

from typing import get_args

from affidavit.evidence.log_sentences import sentence_of
from affidavit.service.log.entries import EntryKind
from affidavit.service.runs.repository import End
from affidavit.service.runs.repository import Kind as RunKind


def test_every_kind_of_entry_has_a_sentence() -> None:
    events = {kind for part in get_args(RunKind) for kind in (get_args(part) or (part,))}
    bodies = [("run", {"event": event}) for event in events | set(get_args(End))]
    bodies += [("approval", {"decision": decision}) for decision in ("approve", "reject")]
    bodies += [("steps", {"granted": 10})]
    done = {kind for kind, _ in bodies}
    bodies += [(kind, {}) for kind in get_args(EntryKind) if kind not in done]
    told = [sentence_of({"kind": kind, "actor": "ada", "body": body}) for kind, body in bodies]
    assert len(set(told)) == len(told)
    assert all(text.startswith("ada ") and text.endswith(".") for text in told)
    assert not any("made an entry" in text or "changed the run" in text for text in told)


def test_a_sentence_names_what_the_entry_is_about() -> None:
    body = {"ledger": {"dataset": "wards"}, "epsilon": "10", "delta": "1e-5", "reason": "for 2026."}
    entry = {"kind": "budget", "actor": "ruth", "body": body}
    assert sentence_of(entry) == "ruth set the budget of wards to ε = 10 at δ = 1e-5: for 2026."
    run = {"kind": "run", "actor": "dana", "body": {"event": "queued"}}
    assert sentence_of(run, "{plan}") == "dana requested a run of {plan}."
    assert "None" not in sentence_of({"kind": "policy", "actor": "ruth", "body": {}})
