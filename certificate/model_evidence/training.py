"""What certificate, run record, weights and canaries prove together about a training.

Signing and verifying a model both begin here, so that nothing is signed that does not verify.

Weights are in safetensors. A run record lists the trained tensors in order, by name and shape, and
ends with one digest over all of them: sha256 over each tensor's type and shape, a line feed, and
its little-endian bytes. A safetensors file holds the same bytes and says where, so that the digest
is computed from it with nothing but the standard library. Tensors that the record does not list
(buffers, frozen layers) are named and were not trained under the certificate.

Pickled weights (``.pt``) would have to be executed to be read, and are not.

Reference: the safetensors format, v0.4: eight bytes of length, a JSON header, the tensors.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from affidavit.certificate.keys.key import PublicKey, parse_instant
from affidavit.certificate.model_evidence.audit import (
    AUDITABLE,
    Audit,
    BadCanaries,
    Canaries,
    audit_canaries,
    read_canaries,
    read_losses,
)
from affidavit.certificate.model_evidence.claim import (
    CANARIES_FILE,
    CERTIFICATE_FILE,
    LOSSES_FILE,
    RECORD_FILE,
    Evidence,
    Training,
)
from affidavit.certificate.model_evidence.manifest import BadModel, Manifest, printable
from affidavit.certificate.runs.conformance import check_conformance
from affidavit.certificate.runs.run_record import START, RecordEntry, decode_line, is_guarded
from affidavit.certificate.runs.step_requirements import certified_plan
from affidavit.certificate.verification.bundle_verification import verify
from affidavit.certificate.verification.verification_result import (
    VerificationError,
    VerificationOptions,
)
from affidavit.plan import AuditCanaries, MalformedPlan, PlanError, load_json

SUFFIX = ".safetensors"
TORCH = {
    "F64": ("torch.float64", 8),
    "F32": ("torch.float32", 4),
    "F16": ("torch.float16", 2),
    "BF16": ("torch.bfloat16", 2),
}
"""Types of trained tensors: the name in a record's digest, and bytes of a number."""
MAX_HEADER = 100 * 1024 * 1024
PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """A tensor in its file: the file, the first byte, how many, and how the digest names it."""

    path: Path
    first: int
    size: int
    described: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsDigest:
    """``digest`` of the tensors that a record lists; ``others`` are in the files beside them."""

    digest: str
    others: tuple[str, ...]


def digest_of_weights(paths: Iterable[Path], tensors: Iterable[Mapping[str, Any]]) -> WeightsDigest:
    """The record's digest of ``tensors`` (its header's list), from safetensors files.

    Raises ``BadModel`` where a file is not safetensors, or a tensor is missing, twice there, or of
    another shape; ``OSError`` where a file cannot be read.
    """
    places: dict[str, _Place] = {}
    for path in paths:
        for name, place in _places(path).items():
            if name in places:
                raise _bad(f"{printable(name)} is in {places[name].path.name} and in {path.name}.")
            places[name] = place
    result = hashlib.sha256()
    for tensor in tensors:
        name, shape = str(tensor["name"]), tensor.get("shape")
        if name not in places:
            raise _bad(f"the trained tensor {printable(name)} is in no safetensors file.")
        place = places.pop(name)
        if not place.described.endswith(f" {shape}\n"):
            raise _bad(f"{printable(name)} is {place.described.strip()}, and {shape} was trained.")
        result.update(place.described.encode())
        _update(result, place)
    return WeightsDigest(digest=f"sha256:{result.hexdigest()}", others=tuple(sorted(places)))


def _update(result: Any, place: _Place) -> None:
    with place.path.open("rb") as stream:
        stream.seek(place.first)
        left = place.size
        while left and (piece := stream.read(min(PIECE, left))):
            result.update(piece)
            left -= len(piece)


