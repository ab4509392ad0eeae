"""The run record: JSON lines, each of which commits to all earlier lines.

A line is the RFC 8785 canonical JSON of an entry, with ``previous``, the digest of the line before
(``START`` for the first), and ``digest``, the sha256 of the canonical JSON of the rest of the line.
Changing a field, or dropping, adding, repeating or moving a line breaks the chain there. The chain
has no signature: a forger can chain a whole new record. The last digest ties a record to its run if
it is published in time (``affidavit train`` prints it).

An entry has a ``type``:

header      certificate, plan, code, data, sampler, tensors and blocks, before the first step
checkpoint  the digest of a checkpoint, before it replaces the previous one
resumed     the step from which a run continued, and the steps that were charged and lost
charge      one step with all its public parameters, *before* its noise is drawn
release     the result of the step: commitments and the digest of the parameters
final       how the run ended, with counts and the digest of the weights

A record depends on the data only through what was released with noise: it contains commitments to
lot sizes and the data set under a secret of the run.

>>> entry = {"type": "release", "step": 0, "lot_size_commitment": "", "parameters": None}
>>> line, digest = encode_line(entry, START)
>>> decode_line(line, START)["step"], digest[:15]
(0, 'sha256:7ee6089f')
>>> decode_line(line.replace(b":0", b":1"), START)
Traceback (most recent call last):
    ...
affidavit.evidence.run_record.BrokenLine: the line does not match its digest.
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
"""The ``previous`` digest of the first line."""
MAX_LINE_BYTES = 8 * 1024 * 1024

CERTIFIED = "as certified"
"""The type of fields whose value follows from the certificate; conformance compares them."""
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
    "strayed": {"step": "an integer", "code": "a text"},
    "final": {
        "ended": CERTIFIED,
        "charged": "an integer",
        "released": "an integer",
        "parameters": "a digest",
        "at": "a time",
        "noise_test?": CERTIFIED,
    },
}
"""The type of each field of every entry, beside ``type``, ``previous`` and ``digest``.

A field with a question mark is optional. ``clip_counts`` is present if clip norms are adaptive.
"""


@cache
def fields(kind: str, *, optional: bool) -> frozenset[str]:
    """Return the required or the optional fields of one type of entry."""
    paths = (path.partition(".")[0] for path in ENTRIES[kind])
    return frozenset(path.rstrip("?") for path in paths if path.endswith("?") == optional)


UNGUARDED_FIELDS = frozenset(
    {"data.commitment", "checkpoint", "lot_size_commitment", "learning_rate"}
)
"""The fields that may be null in the record of a guarded loop: the guard reads no data."""

_DIGEST = re.compile("sha256:[0-9a-f]{64}")
_TIME = re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number and not a boolean; ``load_json`` reads only finite ones."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


_IS_OF_TYPE: dict[str, Callable[[Any], bool]] = {
    CERTIFIED: lambda _: True,
    "a text": lambda value: isinstance(value, str) and value != "",
    "a time": lambda value: isinstance(value, str) and _TIME.fullmatch(value) is not None,
    "a digest": _is_digest,
    "a digest or null": lambda value: value is None or _is_digest(value),
    "a number": is_number,
    "an integer": lambda value: isinstance(value, int) and is_number(value),
    "a number for each release": lambda value: (
        isinstance(value, dict) and all(map(is_number, value.values()))
    ),
}


class BrokenLine(ValueError):
    """The line breaks the chain; ``code`` says how."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def encode_line(entry: RecordEntry, previous: str) -> tuple[bytes, str]:
    """Return the line of ``entry``, which ends in a newline, and its digest."""
    stated = {**entry, "previous": previous}
    digest = digest_of(stated)
    return canonical_json({**stated, "digest": digest}) + b"\n", digest


def decode_line(line: bytes, previous: str) -> RecordEntry:
    """Parse a line that follows the digest ``previous``; raises ``BrokenLine``."""
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
    """Whether the record is of a user's loop under the guard, not of the trainer."""
    return _IS_OF_TYPE["a text"](_value_at(header, "code.loop"))


def invalid_fields(entry: RecordEntry, *, guarded: bool) -> Iterator[str]:
    """Yield a description of each invalid field of ``entry``.

    A ``guarded`` loop omits the fields that the guard does not know, and the key if it is unknown.
    """
    for named, kind in ENTRIES[entry["type"]].items():
        path = named.rstrip("?")
        value = _value_at(entry, path)
        if guarded and value is None and path in UNGUARDED_FIELDS:
            continue
        if guarded and path == "key_commitment" and value == f"undisclosed:{entry['step']}":
            continue
        if not _IS_OF_TYPE[kind](value):
            yield f"{path} is not {kind}"


def _value_at(entry: RecordEntry, path: str) -> Any:
    """Return the value at a dotted path, or None."""
    result: Any = entry
    for name in path.split("."):
        result = result.get(name) if isinstance(result, dict) else None
    return result
