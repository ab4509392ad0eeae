"""Strategy files are read by digest, whole, without code, and within bounds."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from typing import Any

import numpy as np
import pytest

from affidavit.mechanisms.strategies.noise_file_registry import (
    NotAStrategyFile,
    NotRemembered,
    content_digest,
    noise_of,
    remember,
)

MATRIX = np.tril(np.arange(1.0, 10.0).reshape(3, 3))


def npy(array: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        npy(MATRIX),
        npy(np.asfortranarray(MATRIX)),
        npy(MATRIX.astype(np.float32)),
        npz(noise=MATRIX, more=np.zeros(3)),
        json.dumps({"kind": "matrix", "rows": MATRIX.tolist()}).encode(),
    ],
)
def test_every_form_is_the_same_matrix(content: bytes) -> None:
    digest = remember(content)
    assert digest == content_digest(content)
    assert np.array_equal(noise_of(digest), MATRIX)
    assert not noise_of(digest).flags.writeable


def test_a_column_is_a_toeplitz_matrix() -> None:
    document = json.dumps({"kind": "toeplitz_inverse", "coefficients": [1, -0.5]}).encode()
    assert noise_of(remember(document)).tolist() == [1, -0.5]
    assert noise_of(remember(npy(np.array([1.0, 2.0])))).tolist() == [1, 2]


def test_what_nobody_handed_over_is_not_there() -> None:
    with pytest.raises(NotRemembered):
        noise_of("f" * 64)


def test_old_contents_make_room() -> None:
    first = remember(npy(np.array([[41.0]])))
    for value in range(20):
        remember(npy(np.array([[100.0 + value]])))
    with pytest.raises(NotRemembered):
        noise_of(first)


def _bomb() -> bytes:
    header = {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6)}
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue()


def _archived(name: str, content: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(name, content)
    return stream.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nothing",
        b"[1, 2]",
        b'{"kind": "tree"}',
        b'{"kind": "matrix", "rows": [[1], [1, 2]]}',
        b'{"kind": "matrix", "rows": [["1"]]}',
        b'{"kind": "matrix", "rows": [[NaN]]}',
        b'{"kind": "matrix", "rows": [[1]], "rows": [[2]]}',
        b'{"kind": "matrix", "file": "other", "sha256": "' + b"0" * 64 + b'"}',
        pickle.dumps(MATRIX),
        npy(np.array([{}], dtype=object), allow_pickle=True),
        npy(MATRIX)[:-3],
        npy(MATRIX)[:20],
        npy(np.array([[np.inf]])),
        npy(MATRIX.astype(complex)),
        npy(np.zeros((2, 2, 2))),
        npy(np.array(["a"])),
        _bomb(),
        npz(other=MATRIX),
        npz(noise=MATRIX)[:40],
        _archived("noise.npy", b"\x93NUMPY\x01\x00\xff\xff"),
    ],
)
def test_anything_else_is_refused_and_nothing_is_kept(content: bytes) -> None:
    with pytest.raises(NotAStrategyFile):
        remember(content)
    with pytest.raises(NotRemembered):
        noise_of(content_digest(content))
