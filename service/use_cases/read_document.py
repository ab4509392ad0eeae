"""Read a pasted document as a plan: a plan, a training script, a notebook, another library's JSON.

The text is parsed and never run, no other file is read, and it happens in an accounting process
that is killed past its time limit. What a document does not say must be given, as in the gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from affidavit.accountants import opacus_noise
from affidavit.importers import LIBRARIES, Partial, imported, imported_document
from affidavit.plan import MalformedPlan, Reason, load_json, load_yaml, plan_from
from affidavit.service.pool import AccountingPool

LONGEST = 256 * 1024
"""Characters of a pasted document."""
FIELDS = frozenset({"version", "dataset", "adjacency", "sampling", "releases", "phases", "target"})
"""Some fields of a plan; a mapping that has one of them is a plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadDocument:
    """What was read: a complete ``document`` of a plan, or the reasons why there is none.

    ``kind`` is what was recognised, or None for a plan. ``assumed`` are sentences; ``broken``
    are obligations of the plan that the document's library is known not to fulfil.
    """

    kind: str | None = None
    document: Mapping[str, Any] | None = None
    reasons: tuple[Reason, ...] = ()
    assumed: tuple[str, ...] = ()
    broken: tuple[tuple[str, str], ...] = ()


class DocumentReader:
    """The use case, with the pool it works in."""

    def __init__(self, pool: AccountingPool) -> None:
        self._pool = pool

    async def __call__(self, text: str, entered: Mapping[str, Any]) -> ReadDocument:
        """``text`` as a plan, completed with the fields ``entered``.

        Raises ``AccountingUnavailable``.
        """
        if len(text) > LONGEST:
            return _refused("too_large", f"it is longer than {LONGEST:,} characters.")
        return await self._pool.run(read_document, text, entered)


def read_document(text: str, entered: Mapping[str, Any]) -> ReadDocument:
    """In the pool: what ``text`` says, completed with the fields ``entered``."""
    partial: Partial | None = None
    try:
        plan, partial = _recognised(text)
        document = (
            plan
            if partial is None
            else partial.completed(dict(entered), "the document", opacus_noise)
        )
        whole = plan_from(document)
    except MalformedPlan as error:
        reasons = error.reasons if partial is None else _with_unread(error.reasons, partial)
        return ReadDocument(kind=None if partial is None else partial.kind, reasons=reasons)
    except (RecursionError, MemoryError):
        return _refused("not_imported", "it is nested too deeply to be read.")
    if partial is None:
        return ReadDocument(document=document)
    schemes = {phase.sampling.scheme for phase in whole.phases}
    return ReadDocument(
        kind=partial.kind,
        document=document,
        assumed=partial.assumed,
        broken=tuple(
            (fault.message, fault.remedy)
            for fault in partial.broken
            if fault.applies(whole.adjacency, schemes)
        ),
    )


def _recognised(text: str) -> tuple[Any, Partial | None]:
    """The document as a plan, or the fields of another library's; raises ``MalformedPlan``."""
    raw = text.encode("utf-8", "replace")
    if text.lstrip().startswith("{"):
        data = load_json(raw).data
        if "cells" in data:
            return None, _called(imported("notebook.ipynb", raw))
        return data, imported_document(data)
    try:
        data = load_yaml(raw).data
    except MalformedPlan as error:
        partial = imported("script.py", raw)
        if partial is None:
            raise error
        return None, partial
    if isinstance(data, dict) and not FIELDS.isdisjoint(data):
        return data, None
    return None, _called(imported("script.py", raw))


def _called(partial: Partial | None) -> Partial:
    if partial is None:
        raise MalformedPlan(_no_plan())
    return partial


def _no_plan() -> Reason:
    return Reason(
        code="no_plan",
        pointer="",
        message="it is no plan, and has no call that Affidavit reads, which are the private calls "
        f"of {', '.join(LIBRARIES)}.",
        remedy="Paste the file that makes the private call, or a plan.",
    )


def _with_unread(reasons: tuple[Reason, ...], partial: Partial) -> tuple[Reason, ...]:
    """``reasons``, each with the expressions that could not be read, where there are some."""
    return tuple(
        replace(
            reason,
            message=" ".join(
                (reason.message, *(why for at, why in partial.unread if _concerns(at, reason)))
            ),
        )
        for reason in reasons
    )


def _concerns(pointer: str, reason: Reason) -> bool:
    """Whether one is a part of the other."""
    return bool(reason.pointer) and (
        pointer.startswith(reason.pointer) or reason.pointer.startswith(pointer)
    )


def _refused(code: str, message: str) -> ReadDocument:
    reason = Reason(
        code=code, pointer="", message=message, remedy="Paste the part that makes the private call."
    )
    return ReadDocument(reasons=(reason,))
