"""Noise files: noise matrices that a plan names by path and sha256.

A plan is reviewed, sent and certified by others, so a file is named relative to the plan, below
its folder, with its sha256, and its content is compared with the digest before it is used. Only
commands read files (``load_noise_files``). They register the content, and the strategy looks it
up by digest, so the result depends on the digest alone. The service registers nothing and opens
no file, whatever a request names.

A noise file is one of

* JSON: the noise object of a plan, ``{"kind": "matrix", "rows": [...]}`` or
  ``{"kind": "toeplitz_inverse", "coefficients": [...]}``;
* npy: the array N, of shape (T, T), or the first column of a Toeplitz N, of shape (T,);
* npz: such an array under the name ``noise``.

>>> import io, numpy as np
>>> stream = io.BytesIO()
>>> np.save(stream, np.eye(2))
>>> registered_noise(register_noise(stream.getvalue())).shape
(2, 2)
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from affidavit.plan import (
    MAX_MATRIX_STEPS,
    MalformedPlan,
    Matrix,
    Noise,
    OutsideFolder,
    Plan,
    ToeplitzInverse,
    load_json,
    parse_plan,
    read_inside,
    read_limited,
    syntax_of,
)

Array = NDArray[np.float64]

MAX_FILE_BYTES = 8 * MAX_MATRIX_STEPS**2 + 4096
"""The size of the largest matrix with its header."""
MAX_JSON_BYTES = 32 * 1024 * 1024
"""The size of the largest JSON file; a larger matrix belongs in npy."""
MAX_REGISTERED = 8
"""Noise files that are held at once."""
_NOISE: TypeAdapter[Noise] = TypeAdapter(Noise)
_registered: dict[str, Array] = {}


class InvalidNoiseFile(ValueError):
    """The content is not a noise file."""


class UnregisteredNoise(LookupError):
    """No noise file with this digest is registered."""


def read_plan(path: Path) -> Plan:
    """Return the plan in ``path`` and load its noise files.

    Raises ``MalformedPlan`` or ``OSError``.
    """
    raw = read_limited(path)
    plan = parse_plan(raw, syntax_of(path.name.lower(), raw))
    load_noise_files(plan, path.parent)
    return plan


def load_noise_files(plan: Plan, directory: Path) -> None:
    """Register the noise files of ``plan``, below ``directory``; raises ``MalformedPlan``."""
    for index, phase in enumerate(plan.phases):
        if isinstance(phase.noise, Matrix) and phase.noise.file is not None:
            _load(plan, index, phase.noise.file, phase.noise.sha256, directory)


def content_digest(content: bytes) -> str:
    """Return the sha256, in hexadecimal, by which a plan names ``content``."""
    return hashlib.sha256(content).hexdigest()


def register_noise(content: bytes) -> str:
    """Register the noise in ``content`` and return its sha256; raises ``InvalidNoiseFile``."""
    digest = content_digest(content)
    if digest not in _registered:
        noise = _parse(content)
        noise.flags.writeable = False
        while len(_registered) >= MAX_REGISTERED:
            del _registered[next(iter(_registered))]
        _registered[digest] = noise
    return digest


def registered_noise(digest: str) -> Array:
    """Return N, shape (T, T), or the first column of a Toeplitz N, shape (T,).

    Raises ``UnregisteredNoise``.
    """
    if digest not in _registered:
        raise UnregisteredNoise(digest)
    return _registered[digest]


def _load(plan: Plan, index: int, name: str, sha256: str | None, directory: Path) -> None:
    pointer = plan.pointer(index, "noise", "file")
    content = _read(directory, name, pointer)
    if content_digest(content) != sha256:
        raise MalformedPlan.with_reason(
            code="digest_mismatch",
            pointer=plan.pointer(index, "noise", "sha256"),
            message=f"{name} has sha256 {content_digest(content)}.",
            remedy="Give the intended file, or correct its digest.",
        )
    try:
        register_noise(content)
    except InvalidNoiseFile as error:
        raise _bad_file(pointer, f"{name} is not a noise matrix: {error}.") from None


def _read(directory: Path, name: str, pointer: str) -> bytes:
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\\" in name or "\x00" in name:
        raise _bad_file(pointer, "the file is outside the plan's folder.")
    try:
        content = read_inside(directory / parts, directory, MAX_FILE_BYTES)
    except OutsideFolder:
        raise _bad_file(pointer, "the file is outside the plan's folder.") from None
    except FileNotFoundError:
        raise _bad_file(pointer, f"{name} does not exist beside the plan.") from None
    except OSError as error:
        raise _bad_file(pointer, f"{name} cannot be read: {error.strerror}.") from None
    if len(content) > MAX_FILE_BYTES:
        raise _bad_file(pointer, f"{name} is larger than {MAX_FILE_BYTES} bytes.")
    return content


def _bad_file(pointer: str, message: str) -> MalformedPlan:
    return MalformedPlan.with_reason(
        code="bad_file",
        pointer=pointer,
        message=message,
        remedy="Name a strategy file (JSON, npy or npz) relative to the plan.",
    )


def _parse(content: bytes) -> Array:
    if len(content) > MAX_FILE_BYTES:
        raise InvalidNoiseFile(f"it is larger than {MAX_FILE_BYTES} bytes")
    try:
        if content.startswith(b"\x93NUMPY"):
            result = _parse_npy(io.BytesIO(content))
        elif content.startswith(b"PK"):
            result = _parse_npz(content)
        else:
            result = _parse_json(content)
    except InvalidNoiseFile:
        raise
    except MalformedPlan as error:
        raise InvalidNoiseFile(error.reasons[0].message) from None
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise InvalidNoiseFile(f"it is not a whole npy or npz file ({error})") from None
    if not np.all(np.isfinite(result)):
        raise InvalidNoiseFile("it contains numbers that are not finite")
    return result


def _parse_npy(stream: Any) -> Array:
    """Read an npy stream, whose header is validated first; nothing is unpickled."""
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    if dtype not in (np.dtype("<f8"), np.dtype("<f4")) or len(shape) not in (1, 2):
        raise InvalidNoiseFile("the array must hold little-endian floats in one or two dimensions")
    count = int(np.prod(shape, dtype=object))
    if count > MAX_MATRIX_STEPS**2:
        raise InvalidNoiseFile(f"the array has more than {MAX_MATRIX_STEPS**2} entries")
    flat = np.frombuffer(stream.read(count * dtype.itemsize), dtype=dtype)
    if len(flat) != count:
        raise InvalidNoiseFile("the array is cut off")
    return np.array(flat.reshape(shape, order="F" if fortran else "C"), dtype=np.float64)


def _parse_npz(content: bytes) -> Array:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if "noise.npy" not in archive.namelist():
            raise InvalidNoiseFile("the archive has no array named noise")
        with archive.open("noise.npy") as stream:
            return _parse_npy(stream)


def _parse_json(content: bytes) -> Array:
    document = load_json(content, MAX_JSON_BYTES)
    try:
        noise = _NOISE.validate_python(document.data)
    except ValidationError as error:
        raise InvalidNoiseFile(error.errors(include_url=False)[0]["msg"]) from None
    match noise:
        case Matrix(rows=rows) if rows is not None:
            if len({len(row) for row in rows}) != 1:
                raise InvalidNoiseFile("its rows differ in length")
            return np.array(rows, dtype=np.float64)
        case ToeplitzInverse(coefficients=coefficients):
            return np.array(coefficients, dtype=np.float64)
        case _:
            raise InvalidNoiseFile("its kind is not matrix with rows, or toeplitz_inverse")
