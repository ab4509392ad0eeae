"""The exports of a model's claim are valid in their ecosystems and repeat the claim."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from huggingface_hub import ModelCard

from affidavit.evidence import (
    CERTIFICATE_FILE,
    EXPORTS,
    RECORD_FILE,
    BadModel,
    verify_model,
)
from affidavit.evidence.model.exports import BOM_FILE
from tests.evidence.model.conftest import WEIGHTS, Run
from tests.support.trust import trusting

CARD = "---\nlicense: mit # as agreed\ntags: [vision]\nversion: '1.10'\n---\n# Digits\n\nText.\n"


@pytest.fixture
def model(run: Run, tmp_path: Path) -> Path:
    """A signed model with every export."""
    folder = run.signed(tmp_path / "model")
    (folder / "README.md").write_text(CARD)
    run.sign(folder, exports=EXPORTS)
    return folder


def bill_of(folder: Path) -> Any:
    return json.loads((folder / BOM_FILE).read_bytes())


def claim_of(folder: Path, run: Run) -> dict[str, Any]:
    report = verify_model(folder, trusting(run.key.public))
    assert report.verified, report.findings
    return report.claim


def test_the_bill_of_materials_is_valid_cyclonedx(model: Path, run: Run) -> None:
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str((model / BOM_FILE).read_text()) is None
    bom = bill_of(model)
    assert validator.validate_str(json.dumps({**bom, "metadata": {"component": {}}})) is not None
    properties = {
        item["name"].rpartition(":")[2]: item["value"]
        for item in bom["metadata"]["component"]["properties"]
    }
    guarantee = claim_of(model, run)["guarantee"]
    assert properties["epsilon_upper"] == guarantee["epsilon"]["upper"]
    assert properties["delta"] == guarantee["delta"]["upper"]
    digests = {i["name"]: i["hashes"][0]["content"] for i in bom["components"] if "hashes" in i}
    assert {WEIGHTS, CERTIFICATE_FILE, RECORD_FILE} <= digests.keys()
    for name, digest in digests.items():
        assert hashlib.sha256((model / name).read_bytes()).hexdigest() == digest


def test_the_model_card_is_read_by_hugging_face_and_keeps_what_was_there(
    model: Path, run: Run
) -> None:
    text = (model / "README.md").read_text()
    metadata = ModelCard(text).data.to_dict()
    claim = claim_of(model, run)
    assert (
        metadata["differential_privacy"]["epsilon_upper"] == claim["guarantee"]["epsilon"]["upper"]
    )
    assert (metadata["license"], metadata["version"]) == ("mit", "1.10")
    assert metadata["tags"] == ["vision", "differential-privacy"]
    assert "# as agreed" in text
    assert text.index("# Digits") < text.index("## Differential privacy")


def test_signing_again_writes_the_exports_anew_and_changes_nothing_else(
    model: Path, run: Run
) -> None:
    card = (model / "README.md").read_text()
    (model / "tokens" / "more.txt").write_text("d\n")
    (model / "README.md").write_text(card + "\nMore.\n")
    run.sign(model)
    assert (model / "README.md").read_text() == card + "\nMore.\n"
    assert "tokens/more.txt" in {item["name"] for item in bill_of(model)["components"]}
    claim_of(model, run)


@pytest.mark.parametrize("name", ["README.md", BOM_FILE])
def test_an_altered_export_is_named(model: Path, run: Run, name: str) -> None:
    content = (model / name).read_text()
    upper = claim_of(model, run)["guarantee"]["epsilon"]["upper"]
    (model / name).write_text(content.replace(upper, "0.1"))
    findings = verify_model(model, trusting(run.key.public)).findings
    assert [(item.file, item.code) for item in findings] == [(name, "altered")]


@pytest.mark.parametrize("card", ["---\n- a\n---\n", "---\na: [\n---\n", "---\ntags: x\n---\n"])
def test_a_card_that_cannot_be_read_is_refused_and_nothing_is_written(
    run: Run, tmp_path: Path, card: str
) -> None:
    (tmp_path / "README.md").write_text(card)
    with pytest.raises(BadModel, match="metadata"):
        run.sign(tmp_path, exports=["model-card"])
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == card
