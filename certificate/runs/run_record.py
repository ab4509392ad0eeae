"""The run record: JSON lines, each of which commits to all lines before it.

A line is the RFC 8785 canonical JSON of an entry, with ``previous``, the digest of the line
before (``START`` for the first), and ``digest``, sha256 of the canonical JSON of everything
else in the line. A field that is changed, a line that is dropped, added, repeated or moved
breaks the chain at that place. The chain has no signature: who writes a whole new record
can chain it as well. What ties a record to a run is its last digest, told to somebody else
in time (``affidavit train`` prints it).

An entry has a ``type``:

header      certificate, plan, code, data, sampler, tensors and blocks, before anything is run
checkpoint  the digest of a checkpoint, before it takes the place of the one before
resumed     where a run went on, and how many steps were charged and lost before
charge      one step with all its public parameters, *before* its noise is drawn
release     what the step came to: commitments and the digest of the parameters
final       how the run ended, with counts and the digest of the weights

Nothing in it depends on the data beyond what was released with noise: lot sizes and the data
set are committed to under a secret of the run.

>>> entry = {"type": "release", "step": 0, "lot_size_commitment": "", "parameters": None}
>>> line, digest = encode_line(entry, START)
>>> decode_line(line, START)["step"], digest[:15]
(0, 'sha256:7ee6089f')
>>> decode_line(line.replace(b":0", b":1"), START)
Traceback (most recent call last):
    ...
affidavit.certificate.runs.run_record.BrokenLine: the line does not match its digest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from affidavit.plan import MalformedPlan, canonical_json, digest_of, load_json

RecordEntry = dict[str, Any]

VERSION = 1
START = "sha256:" + 64 * "0"
"""What stands before the first line."""
MAX_LINE_BYTES = 8 * 1024 * 1024

CERTIFIED = "as certified"
"""What stands in the fields whose value the certificate gives, which conformance compares."""
ENTRIES: dict[str, dict[str, str]] = {
    "header": {
        "version": "an integer",
        "run": "a text",
        "certificate_id": CERTIFIED,
        "plan_digest": CERTIFIED,
        "started_at": "a time",
        "code.version": "a text",
        "code.digest": "a digest",
        "generator": CERTIFIED,
        "adjacency": CERTIFIED,
        "unit": CERTIFIED,
        "steps": CERTIFIED,
        "data.commitment": "a digest",
        "phases": CERTIFIED,
        "optimizer": CERTIFIED,
        "tensors": CERTIFIED,
        "parameters": "a digest",
        "performance": CERTIFIED,
        "canaries?": "a digest or null",
        "search?": "a digest or null",
    },
    "checkpoint": {"step": "an integer", "checkpoint": "a digest", "parameters": "a digest"},
    "resumed": {
        "step": "an integer",
        "from_step": "an integer",
        "lost": "an integer",
        "parameters": "a digest",
        "performance": CERTIFIED,
        "at": "a time",
    },
    "charge": {
        "step": "an integer",
        "phase": "an integer",
        "plan_digest": CERTIFIED,
        "clip_norm": "a number for each release",
        "noise_std": "a number for each release",
        "divisor": CERTIFIED,
        "learning_rate": "a number",
        "key_commitment": "a digest",
    },
    "release": {
        "step": "an integer",
        "lot_size_commitment": "a digest",
        "parameters": "a digest or null",
        "clip_counts?": CERTIFIED,
    },
    "final": {
        "ended": CERTIFIED,
        "charged": "an integer",
        "released": "an integer",
        "parameters": "a digest",
        "at": "a time",
        "noise_test?": CERTIFIED,
    },
}
"""What stands in each field of every type of entry, beside ``type``, ``previous`` and ``digest``.

A field with a question mark may be left out. ``clip_counts`` stand where clip norms are adapted.
"""


@cache
def fields(kind: str, *, optional: bool) -> frozenset[str]:
    """The fields of one type of entry that have to be there, or those that may be."""
    paths = (path.partition(".")[0] for path in ENTRIES[kind])
    return frozenset(path.rstrip("?") for path in paths if path.endswith("?") == optional)


LEFT_OUT = frozenset({"data.commitment", "checkpoint", "lot_size_commitment", "learning_rate"})
"""Fields that are null in the record of a guarded loop: the guard reads no data."""

_DIGEST = re.compile("sha256:[0-9a-f]{64}")
_TIME = re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number; ``load_json`` reads only finite ones, and ``true`` is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


_IS: dict[str, Callable[[Any], bool]] = {
    CERTIFIED: lambda _: True,
    "a text": lambda value: isinstance(value, str) and value != "",
    "a time": lambda value: isinstance(value, str) and _TIME.fullmatch(value) is not None,
    "a digest": _digest,
    "a digest or null": lambda value: value is None or _digest(value),
    "a number": is_number,
    "an integer": lambda value: isinstance(value, int) and is_number(value),
    "a number for each release": lambda value: (
        isinstance(value, dict) and all(map(is_number, value.values()))
    ),
}


class BrokenLine(ValueError):
    """A line that is not one of a chain; ``code`` says how."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def encode_line(entry: RecordEntry, previous: str) -> tuple[bytes, str]:
    """The line of ``entry``, with its end, and its digest."""
    stated = {**entry, "previous": previous}
    digest = digest_of(stated)
    return canonical_json({**stated, "digest": digest}) + b"\n", digest


def decode_line(line: bytes, previous: str) -> RecordEntry:
    """The entry of a line that follows ``previous``; raises ``BrokenLine``."""
    try:
        stated = load_json(line, MAX_LINE_BYTES).data
    except MalformedPlan as error:
        raise BrokenLine("not_json", error.reasons[0].message) from None
    if not isinstance(stated, dict) or not isinstance(stated.get("type"), str):
        raise BrokenLine("not_an_entry", "the line is not a run record entry.")
    if canonical_json(stated) + b"\n" != line:
        raise BrokenLine("not_canonical", "the line is not in the trainer's format.")
    rest = {key: value for key, value in stated.items() if key != "digest"}
    if stated.get("digest") != digest_of(rest):
        raise BrokenLine("wrong_digest", "the line does not match its digest.")
    if stated.get("previous") != previous:
        raise BrokenLine("broken_chain", "the line does not follow the one before it.")
    kind, own = stated["type"], {"type", "previous", "digest"}
    if kind not in ENTRIES or (
        stated.keys() - fields(kind, optional=True) != fields(kind, optional=False) | own
    ):
        raise BrokenLine("unknown_fields", f"an entry {kind!r} has the wrong fields.")
    return stated


def is_guarded(header: RecordEntry) -> bool:
    """Whether the record is of a loop of its own under the guard, not of the trainer."""
    return _IS["a text"](_at(header, "code.loop"))


def invalid_fields(entry: RecordEntry, *, guarded: bool) -> Iterator[str]:
    """The invalid fields of ``entry``, in words.

    A ``guarded`` loop leaves out what the guard does not know, and the key where none is said.
    """
    for named, kind in ENTRIES[entry["type"]].items():
        path = named.rstrip("?")
        value = _at(entry, path)
        if guarded and value is None and path in LEFT_OUT:
            continue
        if guarded and path == "key_commitment" and value == f"undisclosed:{entry['step']}":
            continue
        if not _IS[kind](value):
            yield f"{path} is not {kind}"


def _at(entry: RecordEntry, path: str) -> Any:
    """What stands at a dotted path; None where nothing does."""
    result: Any = entry
    for name in path.split("."):
        result = result.get(name) if isinstance(result, dict) else None
    return result
