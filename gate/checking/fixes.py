"""Fixes for an under-noised plan: more noise, fewer steps or smaller lots, each certified.

A fix is tried on a copy of the plan's document and proposed only if the plan so changed is
certified, with the very decimals that are proposed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

from affidavit.accountants import decimal_up
from affidavit.certificate import Assessment, certify
from affidavit.gate.checking.edits import Tokens, edit
from affidavit.gate.checking.finding import Fix
from affidavit.gate.checking.source import Source
from affidavit.plan import Plan, PlanError, plan_from, pointer_to

DIGITS = 7

Change = tuple[Tokens, Any, Any]
"""Where, the value before and the value after."""


def fixes_for(source: Source, plan: Plan, found: Assessment) -> tuple[Fix, ...]:
    """The fixes of ``plan``, read from ``source``, that ``found`` calls under-noised."""
    if plan.target.epsilon is None or plan.target.delta is None:
        return ()
    tried = (_certified(source, changes, words) for words, changes in _proposals(source, found))
    return tuple(fix for fix in tried if fix is not None)


def _proposals(source: Source, found: Assessment) -> Iterator[tuple[str, list[Change]]]:
    if more := list(_more_noise(source, found)):
        yield "raise " + ", ".join(_words(source, more)), more
    if len(_phases(source.data)) == 1:
        base = _phases(source.data)[0]
        if fewer := _fewer_steps(source, base):
            yield "or train for fewer steps: " + ", ".join(_words(source, [fewer])), [fewer]
        if smaller := _smaller_lots(source, base):
            yield "or draw smaller lots: " + ", ".join(_words(source, [smaller])), [smaller]


def _more_noise(source: Source, found: Assessment) -> Iterator[Change]:
    places = [
        (*base, "releases", index)
        for base in _phases(source.data)
        for index in range(len(_at(source.data, (*base, "releases"))))
    ]
    if len(places) != len(found.releases):
        return
    for place, noise in zip(places, found.releases, strict=True):
        if noise.required is None:
            continue
        release = _at(source.data, place)
        field = "noise_std" if release.get("noise_std") is not None else "noise_multiplier"
        scale = float(release["clip_norm"]) if field == "noise_std" else 1.0
        needed = float(decimal_up(noise.required * scale * (1 + 1e-15), DIGITS))
        if needed > float(release[field]):
            yield (*place, field), release[field], needed


def _fewer_steps(source: Source, base: Tokens) -> Change | None:
    phase = _at(source.data, base)
    document = copy.deepcopy(source.data)
    asked = _at(document, base)
    before = asked.pop("epochs", None)
    asked["steps"] = None
    answer = _assessed(document)
    if answer is None or not answer.sampling or answer.verdict != "certified":
        return None
    steps = answer.sampling[0].get("steps")
    if not steps:
        return None
    if before is None:
        return ((*base, "steps"), phase.get("steps"), int(steps))
    # Epochs are cut in proportion, rounded down; what they come to is certified afterwards.
    whole = _assessed(source.data)
    now = whole.sampling[0].get("steps") if whole is not None and whole.sampling else None
    if not now:
        return None
    epochs = math.floor(float(before) * int(steps) / int(now) * 1000) / 1000
    return ((*base, "epochs"), before, epochs) if epochs > 0 else None


def _smaller_lots(source: Source, base: Tokens) -> Change | None:
    sampling = _at(source.data, (*base, "sampling"))
    if sampling.get("lot_size") is None or sampling.get("probability") is not None:
        return None
    document = copy.deepcopy(source.data)
    _at(document, (*base, "sampling"))["lot_size"] = None
    answer = _assessed(document)
    if answer is None or not answer.sampling or answer.verdict != "certified":
        return None
    lot = answer.sampling[0].get("lot_size")
    return ((*base, "sampling", "lot_size"), sampling["lot_size"], int(lot)) if lot else None


def _certified(source: Source, changes: list[Change], words: str) -> Fix | None:
    document = copy.deepcopy(source.data)
    for tokens, _, after in changes:
        _at(document, tokens[:-1])[tokens[-1]] = after
    found = _assessed(document)
    if found is None or found.verdict != "certified" or found.epsilon is None:
        return None
    edits = [
        edit(source.text, tokens, after) if source.text else None for tokens, _, after in changes
    ]
    made = tuple(item for item in edits if item is not None)
    return Fix(
        description=f"{words} (ε ≤ {decimal_up(found.epsilon.upper, 6)})",
        changes=tuple((pointer_to(*tokens), before, after) for tokens, before, after in changes),
        epsilon=found.epsilon.upper,
        edits=made if len(made) == len(changes) else (),
    )


def _assessed(document: Any) -> Assessment | None:
    try:
        return certify(plan_from(document), second_opinion=False)
    except PlanError:
        return None


def _words(source: Source, changes: list[Change]) -> list[str]:
    return [_word(source, tokens, before, after) for tokens, before, after in changes]


def _word(source: Source, tokens: Tokens, before: Any, after: Any) -> str:
    whose = ""
    if "releases" in tokens:
        name = _at(source.data, tokens[:-1]).get("name", tokens[-2])
        whose = f" of {name}"
    return f"{tokens[-1]}{whose} from {before} to {after}"


def _phases(data: Any) -> list[Tokens]:
    return [("phases", index) for index in range(len(data["phases"]))] if "phases" in data else [()]


def _at(data: Any, tokens: Tokens) -> Any:
    for token in tokens:
        data = data[token]
    return data
