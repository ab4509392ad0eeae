"""Noise files are read by digest, whole, without code, in bounds and below the plan's folder."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from affidavit.gate.batch import certify_line
from affidavit.mechanisms.lowering import lower
from affidavit.mechanisms.noise_files import (
    InvalidNoiseFile,
    UnregisteredNoise,
    content_digest,
    load_noise_files,
    register_noise,
    registered_noise,
)
from affidavit.mechanisms.plan_files import read_plan
from affidavit.plan import MalformedPlan, plan_from

Document = Callable[..., dict[str, Any]]
MATRIX = np.tril(np.arange(1.0, 10.0).reshape(3, 3))
NOISE = np.tril(np.random.default_rng(7).normal(size=(10, 10))) + 3 * np.eye(10)


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
    digest = register_noise(content)
    assert digest == content_digest(content)
    assert np.array_equal(registered_noise(digest), MATRIX)
    assert not registered_noise(digest).flags.writeable


def test_a_column_is_a_toeplitz_matrix() -> None:
    document = json.dumps({"kind": "toeplitz_inverse", "coefficients": [1, -0.5]}).encode()
    assert registered_noise(register_noise(document)).tolist() == [1, -0.5]
    assert registered_noise(register_noise(npy(np.array([1.0, 2.0])))).tolist() == [1, 2]


def test_what_nobody_handed_over_is_not_there() -> None:
    with pytest.raises(UnregisteredNoise):
        registered_noise("f" * 64)


def test_old_contents_make_room() -> None:
    first = register_noise(npy(np.array([[41.0]])))
    for value in range(20):
        register_noise(npy(np.array([[100.0 + value]])))
    with pytest.raises(UnregisteredNoise):
        registered_noise(first)


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
    with pytest.raises(InvalidNoiseFile):
        register_noise(content)
    with pytest.raises(UnregisteredNoise):
        registered_noise(content_digest(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.save(tmp_path / "noise.npy", NOISE)
    return tmp_path


def noise_in(path: Path, name: str | None = None) -> dict[str, str]:
    return {
        "kind": "matrix",
        "file": name or path.name,
        "sha256": content_digest(path.read_bytes()),
    }


def written(folder: Path, document: dict[str, Any]) -> str:
    path = folder / "plan.json"
    path.write_text(json.dumps(document))
    return str(path)


def test_a_file_is_certified_as_its_rows_are(folder: Path, document: Document) -> None:
    in_file = document(noise=noise_in(folder / "noise.npy"))
    in_rows = document(noise={"kind": "matrix", "rows": NOISE.tolist()})
    result = lower(read_plan(written(folder, in_file)).plan).event()
    assert result == lower(read_plan(written(folder, in_rows)).plan).event()


def test_a_line_of_a_batch_finds_its_file(folder: Path, document: Document) -> None:
    line = json.dumps(document(noise=noise_in(folder / "noise.npy"))).encode()
    result, _ = certify_line(line, None, False, folder)
    assert result["strategy"]["kind"] == "matrix"
    elsewhere, _ = certify_line(line, None, False, folder / "nowhere")
    assert elsewhere["reasons"][0]["code"] == "bad_file"


def test_another_content_is_refused_with_the_line_of_its_digest(
    folder: Path, document: Document
) -> None:
    noise = noise_in(folder / "noise.npy") | {"sha256": "0" * 64}
    path = written(folder, document(noise=noise))
    with pytest.raises(MalformedPlan) as caught:
        read_plan(path)
    (reason,) = caught.value.reasons
    assert (reason.code, reason.pointer) == ("digest_mismatch", "/noise/sha256")
    assert reason.line == 1


@pytest.mark.parametrize(
    "name",
    ["../noise.npy", "/etc/hosts", "missing.npy", ".", "a\\b", "sub/../../x", "link.npy", "loop"],
)
def test_only_files_below_the_plan_are_opened(folder: Path, document: Document, name: str) -> None:
    below = folder / "below"
    below.mkdir()
    (below / "link.npy").symlink_to(folder / "noise.npy")
    (below / "loop").symlink_to("loop")
    plan = plan_from(document(noise=noise_in(folder / "noise.npy", name)))
    with pytest.raises(MalformedPlan) as caught:
        load_noise_files(plan, below)
    (reason,) = caught.value.reasons
    assert (reason.code, reason.pointer) == ("bad_file", "/noise/file")


def test_a_file_that_is_no_strategy_is_refused(folder: Path, document: Document) -> None:
    (folder / "noise.txt").write_text("not noise")
    path = written(folder, document(noise=noise_in(folder / "noise.txt")))
    with pytest.raises(MalformedPlan) as caught:
        read_plan(path)
    assert caught.value.reasons[0].code == "bad_file"
