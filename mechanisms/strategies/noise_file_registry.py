"""Contents: noise matrices that a plan names by the digest of their file.

A plan that says ``file:`` also says its sha256, and nothing opens the file while the plan is
judged: whoever read it beside the plan hands its bytes to ``remember``, and the plan finds
them by digest. What is held is therefore a function of the digest alone. A service that
remembers nothing opens no file, whatever a request names.

A strategy file is one of

* JSON: the plan's own noise object, ``{"kind": "matrix", "rows": [...]}`` or
  ``{"kind": "toeplitz_inverse", "coefficients": [...]}``;
* npy: the array N, of shape (T, T), or the first column of a Toeplitz N, of shape (T,);
* npz: such an array under the name ``noise``.

>>> import io, numpy as np
>>> stream = io.BytesIO()
>>> np.save(stream, np.eye(2))
>>> noise_of(remember(stream.getvalue())).shape
(2, 2)
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from affidavit.mechanisms.strategies.strategy import MAX_DENSE
from affidavit.plan import MalformedPlan, Matrix, Noise, ToeplitzInverse, load_json

Array = NDArray[np.float64]

MAX_FILE = 8 * MAX_DENSE**2 + 4096
"""Bytes of the largest matrix, with its header."""
MAX_DOCUMENT = 32 * 1024 * 1024
"""Bytes of the largest JSON file; a larger matrix belongs in npy."""
_KEPT = 8
_NOISE: TypeAdapter[Noise] = TypeAdapter(Noise)
_contents: dict[str, Array] = {}


class NotAStrategyFile(ValueError):
    """The bytes are not a strategy file."""


class NotRemembered(LookupError):
    """No content with this digest was handed over."""


def content_digest(content: bytes) -> str:
    """The sha256, in hexadecimal, by which a plan names ``content``."""
    return hashlib.sha256(content).hexdigest()


def remember(content: bytes) -> str:
    """Keep the noise in ``content`` and return its sha256; raises ``NotAStrategyFile``."""
    digest = content_digest(content)
    if digest not in _contents:
        noise = _parsed(content)
        noise.flags.writeable = False
        while len(_contents) >= _KEPT:
            del _contents[next(iter(_contents))]
        _contents[digest] = noise
    return digest


def noise_of(digest: str) -> Array:
    """N of shape (T, T), or the first column of a Toeplitz N; raises ``NotRemembered``."""
    if digest not in _contents:
        raise NotRemembered(digest)
    return _contents[digest]


def _parsed(content: bytes) -> Array:
    if len(content) > MAX_FILE:
        raise NotAStrategyFile(f"it is larger than {MAX_FILE} bytes")
    try:
        if content.startswith(b"\x93NUMPY"):
            result = _array(io.BytesIO(content))
        elif content.startswith(b"PK"):
            result = _archived(content)
        else:
            result = _document(content)
    except NotAStrategyFile:
        raise
    except MalformedPlan as error:
        raise NotAStrategyFile(error.reasons[0].message) from None
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise NotAStrategyFile(f"it is not a whole npy or npz file ({error})") from None
    if not np.all(np.isfinite(result)):
        raise NotAStrategyFile("it contains numbers that are not finite")
    return result


def _array(stream: Any) -> Array:
    """An npy stream; its header is judged before its data are read, and nothing is unpickled."""
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    size = MAX_DENSE**2
    if dtype not in (np.dtype("<f8"), np.dtype("<f4")) or len(shape) not in (1, 2):
        raise NotAStrategyFile("the array must hold little-endian floats in one or two dimensions")
    if int(np.prod(shape, dtype=object)) > size:
        raise NotAStrategyFile(f"the array has more than {size} entries")
    count = int(np.prod(shape, dtype=object))
    data = stream.read(count * dtype.itemsize)
    flat = np.frombuffer(data, dtype=dtype)
    if len(flat) != count:
        raise NotAStrategyFile("the array is cut off")
    return np.array(flat.reshape(shape, order="F" if fortran else "C"), dtype=np.float64)


def _archived(content: bytes) -> Array:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if "noise.npy" not in archive.namelist():
            raise NotAStrategyFile("the archive has no array named noise")
        with archive.open("noise.npy") as stream:
            return _array(stream)


def _document(content: bytes) -> Array:
    document = load_json(content, MAX_DOCUMENT)
    try:
        noise = _NOISE.validate_python(document.data)
    except ValidationError as error:
        raise NotAStrategyFile(error.errors(include_url=False)[0]["msg"]) from None
    match noise:
        case Matrix(rows=rows) if rows is not None:
            if len({len(row) for row in rows}) != 1:
                raise NotAStrategyFile("its rows differ in length")
            return np.array(rows, dtype=np.float64)
        case ToeplitzInverse(coefficients=coefficients):
            return np.array(coefficients, dtype=np.float64)
        case _:
            raise NotAStrategyFile("its kind is not matrix with rows, or toeplitz_inverse")
