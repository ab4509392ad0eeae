"""Constructed strategies, stored by content: what was certified can be loaded again bit for bit.

A search gives the same bits on one machine and perhaps others, as good, on the next. A
certificate therefore names the *coefficients* of the strategy that it judged by a digest that
does not depend on any file format (``coefficients_digest``: sha256 over the arrays' names,
shapes and little-endian doubles), and the store holds them. An entry is found by the digest of
its request (canonical JSON of everything the search depends on) and holds named arrays as npz,
with a JSON file beside it that gives the request and the digest of the coefficients. What was
altered, is compressed or pickled, or has numbers that are not finite is computed again and
replaced. A directory that cannot be written costs the cache and nothing else; the oldest entries
go when it holds more than ``most_bytes``.

Privacy does not rest on any of this: the sensitivity is computed from the arrays that come
out, wherever they come from.

>>> import tempfile
>>> request = {"kind": "blt", "steps": 10, "buffers": 1}
>>> with tempfile.TemporaryDirectory() as place:
...     store = Store(directory=Path(place))
...     _ = store.construct(request, lambda: {"decays": np.array([0.5])})
...     again = store.construct(request, lambda: {"decays": np.array([0.6])})
>>> again["decays"].tolist()
[0.5]

>>> coefficients_digest({"noise": np.eye(1)})[:15]
'sha256:c62b8015'

References: ``numpy.lib.format`` (npy); RFC 8785 (canonical JSON).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from affidavit.mechanisms.noise_files import MAX_FILE_BYTES
from affidavit.plan import canonical_json, read_limited

Array = NDArray[np.float64]
Arrays = Mapping[str, Array]

VERSION = 1
"""Part of every request: raised when a search changes what it returns."""
MAX_BYTES = 512 * 1024 * 1024
"""Bytes that the directory may hold by default."""
MAX_SIDECAR = 4 * 1024 * 1024
"""Bytes of the largest description; learning rates are the bulk of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """One directory; any number of processes may share it, since files are replaced whole.

    ``most_bytes`` is what its npz files may come to.
    """

    directory: Path
    most_bytes: int = MAX_BYTES

    def construct(self, request: Mapping[str, Any], compute: Callable[[], Arrays]) -> Arrays:
        """The stored arrays for ``request``, else those of ``compute``, which are then stored."""
        key = hashlib.sha256(canonical_json({"version": VERSION, **request})).hexdigest()
        described, archived = self.directory / f"{key}.json", self.directory / f"{key}.npz"
        description = {"request": json.loads(canonical_json(request))}
        try:
            stored = _unpacked(read_limited(archived, MAX_FILE_BYTES))
            description["digest"] = coefficients_digest(stored)
            beside = json.loads(read_limited(described, MAX_SIDECAR))
            if all(beside.get(name) == value for name, value in description.items()):
                return stored
        except (ValueError, OSError, EOFError, RecursionError, AttributeError, zipfile.BadZipFile):
            pass  # it is corrupt, or not there
        arrays = {name: np.asarray(array, dtype="<f8") for name, array in compute().items()}
        description["digest"] = coefficients_digest(arrays)
        stream = io.BytesIO()
        np.savez(stream, **arrays)  # type: ignore[arg-type]  # its options have other names
        content = stream.getvalue()
        if len(content) <= min(self.most_bytes, MAX_FILE_BYTES):
            with suppress(OSError):
                self.directory.mkdir(parents=True, exist_ok=True)
                self._make_room(len(content))
                _replace(archived, content)
                _replace(described, canonical_json(description))
        return arrays

    def _make_room(self, size: int) -> None:
        files = [(path.stat(), path) for path in self.directory.glob("*.npz")]
        total = size + sum(status.st_size for status, _ in files)
        for status, path in sorted(files, key=lambda pair: pair[0].st_mtime_ns):
            if total <= self.most_bytes:
                return
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            total -= status.st_size


def default_store() -> Store:
    """``strategies`` under ``$AFFIDAVIT_HOME``, by default ``~/.affidavit``."""
    home = Path(os.environ.get("AFFIDAVIT_HOME") or Path.home() / ".affidavit")
    return Store(directory=home / "strategies")


def _unpacked(content: bytes) -> dict[str, Array]:
    """The arrays of an npz file; nothing is unpickled and nothing is inflated."""
    result = {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError("it is compressed")
            array = npy.read_array(io.BytesIO(archive.read(member)), allow_pickle=False)
            if array.dtype != np.dtype("<f8") or not np.all(np.isfinite(array)):
                raise ValueError("it contains values that are not finite doubles")
            result[member.filename.removesuffix(".npy")] = array
    return result


def _replace(path: Path, content: bytes) -> None:
    """The whole new file or the whole old one, also for a reader in between."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def coefficients_digest(arrays: Arrays) -> str:
    """``sha256:`` and the hexadecimal digest of names, shapes and numbers."""
    hasher = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name], dtype="<f8")
        header = {"name": name, "shape": list(array.shape)}
        hasher.update(canonical_json(header) + b"\n" + array.tobytes(order="C"))
    return "sha256:" + hasher.hexdigest()
