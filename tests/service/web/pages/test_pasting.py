"""A pasted script or document becomes a plan, is never run, and is read within bounds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from affidavit.plan import as_document, digest, parse_plan, plan_from
from affidavit.service.certificates.preview_plan import MAX_TEXT_LENGTH, PreviewPlan, read_document
from affidavit.service.web.pages.plan_form import PlanForm, parse

SCRIPT = """
from opacus import PrivacyEngine
from torch.utils.data import DataLoader
open({mark!r}, "w").write("run")
loader = DataLoader(data, batch_size=512)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.1, max_grad_norm=1.0
)
for epoch in range(10):
    for batch in loader:
        optimizer.step()
"""
GIVEN = {
    "adjacency": "add_remove",
    "dataset": {"size": 60000},
    "sampling": {"scheme": "poisson"},
    "target": {"epsilon": 3, "delta": 1e-5},
}


def test_a_script_is_read_completed_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = SCRIPT.format(mark=str(mark))
    lacking = read_document(text, {})
    assert lacking.document is None
    assert {"/adjacency", "/target"} <= {reason.pointer for reason in lacking.reasons}
    read = read_document(text, GIVEN)
    assert read.document is not None
    (release,) = plan_from(read.document).phases[0].releases
    assert (release.noise_multiplier, release.clip_norm) == (1.1, 1.0)
    # Opacus samples at one over the number of lots, which is no lot size of the form.
    assert PlanForm.of_document(read.document) is None
    assert not mark.exists()


def test_what_a_script_says_is_not_overruled() -> None:
    read = read_document(SCRIPT.format(mark="x"), {**GIVEN, "sampling": {"lot_size": 9}})
    assert {reason.code for reason in read.reasons} == {"given_conflict"}
    unsampled = SCRIPT.replace("=1.0", "=1.0, poisson_sampling=False").format(mark="x")
    (reason,) = read_document(unsampled, GIVEN).reasons
    assert "rules out" in reason.message


def test_no_file_of_the_server_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({"batch": 512}))
    monkeypatch.chdir(tmp_path)
    text = SCRIPT.replace("512", "json.load(open('settings.json'))['batch']")
    read = read_document("import json\n" + text.format(mark="x"), GIVEN)
    assert any(reason.pointer.startswith("/sampling") for reason in read.reasons)


@pytest.mark.parametrize("name", ["e2e-lora-dp-adam", "e2e-dp-muon-optimal"])
def test_a_pasted_plan_is_that_plan(name: str) -> None:
    raw = Path(f"examples/{name}.yaml").read_bytes()
    plan = parse_plan(raw, "yaml")
    for text in (raw.decode(), json.dumps(as_document(plan))):
        read = read_document(text, {})
        assert read.document is not None
        assert digest(plan_from(read.document)) == digest(plan)


def test_a_plan_that_fits_the_form_fills_it_in() -> None:
    whole = {**GIVEN, "version": 1, "steps": 10, "releases": [{"name": "all", "clip_norm": 1}]}
    whole["sampling"] = {"scheme": "poisson", "lot_size": 600}
    form = PlanForm.of_document(whole)
    assert form is not None
    plan = parse(form.yaml).plan
    assert plan is not None
    assert digest(plan) == digest(plan_from(whole))


@pytest.mark.parametrize(
    "text",
    ["", "x", "{", "[1]", "import opacus\n" + "(" * 5000, "make_private" + "-" * 50_000 + "1"],
)
def test_anything_else_is_refused_with_what_to_do(text: str) -> None:
    read = read_document(text, {})
    assert read.document is None
    assert all(reason.remedy for reason in read.reasons)
    assert read.reasons


def test_a_longer_text_is_not_read_at_all() -> None:
    preview: Any = PreviewPlan.read
    read = asyncio.run(preview(None, "x" * (MAX_TEXT_LENGTH + 1), {}))
    assert read.reasons[0].code == "too_large"
