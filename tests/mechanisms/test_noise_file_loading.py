"""Noise in a file beside the plan: read by the command line, by digest, below its folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from affidavit.gate.batch import certify_line
from affidavit.gate.plan_io import read_plan
from affidavit.mechanisms.lowering import lower
from affidavit.mechanisms.noise_file_loading import load_noise_files
from affidavit.mechanisms.strategies.noise_file_registry import content_digest
from affidavit.plan import MalformedPlan, plan_from

Document = Callable[..., dict[str, Any]]
NOISE = np.tril(np.random.default_rng(7).normal(size=(10, 10))) + 3 * np.eye(10)


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