def _places(path: Path) -> dict[str, _Place]:
    """Every tensor of a safetensors file; raises ``BadModel``."""
    with path.open("rb") as stream:
        try:
            header, begin = _header(stream)
            end = os.fstat(stream.fileno()).st_size - begin
            return {
                name: _place(path, begin, end, entry)
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (MalformedPlan, KeyError, TypeError, ValueError, AttributeError):
            raise _bad(f"{printable(path.name)} is not a safetensors file.") from None


def _header(stream: BinaryIO) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(stream.read(8), "little")
    if not 2 <= length <= MAX_HEADER:
        raise ValueError("no header")
    content = stream.read(length)
    if len(content) < length:
        raise ValueError("cut off")
    header: dict[str, Any] = load_json(content, MAX_HEADER).data
    return header, 8 + length


def _place(path: Path, begin: int, end: int, entry: Mapping[str, Any]) -> _Place:
    first, last = entry["data_offsets"]
    shape = list(entry["shape"])
    dtype, size = TORCH.get(entry["dtype"], (str(entry["dtype"]), None))
    count = size
    for length in shape:
        if type(length) is not int or length < 0:
            raise ValueError("a shape")
        count = None if count is None else count * length
    if not 0 <= first <= last <= end or (count is not None and count != last - first):
        raise ValueError("offsets")
    return _Place(path=path, first=begin + first, size=last - first, described=f"{dtype} {shape}\n")


def _bad(message: str) -> BadModel:
    return BadModel(
        "other_weights", message, "Put this run's weights into the folder, in safetensors."
    )


FETCH = "Fetch the model again from whoever signed it."


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFinding:
    """One mismatch: the file, a stable code, and what to do."""

    file: str
    code: str
    message: str
    remedy: str = FETCH

    def as_dict(self) -> dict[str, str]:
        """The finding as JSON data."""
        return asdict(self)


class NotTrained(Exception):
    """Certificate and record do not support a claim; ``finding`` names the file."""

    def __init__(self, file: str, code: str, message: str, remedy: str = FETCH) -> None:
        self.finding = ModelFinding(file=file, code=code, message=message, remedy=remedy)
        super().__init__(f"{file}: {message} {remedy}")


def training_of(
    folder: Path,
    manifest: Manifest,
    trusted: Iterable[PublicKey],
    *,
    evidence: Evidence,
    now: datetime,
    options: VerificationOptions,
) -> Training:
    """Steps 3 to 6 of the verification; raises ``NotTrained``."""
    trusted, bundle, record = tuple(trusted), evidence.bundle, evidence.record
    try:
        header = decode_line(record.split(b"\n", 1)[0] + b"\n", START)
        started_at = parse_instant(header["started_at"])
    except (ValueError, KeyError, TypeError):
        raise NotTrained(
            RECORD_FILE, "bad_record", "the first line is not a run record header."
        ) from None
    try:
        predicate = _certified(bundle, trusted, started_at, now, options)
    except VerificationError as error:
        raise NotTrained(CERTIFICATE_FILE, error.code, error.message, error.remedy) from None
    try:
        report = check_conformance(record, predicate)
    except (PlanError, ValueError) as error:
        raise NotTrained(CERTIFICATE_FILE, "unreadable_plan", f"{error}") from None
    if not report.conformant:
        first = next(item for item in report.findings if not item.noted)
        raise NotTrained(
            RECORD_FILE,
            first.code,
            f"line {first.line}: {first.message}",
            "The certificate's guarantee does not hold for this run: train again as certified.",
        )
    checked, untrained = _weights(folder, manifest, header, record)
    return Training(
        certificate=predicate,
        conformance=report,
        weights_checked=checked,
        untrained=untrained,
        audit=_audited(
            evidence, header, predicate["guarantee"], certified_plan(predicate).canaries
        ),
    )


def _audited(
    evidence: Evidence,
    header: RecordEntry,
    guarantee: Mapping[str, Any],
    planned: AuditCanaries | None,
) -> Audit | None:
    """What the run's canaries prove; raises ``NotTrained``, also where they are left out."""
    committed = header.get("canaries")
    if committed is None and evidence.canaries is None and evidence.losses is None:
        return None
    if evidence.canaries is None or evidence.losses is None:
        raise NotTrained(
            CANARIES_FILE if evidence.canaries is None else LOSSES_FILE,
            "no_canaries",
            "the run started with canaries, but their results are missing.",
            "Give the canaries and the losses that the run left: --canaries, --losses.",
        )
    if guarantee["adjacency"] not in AUDITABLE:
        raise NotTrained(
            CANARIES_FILE,
            "not_auditable",
            f"under {guarantee['adjacency']} neighbours differ in more than a record's presence.",
            "Audit a plan under add_remove or zero_out.",
        )
    try:
        canaries = read_canaries(evidence.canaries)
        if canaries.commitment != committed:
            raise BadCanaries("these are not the canaries that the run record commits to.")
        if planned is not None and canaries != Canaries.of(
            canaries.nonce, planned.count, planned.guesses
        ):
            raise BadCanaries("the number of canaries or guesses differs from the plan.")
    except BadCanaries as error:
        raise NotTrained(CANARIES_FILE, "other_canaries", f"{error}") from None
    try:
        delta = float(guarantee["delta"]["upper"])
        result = audit_canaries(canaries, read_losses(evidence.losses), delta=delta)
    except BadCanaries as error:
        raise NotTrained(LOSSES_FILE, "bad_losses", f"{error}") from None
    if result.falsifies(guarantee):
        raise NotTrained(
            LOSSES_FILE,
            "falsified",
            f"{result.right} of {result.guesses} guesses are right: with confidence "
            f"{result.confidence:g} ε is at least {result.epsilon:.4g} and, of Gaussian noise, μ "
            f"at least {result.mu:.4g}. Certified is ε ≤ {guarantee['epsilon']['upper']}"
            + ("." if guarantee["mu"] is None else f", μ ≤ {guarantee['mu']}."),
            "Do not use the model: the training did not keep its certificate.",
        )
    return result


def _certified(
    bundle: bytes,
    trusted: tuple[PublicKey, ...],
    started_at: datetime,
    now: datetime,
    options: VerificationOptions,
) -> dict[str, Any]:
    """The predicate of a certificate that verifies now, or did until it expired after the run.

    Raises ``VerificationError``.
    """
    try:
        return verify(bundle, trusted, now=now, options=options).predicate
    except VerificationError as error:
        if error.code != "expired":
            raise
    # Its key, its log and its status are those of today.
    used = replace(options, used_at=started_at)
    return verify(bundle, trusted, now=now, options=used).predicate


def _weights(
    folder: Path, manifest: Manifest, header: RecordEntry, record: bytes
) -> tuple[bool, tuple[str, ...]]:
    """Whether the weights are the record's, and the tensors beside them; raises ``NotTrained``."""
    files = [item.name for item in manifest.files if item.name.endswith(SUFFIX)]
    if not files or is_guarded(header):  # a guard's digest of the weights is its framework's
        return False, ()
    last = load_json(record.rstrip(b"\n").rpartition(b"\n")[2]).data
    try:
        result = digest_of_weights([folder / name for name in files], header["tensors"])
    except OSError as error:
        raise NotTrained(files[0], "unreadable", f"it cannot be read: {error.strerror}.") from None
    except BadModel as error:
        raise NotTrained(files[0], error.code, error.message, error.remedy) from None
    if result.digest != last["parameters"]:
        raise NotTrained(
            files[0],
            "other_weights",
            "the digest of the trained tensors differs from the one at the end of the run record.",
            "Put this run's weights into the folder.",
        )
    return True, result.others
