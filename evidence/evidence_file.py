"""The evidence file: everything about one certificate, or one run of it, in one zip.

The bytes follow from the contents alone: files are stored without compression, in the order of
their names, with a fixed date and no comments or extra fields. ``manifest.json`` has the sha256 of
every other file. So a reader can write the file again and compare, and an altered byte is found
wherever it is: in a file, in the manifest, or in the structure of the zip.

========================  ==========================================================================
``index.html``            the story in words, derived from the other files
``verify.html``           a page that verifies such files, and bundles, without the network
``manifest.json``         ``{"format": "affidavit-evidence/v1", "files": {name: sha256}}``
``timestamp.tsr``         an authority's timestamp of the manifest (RFC 3161), in DER
``about.json``            the certificate, the run, the time and the release that wrote the file
``bundle.json``           the certificate's signed bundle, with its place in the log
``plan.json``             the plan as certified, in canonical JSON
``policy.json``           the policy under which it was issued
``waivers.json``          what the policy forbids and a waiver allows
``issues.json``           all issues of the certificate, their approvals and revocation
``status.json``           the signed status list at that time
``keys.json``             the service's public keys
``keysets.json``          every published keyset, oldest first
``audit.json``            what the service's own audit complained about at that time
``log/entries.jsonl``     the log's entries about certificate, reservation and run, with their salts
``log/proofs.json``       the signed checkpoint, a proof for each entry, and the consistency proof
``replay.json``           what a replay of the training script on the certified plan showed
``canary-audit.json``     what an audit of the run's canaries showed, with canaries and losses
``ledger.json``           the data set's ledger before and after each event of the reservation
``record.jsonl``          the run record
``conformance.json``      what comparing the record with the certificate found
``provenance.json``       the worker's signed statement about the run
========================  ==========================================================================

The last four and the audit are of a run, to which the audit was added. A replay was added to the
run, or by those who fetched the file, and an authority of the service's settings or of theirs
stamped it; the manifest lists all files but the timestamp. All JSON but the record and the entries
is canonical (RFC 8785).

Reference: PKWARE, APPNOTE 6.3.10, sections 4.3.7, 4.3.12 and 4.3.16.

>>> raw = b"".join(write_evidence({"about.json": b"{}"}))
>>> sorted(read_evidence(raw))
['about.json', 'manifest.json']
>>> read_evidence(raw.replace(b"{}", b"[]"))
Traceback (most recent call last):
affidavit.evidence.evidence_file.EvidenceError: step 1 (form): about.json was altered...
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from affidavit.plan import MalformedPlan, canonical_json, digest_of_bytes, load_json
from affidavit.trust import StepError

FORMAT = "affidavit-evidence/v1"
MANIFEST = "manifest.json"
STORY = "index.html"
VERIFIER = "verify.html"
REPLAY = "replay.json"
AUDIT = "canary-audit.json"
TIMESTAMP = "timestamp.tsr"
MAX_BYTES = 1024 * 1024 * 1024
"""The size of an evidence file; a record has at most a quarter of it."""
NAMES = frozenset(
    {
        *("index.html", "manifest.json", "about.json", "bundle.json", "plan.json", "policy.json"),
        *("waivers.json", "issues.json", "status.json", "keys.json", "keysets.json", "audit.json"),
        *("log/entries.jsonl", "log/proofs.json", "ledger.json", "record.jsonl"),
        *("conformance.json", "provenance.json", "verify.html", REPLAY, AUDIT, TIMESTAMP),
    }
)
"""The files that there can be."""
EVIDENCE_STEPS = (
    "form",
    "manifest",
    "certificate",
    "log",
    "plan and policy",
    "approvals",
    "status list",
    "keysets",
    "run",
    "provenance",
    "conformance",
    "ledger",
    "replay and audit",
    "story",
    "timestamp",
)

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_VERSION, _UTF8, _STORED, _TIME, _DATE = 20, 0x0800, 0, 0, 0x0021  # 1980-01-01
_REGULAR_FILE = 0o100644 << 16
_UNIX = 3 << 8


class EvidenceError(StepError):
    """A step rejected the evidence."""

    step_names = EVIDENCE_STEPS

    def __init__(self, step: int, code: str, message: str, remedy: str = "") -> None:
        super().__init__(step, code, message, remedy or "Get the file again from its author.")


# ---- writing -------------------------------------------------------------------------


def manifest_of_files(files: Mapping[str, bytes]) -> bytes:
    """Return the manifest of ``files``: all but itself and its timestamp."""
    digests = {
        name: digest_of_bytes(content)
        for name, content in files.items()
        if name not in (MANIFEST, TIMESTAMP)
    }
    return canonical_json({"format": FORMAT, "files": digests})


def write_evidence(files: Mapping[str, bytes]) -> Iterator[bytes]:
    """Yield the evidence file of ``files``, with their manifest, part by part."""
    return _write_zip({**files, MANIFEST: manifest_of_files(files)})


def _write_zip(files: Mapping[str, bytes]) -> Iterator[bytes]:
    central, offset = [], 0
    for name in sorted(files):
        content, raw_name = files[name], name.encode()
        sizes = zlib.crc32(content), len(content), len(content)
        shared = (_VERSION, _UTF8, _STORED, _TIME, _DATE, *sizes, len(raw_name))
        header = _LOCAL.pack(b"PK\x03\x04", *shared, 0) + raw_name
        made_by = _UNIX | _VERSION
        attributes = (0, 0, 0, 0, _REGULAR_FILE, offset)
        central.append(_CENTRAL.pack(b"PK\x01\x02", made_by, *shared, *attributes) + raw_name)
        yield header
        yield content
        offset += len(header) + len(content)
    directory = b"".join(central)
    counts = (0, 0, len(central), len(central), len(directory), offset, 0)
    yield directory + _END.pack(b"PK\x05\x06", *counts)


# ---- reading -------------------------------------------------------------------------


def read_evidence(raw: bytes) -> dict[str, bytes]:
    """Return the files of an evidence file, by name, as they were written.

    Raises ``EvidenceError`` of the first two steps, which names the altered file.
    """
    if len(raw) > MAX_BYTES:
        raise EvidenceError(1, "evidence_too_large", f"it has more than {MAX_BYTES} bytes.")
    files = _read_zip(raw)
    manifest = files.get(MANIFEST)
    if manifest is None:
        raise EvidenceError(1, "evidence_form", f"it has no {MANIFEST}.")
    _require_same_bytes(raw, files)
    unlisted = (MANIFEST, TIMESTAMP)
    _require_listed(manifest, {name: files[name] for name in files if name not in unlisted})
    return files


def _read_zip(raw: bytes) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    offset, last = 0, "its beginning"
    while raw[offset : offset + 4] == b"PK\x03\x04" and len(files) < len(NAMES):
        header = raw[offset : offset + _LOCAL.size]
        if len(header) < _LOCAL.size:
            break
        size, name_length = _LOCAL.unpack(header)[8:10]
        start = offset + _LOCAL.size + name_length
        try:
            name = raw[offset + _LOCAL.size : start].decode()
        except UnicodeDecodeError:
            break
        if name not in NAMES:
            raise EvidenceError(1, "evidence_altered", f"the zip has another file after {last}.")
        if start + size > len(raw) or name in files:
            break
        files[name] = raw[start : start + size]
        offset, last = start + size, name
    if raw[offset : offset + 4] != b"PK\x01\x02":
        raise EvidenceError(1, "evidence_altered", f"the zip cannot be read after {last}.")
    return files


def _require_same_bytes(raw: bytes, files: Mapping[str, bytes]) -> None:
    """Compare ``raw`` with the zip of ``files``, which has one form."""
    offset = 0
    names = [name for name in sorted(files) for _ in ("header", "content")]
    for part, name in zip(_write_zip(files), [*names, "the directory of the zip"], strict=True):
        if raw[offset : offset + len(part)] != part:
            raise EvidenceError(1, "evidence_altered", f"{name} was altered.")
        offset += len(part)
    if offset != len(raw):
        raise EvidenceError(1, "evidence_altered", "the zip goes on after its end.")


def _require_listed(manifest: bytes, files: Mapping[str, bytes]) -> None:
    if manifest == manifest_of_files(files):
        return
    try:
        stated = load_json(manifest).data["files"]
        altered = [
            name for name, content in files.items() if stated.get(name) != digest_of_bytes(content)
        ]
        missing = [str(name) for name in stated if name not in files]
    except (MalformedPlan, KeyError, TypeError, AttributeError):
        altered, missing = [], []
    if missing:
        raise EvidenceError(2, "evidence_missing", f"{', '.join(missing[:5])} is missing.")
    where = ", ".join(altered[:5]) or MANIFEST
    raise EvidenceError(2, "evidence_altered", f"{where} was altered.")


def load_part(files: Mapping[str, bytes], name: str, step: int) -> Any:
    """Return the JSON document ``name``; raises ``EvidenceError`` of ``step``."""
    content = part_of(files, name, step)
    try:
        document = load_json(content, len(content)).data
        if canonical_json(document) == content:
            return document
    except MalformedPlan:
        pass
    raise EvidenceError(step, "evidence_form", f"{name} is not canonical JSON.")


def part_of(files: Mapping[str, bytes], name: str, step: int) -> bytes:
    """Return the file ``name``; raises ``EvidenceError`` of ``step``."""
    if name not in files:
        raise EvidenceError(step, "evidence_missing", f"{name} is missing.")
    return files[name]
