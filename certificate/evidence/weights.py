"""Weights in safetensors, held against the digest with which a run record ends.

A run record lists the trained tensors in order, by name and shape, and ends with one digest over
all of them: sha256 over each tensor's type and shape, a line feed, and its little-endian bytes. A
safetensors file holds the same bytes and says where, so that the digest is computed from it with
nothing but the standard library. Tensors that the record does not list (buffers, frozen layers)
are named and were not trained under the certificate.

Pickled weights (``.pt``) would have to be executed to be read, and are not.

Reference: the safetensors format, v0.4: eight bytes of length, a JSON header, the tensors.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from affidavit.certificate.evidence.manifest import BadModel, printable
from affidavit.plan import MalformedPlan, load_json

SUFFIX = ".safetensors"
TORCH = {
    "F64": ("torch.float64", 8),
    "F32": ("torch.float32", 4),
    "F16": ("torch.float16", 2),
    "BF16": ("torch.bfloat16", 2),
}
"""Types of trained tensors: the name in a record's digest, and bytes of a number."""
MOST_HEADER = 100 * 1024 * 1024
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
        name, shape = str(tensor["name"]), list(tensor["shape"])
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
    if not 2 <= length <= MOST_HEADER:
        raise ValueError("no header")
    content = stream.read(length)
    if len(content) < length:
        raise ValueError("cut off")
    header: dict[str, Any] = load_json(content, MOST_HEADER).data
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
        "other_weights", message, "Put the weights of this run into the folder, in safetensors."
    )
