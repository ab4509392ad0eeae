"""The examples of loops of one's own train, and end in a conformant record."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from affidavit.certificate import check_conformance, verify
from affidavit.plan import Plan, parse_plan, syntax_of
from tests.trainer.loop.made import KEY, bundle_of

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "train"


def short(path: Path, folder: Path, **changes: Any) -> tuple[Path, Plan, bytes]:
    """The plan in ``path`` with few steps, its file and its bundle."""
    document = YAML(typ="safe").load(path.read_text())
    copy = folder / "plan.json"
    copy.write_text(json.dumps({**document, "steps": 3, **changes}))
    plan = parse_plan(copy.read_bytes(), syntax_of(str(copy), copy.read_bytes()))
    content = bundle_of(plan)
    return copy, plan, content


@pytest.mark.filterwarnings("ignore")  # of the packages that the examples show
@pytest.mark.parametrize(
    "name",
    [
        "plain_loop",
        "lightning_module",
        pytest.param("hf_trainer_lora", marks=pytest.mark.soak),
    ],
)
def test_an_example_ends_in_a_conformant_record(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = EXAMPLES / f"{name}.py"
    spec = spec_from_file_location(name, script)
    assert spec is not None
    assert spec.loader is not None
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    path, _, content = short(example.PLAN, tmp_path)
    monkeypatch.setattr(example, "PLAN", path)
    monkeypatch.setattr(
        "affidavit.trainer.private_loop.TrustRoot.public_keys", lambda _: [KEY.public]
    )
    (tmp_path / "bundle.json").write_bytes(content)
    assert example.main(tmp_path / "bundle.json", tmp_path / "run") is not None
    predicate = verify(content, [KEY.public]).predicate
    result = check_conformance((tmp_path / "run" / "record.jsonl").read_bytes(), predicate)
    assert result.conformant, result.findings
    assert result.steps_released == 3
