"""Check certificate, run record, weights and canaries of a training together.

Signing and verifying a model both use this check, so that everything signed verifies.

Weights are in safetensors. A run record lists the trained tensors in order, by name and shape, and
ends with one digest over all of them: sha256 over each tensor's type and shape, a line feed, and
its little-endian bytes. A safetensors file contains the same bytes at stated offsets, so that the
standard library suffices to compute the digest. Tensors that the record does not list (buffers,
frozen layers) are named and were not trained under the certificate.

Weights in other forms, such as pickles (``.pt``), are not read, because reading executes them. If
there may be any beside safetensors, a loader may prefer them, so the weights count as not checked:
every other file must be text, a picture or a tokenizer by name, and an index of shards must name
no file but safetensors.

Reference: the safetensors format, v0.4: eight bytes of length, a JSON header, the tensors.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import pickletools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from affidavit.assessment import certified_plan
from affidavit.certificate.verification.bundle_verification import verify
from affidavit.certificate.verification.verification_result import (
    VerificationOptions,
    VerifiedCertificate,
)
from affidavit.evidence.conformance import check_conformance
from affidavit.evidence.model.audit_record import require_of_run
from affidavit.evidence.model.canary_audit import (
    AUDITABLE,
    Audit,
    BadCanaries,
    audit_canaries,
    read_canaries,
    read_losses,
)
from affidavit.evidence.model.claim import (
    CANARIES_FILE,
    CERTIFICATE_FILE,
    LOSSES_FILE,
    RECORD_FILE,
    Evidence,
    Training,
)
from affidavit.evidence.model.manifest import BadModel, Manifest
from affidavit.evidence.run_record import (
    START,
    RecordEntry,
    decode_line,
    is_guarded,
)
from affidavit.plan import AuditCanaries, MalformedPlan, PlanError, load_json, printable
from affidavit.trust import TrustedKeys, VerificationError, parse_instant

SUFFIX = ".safetensors"
TORCH_TYPES = {
    "F64": ("torch.float64", 8),
    "F32": ("torch.float32", 4),
    "F16": ("torch.float16", 2),
    "BF16": ("torch.bfloat16", 2),
}
"""Types of trained tensors: the name in a record's digest, and the bytes of a number."""
OTHER_WEIGHTS = frozenset({".bin", ".ckpt", ".onnx", ".pickle", ".pkl", ".pt", ".pth", SUFFIX})
"""Suffixes for which loaders look, in any case, whatever is in the file."""
INDEX_SUFFIX = ".index.json"
"""How the names of the files end that say in which file each tensor of a large model is."""
IMAGES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")
"""How pictures begin, which hold no weights."""
TOKENIZERS = frozenset({"tokenizer.model", "spiece.model", "sentencepiece.bpe.model"})
"""Names of files of SentencePiece, which are not text."""
CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
"""Characters that no text has."""
MAX_OPCODES = 1_000_000
MAX_HEADER_BYTES = 100 * 1024 * 1024
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tensor:
    """A tensor in its file: the first byte, the number of bytes, and its name in the digest."""

    path: Path
    first: int
    size: int
    description: str


def digest_of_weights(
    paths: Iterable[Path], tensors: Iterable[Mapping[str, Any]]
) -> tuple[str, tuple[str, ...]]:
    """Compute a record's digest of ``tensors`` (its header's list) from safetensors files.

    Returns the digest and the names of the other tensors in the files. Raises ``BadModel`` if a
    file is not safetensors, or a tensor is missing, duplicated, or of another shape; ``OSError`` if
    a file cannot be read.
    """
    stored: dict[str, _Tensor] = {}
    for path in paths:
        for name, tensor in _read_tensors(path).items():
            if name in stored:
                raise _bad(f"{printable(name)} is in {stored[name].path.name} and in {path.name}.")
            stored[name] = tensor
    result = hashlib.sha256()
    for entry in tensors:
        name, shape = str(entry["name"]), entry.get("shape")
        if name not in stored:
            raise _bad(f"the trained tensor {printable(name)} is in no safetensors file.")
        tensor = stored.pop(name)
        if not tensor.description.endswith(f" {shape}\n"):
            raise _bad(
                f"{printable(name)} is {tensor.description.strip()}, and {shape} was trained."
            )
        result.update(tensor.description.encode())
        with tensor.path.open("rb") as stream:
            stream.seek(tensor.first)
            remaining = tensor.size
            while remaining and (chunk := stream.read(min(CHUNK_BYTES, remaining))):
                result.update(chunk)
                remaining -= len(chunk)
    return f"sha256:{result.hexdigest()}", tuple(sorted(stored))


