"""The exports of a model's claim are valid in their ecosystems and repeat the claim.

mlcroissant brings 400 MB, so that its answer is recorded: ``mlcroissant validate --jsonld
tests/vectors/croissant.json`` of mlcroissant 1.1.1 finds no error (three recommended properties,
which only a publisher knows, are missing), and what is export has to be that document.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from huggingface_hub import ModelCard
from spdx_python_model.bindings import v3_0_1 as spdx

from affidavit.certificate import CERTIFICATE_FILE, EXPORTS, RECORD_FILE, BadModel, verify_model
from affidavit.certificate.model_evidence.exports import FORMS, ExportContent, export
from affidavit.certificate.model_evidence.manifest import ModelFile
from tests.certificate.model_evidence.conftest import WEIGHTS, Run

VECTOR = Path(__file__).parents[2] / "vectors" / "croissant.json"
CARD = "---\nlicense: mit # as agreed\ntags: [vision]\nversion: '1.10'\n---\n# Digits\n\nText.\n"


@pytest.fixture
def model(run: Run, tmp_path: Path) -> Path:
    """A signed model with every export."""
    folder = run.signed(tmp_path / "model")
    (folder / "README.md").write_text(CARD)
    run.sign(folder, exports=EXPORTS)
    return folder


def read(folder: Path, form: str) -> Any:
    return json.loads((folder / FORMS[form][0]).read_bytes())


def claim_of(folder: Path, run: Run) -> dict[str, Any]:
    report = verify_model(folder, [run.key.public])
    assert report.verified, report.findings
    return report.claim


def test_the_bill_of_materials_is_valid_cyclonedx(model: Path, run: Run) -> None:
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str((model / FORMS["cyclonedx"][0]).read_text()) is None
    bom = read(model, "cyclonedx")
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


def test_the_spdx_document_is_read_by_spdx_own_model(model: Path, run: Run) -> None:
    objects = spdx.SHACLObjectSet()
    with (model / FORMS["spdx"][0]).open("rb") as stream:
        spdx.JSONLDDeserializer().read(stream, objects)
    assert not objects.missing_ids
    spdx.JSONLDSerializer().write(objects, io.BytesIO())  # refuses what required properties lack
    (package,) = objects.foreach_type(spdx.ai_AIPackage)
    metrics = {entry.key: entry.value for entry in package.ai_metric}
    assert metrics["epsilon_upper"] == claim_of(model, run)["guarantee"]["epsilon"]["upper"]
    (trained,) = [
        item
        for item in objects.foreach_type(spdx.Relationship)
        if item.relationshipType == spdx.RelationshipType.trainedOn
    ]
    assert isinstance(trained.to[0], spdx.dataset_DatasetPackage)


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
    assert "tokens/more.txt" in {item["name"] for item in read(model, "cyclonedx")["components"]}
    claim_of(model, run)


@pytest.mark.parametrize("name", ["README.md", *(name for name, _ in FORMS.values())])
def test_an_altered_export_is_named(model: Path, run: Run, name: str) -> None:
    content = (model / name).read_text()
    upper = claim_of(model, run)["guarantee"]["epsilon"]["upper"]
    (model / name).write_text(content.replace(upper, "0.1"))
    findings = verify_model(model, [run.key.public]).findings
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


def test_the_data_set_is_the_croissant_document_that_mlcroissant_accepts() -> None:
    claim = {
        "guarantee": {
            "epsilon": {"upper": "1.25", "lower": "1.24"},
            "delta": {"upper": "0.00001", "lower": "0.00001"},
            "adjacency": "add_remove",
            "unit": "example",
        },
        "declared": ["execution", "data"],
        "manifest": {"digest": {"sha256": "00" * 32}},
    }
    names = (CERTIFICATE_FILE, WEIGHTS, "tokens/wörter 1.txt")
    of = ExportContent(
        model="digits",
        claim=claim,
        dataset={"name": "digits", "size": 1438},
        files=tuple(ModelFile(name=name, sha256="5a" * 32) for name in names),
        at="2026-11-23T00:00:00Z",
    )
    assert json.loads(export("croissant", of)) == json.loads(VECTOR.read_bytes())
