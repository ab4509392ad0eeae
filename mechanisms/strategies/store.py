"""The store of optimised strategies, which loads what was certified again bit for bit.

A search gives the same bits on one machine and perhaps equally good others on the next. So a
certificate names the *coefficients* of its strategy by a digest that does not depend on any file
format (``coefficients_digest``: sha256 over the names, shapes and little-endian doubles of the
arrays), and the store holds them. The key of an entry is the digest of its request (canonical JSON
of everything that the search depends on). An entry is an npz file of named arrays, with a JSON file
that has the request and the digest of the coefficients. Entries that are altered, compressed or
pickled, or have numbers that are not finite, are computed again and replaced. If the directory
cannot be written, only the cache is lost. The oldest entries are removed above ``max_bytes``.

Privacy does not depend on the store: the sensitivity is computed from the resulting arrays.

>>> import tempfile
>>> request = {"kind": "blt", "steps": 10, "buffers": 1}
>>> with tempfile.TemporaryDirectory() as place:
...     store = Store(directory=Path(place))
...     _ = store.get_or_compute(request, lambda: {"decays": np.array([0.5])})
...     again = store.get_or_compute(request, lambda: {"decays": np.array([0.6])})
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

from affidavit.mechanisms.noise_files import MAX_FILE_BYTES
from affidavit.mechanisms.strategies.numerics import Array
from affidavit.plan import canonical_json, read_limited

Arrays = Mapping[str, Array]

VERSION = 1
"""Part of every request; incremented when the result of a search changes."""
MAX_BYTES = 512 * 1024 * 1024
"""The default size limit of the directory."""
MAX_DESCRIPTION_BYTES = 4 * 1024 * 1024
"""The size of the largest description, which is mostly learning rates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """A directory that several processes may share, because files are replaced atomically.

    ``max_bytes`` limits the total size of its npz files.
    """

    directory: Path
    max_bytes: int = MAX_BYTES

    def get_or_compute(self, request: Mapping[str, Any], compute: Callable[[], Arrays]) -> Arrays:
        """Return the stored arrays for ``request``, or compute and store them."""
        key = hashlib.sha256(canonical_json({"version": VERSION, **request})).hexdigest()
        described, archived = self.directory / f"{key}.json", self.directory / f"{key}.npz"
        description = {"request": json.loads(canonical_json(request))}
        try:
            stored = _read_npz(read_limited(archived, MAX_FILE_BYTES))
            description["digest"] = coefficients_digest(stored)
            stored_description = json.loads(read_limited(described, MAX_DESCRIPTION_BYTES))
            if all(stored_description.get(name) == value for name, value in description.items()):
                return stored
        except (ValueError, OSError, EOFError, RecursionError, AttributeError, zipfile.BadZipFile):
            pass  # the entry is corrupt or missing
        arrays = {name: np.asarray(array, dtype="<f8") for name, array in compute().items()}
        description["digest"] = coefficients_digest(arrays)
        stream = io.BytesIO()
        np.savez(stream, **arrays)  # type: ignore[arg-type]  # its options have other names
        content = stream.getvalue()
        if len(content) <= min(self.max_bytes, MAX_FILE_BYTES):
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
            if total <= self.max_bytes:
                return
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            total -= status.st_size


def default_store() -> Store:
    """Return the store ``strategies`` under ``$AFFIDAVIT_HOME``, by default ``~/.affidavit``."""
    home = Path(os.environ.get("AFFIDAVIT_HOME") or Path.home() / ".affidavit")
    return Store(directory=home / "strategies")


def _read_npz(content: bytes) -> dict[str, Array]:
    """Return the arrays of an npz file; nothing is unpickled or decompressed."""
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
    """Replace the file atomically."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def coefficients_digest(arrays: Arrays) -> str:
    """Return ``sha256:`` and the hexadecimal digest of names, shapes and numbers."""
    hasher = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name], dtype="<f8")
        header = {"name": name, "shape": list(array.shape)}
        hasher.update(canonical_json(header) + b"\n" + array.tobytes(order="C"))
    return "sha256:" + hasher.hexdigest()