def _read_tensors(path: Path) -> dict[str, _Tensor]:
    """Read the header of a safetensors file; raises ``BadModel``."""
    with path.open("rb") as stream:
        try:
            header, begin = _read_header(stream)
            end = os.fstat(stream.fileno()).st_size - begin
            tensors = {
                name: _parse_tensor(path, begin, end, entry)
                for name, entry in header.items()
                if name != "__metadata__"
            }
            _require_no_gaps(tensors.values(), begin, end)
            return tensors
        except (MalformedPlan, KeyError, TypeError, ValueError, AttributeError):
            raise _bad(f"{printable(path.name)} is not a safetensors file.") from None


def _read_header(stream: BinaryIO) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(stream.read(8), "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise ValueError("no header")
    content = stream.read(length)
    if len(content) < length:
        raise ValueError("cut off")
    header: dict[str, Any] = load_json(content, MAX_HEADER_BYTES).data
    return header, 8 + length


def _parse_tensor(path: Path, begin: int, end: int, entry: Mapping[str, Any]) -> _Tensor:
    first, last = entry["data_offsets"]
    shape = list(entry["shape"])
    dtype, size = TORCH_TYPES.get(entry["dtype"], (str(entry["dtype"]), None))
    count = size
    for length in shape:
        if type(length) is not int or length < 0:
            raise ValueError("a shape")
        count = None if count is None else count * length
    if not type(first) is type(last) is int:
        raise ValueError("offsets")
    if not 0 <= first <= last <= end or (count is not None and count != last - first):
        raise ValueError("offsets")
    description = f"{dtype} {shape}\n"
    return _Tensor(path=path, first=begin + first, size=last - first, description=description)


def _require_no_gaps(tensors: Iterable[_Tensor], begin: int, end: int) -> None:
    """Raise ``ValueError`` unless the tensors fill the file, which may then hold nothing else."""
    place = begin
    for tensor in sorted(tensors, key=lambda tensor: (tensor.first, tensor.size)):
        if tensor.first != place:
            raise ValueError("a gap, or bytes of two tensors")
        place += tensor.size
    if place != begin + end:
        raise ValueError("bytes of no tensor")


def _bad(message: str) -> BadModel:
    return BadModel(
        "other_weights", message, "Put this run's weights into the folder, in safetensors."
    )


FETCH_REMEDY = "Fetch the model again from its signer."


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFinding:
    """One mismatch: the file, a stable code, and what to do."""

    file: str
    code: str
    message: str
    remedy: str = FETCH_REMEDY

    def as_dict(self) -> dict[str, str]:
        """Return the finding as JSON data."""
        return asdict(self)


class UnsupportedClaim(Exception):
    """The evidence does not support a claim; ``finding`` names the file."""

    def __init__(self, file: str, code: str, message: str, remedy: str = FETCH_REMEDY) -> None:
        self.finding = ModelFinding(file=file, code=code, message=message, remedy=remedy)
        super().__init__(f"{file}: {code}: {message} {remedy}")


def training_of(
    folder: Path,
    manifest: Manifest,
    trusted: TrustedKeys,
    *,
    evidence: Evidence,
    options: VerificationOptions,
) -> Training:
    """Perform steps 3 to 6 of the verification; raises ``UnsupportedClaim``."""
    bundle, record = evidence.bundle, evidence.record
    try:
        header = decode_line(record.split(b"\n", 1)[0] + b"\n", START)
        started_at = parse_instant(header["started_at"])
    except (ValueError, KeyError, TypeError):
        raise UnsupportedClaim(
            RECORD_FILE, "bad_record", "the first line is not a run record header."
        ) from None
    try:
        verified = _certified(bundle, trusted.for_past_use(), started_at, options)
    except VerificationError as error:
        raise UnsupportedClaim(CERTIFICATE_FILE, error.code, error.message, error.remedy) from None
    predicate = verified.predicate
    try:
        report = check_conformance(record, predicate)
    except (PlanError, ValueError) as error:
        raise UnsupportedClaim(CERTIFICATE_FILE, "unreadable_plan", f"{error}") from None
    if not report.conformant:
        first = next(item for item in report.findings if not item.noted)
        raise UnsupportedClaim(
            RECORD_FILE,
            first.code,
            f"line {first.line}: {first.message}",
            "The certificate's guarantee does not hold for this run: train again as certified.",
        )
    checked, untrained = _check_weights(folder, manifest, header, record)
    planned = certified_plan(predicate).canaries
    return Training(
        certificate=predicate,
        conformance=report,
        weights_checked=checked,
        untrained=untrained,
        audit=_audit(evidence, header, predicate["guarantee"], planned),
    )


def _audit(
    evidence: Evidence,
    header: RecordEntry,
    guarantee: Mapping[str, Any],
    planned: AuditCanaries | None,
) -> Audit | None:
    """Audit the run's canaries, if it had any; raises ``UnsupportedClaim``."""
    committed = header.get("canaries")
    if committed is None and evidence.canaries is None and evidence.losses is None:
        return None
    if evidence.canaries is None or evidence.losses is None:
        raise UnsupportedClaim(
            CANARIES_FILE if evidence.canaries is None else LOSSES_FILE,
            "no_canaries",
            "the run started with canaries, but their results are missing.",
            "Give the canaries and the losses that the run left: --canaries, --losses.",
        )
    if guarantee["adjacency"] not in AUDITABLE:
        raise UnsupportedClaim(
            CANARIES_FILE,
            "not_auditable",
            f"under {guarantee['adjacency']} neighbours differ in more than a record's presence.",
            "Audit a plan under add_remove or zero_out.",
        )
    try:
        canaries = read_canaries(evidence.canaries)
        require_of_run(canaries, header, planned)
    except BadCanaries as error:
        raise UnsupportedClaim(CANARIES_FILE, "other_canaries", f"{error}") from None
    try:
        delta = float(guarantee["delta"]["upper"])
        result = audit_canaries(canaries, read_losses(evidence.losses), delta=delta)
    except BadCanaries as error:
        raise UnsupportedClaim(LOSSES_FILE, "bad_losses", f"{error}") from None
    if result.falsifies(guarantee):
        raise UnsupportedClaim(
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
    trusted: TrustedKeys,
    started_at: datetime,
    options: VerificationOptions,
) -> VerifiedCertificate:
    """Return a certificate that verifies now, or that expired after the run began.

    Raises ``VerificationError``.
    """
    try:
        return verify(bundle, trusted, options=options)
    except VerificationError as error:
        if error.code != "expired":
            raise
    # Key, log and status are checked as of now.
    used = replace(options, used_at=started_at)
    return verify(bundle, trusted, options=used)


def _check_weights(
    folder: Path, manifest: Manifest, header: RecordEntry, record: bytes
) -> tuple[bool, tuple[str, ...]]:
    """Return whether the weights were compared with the record, and the untrained tensors.

    Raises ``UnsupportedClaim`` if they differ.
    """
    files = [item.name for item in manifest.files if item.name.endswith(SUFFIX)]
    if not files or is_guarded(header):  # a guard's digest of the weights is its framework's
        return False, ()
    last = load_json(record.rstrip(b"\n").rpartition(b"\n")[2]).data
    try:
        digest, untrained = digest_of_weights([folder / name for name in files], header["tensors"])
    except OSError as error:
        raise UnsupportedClaim(
            files[0], "unreadable", f"it cannot be read: {error.strerror}."
        ) from None
    except BadModel as error:
        raise UnsupportedClaim(files[0], error.code, error.message, error.remedy) from None
    if digest != last["parameters"]:
        raise UnsupportedClaim(
            files[0],
            "other_weights",
            "the digest of the trained tensors differs from the one at the end of the run record.",
            "Put this run's weights into the folder.",
        )
    others = [item.name for item in manifest.files if item.name not in files]
    return not any(
        _may_hold_weights(folder / name) or _names_other_files(folder, name, files)
        for name in others
    ), untrained


def _may_hold_weights(path: Path) -> bool:
    """Whether a file may hold weights in a form that is not read: it is neither text nor known."""
    if path.suffix.lower() in OTHER_WEIGHTS:
        return True
    try:
        with path.open("rb") as stream:
            if path.name in TOKENIZERS or stream.read(8).startswith(IMAGES):
                return False
            stream.seek(0)
            if not _is_text(stream):
                return True
            stream.seek(0)
            return _is_pickle(stream)
    except OSError:
        return True


def _names_other_files(folder: Path, name: str, files: Sequence[str]) -> bool:
    """Whether an index of shards has a loader read other files than those that were compared."""
    if not name.lower().endswith(INDEX_SUFFIX):
        return False
    try:
        shards = load_json((folder / name).read_bytes(), MAX_HEADER_BYTES).data["weight_map"]
        named = {(PurePosixPath(name).parent / shard).as_posix() for shard in shards.values()}
    except (OSError, MalformedPlan, KeyError, TypeError, AttributeError):
        return True
    return not named <= set(files)


def _is_text(stream: BinaryIO) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        while chunk := stream.read(CHUNK_BYTES):
            if CONTROL.search(decoder.decode(chunk)):
                return False
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _is_pickle(stream: BinaryIO) -> bool:
    """Whether a text is a pickle, as those of protocol 0 are; nothing in it is executed."""
    opcodes = pickletools.genops(stream)
    try:
        for _ in islice(opcodes, MAX_OPCODES):
            pass
    except Exception:  # pickletools does not say which
        return False
    return True
