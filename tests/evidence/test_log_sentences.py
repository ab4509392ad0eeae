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
