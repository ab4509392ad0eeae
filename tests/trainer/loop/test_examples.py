"""The examples of loops of one's own train, and end in a conformant record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from affidavit.certificate import verify
from affidavit.evidence import check_conformance
from affidavit.plan import Plan, parse_plan, syntax_of
from tests.support.trust import trusting
from tests.trainer.loop.sharded import on_ranks
from tests.trainer.loop.small_run import KEY, bundle_of

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "train"


def short(path: Path, folder: Path, **changes: Any) -> tuple[Path, Plan, bytes]:
    """The plan in ``path`` with few steps, its file and its bundle."""
    document = YAML(typ="safe").load(path.read_text())
    copy = folder / "plan.json"
    copy.write_text(json.dumps({**document, "steps": 3, **changes}))
    plan = parse_plan(copy.read_bytes(), syntax_of(str(copy), copy.read_bytes()))
    content = bundle_of(plan)
    return copy, plan, content


def loaded(name: str) -> Any:
    """The example of this name."""
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


@pytest.mark.ordinary("plain_loop")
@pytest.mark.filterwarnings("ignore")  # of the packages that the examples show
@pytest.mark.parametrize("name", ["fsdp", "plain_loop", "lightning_module", "hf_trainer_lora"])
def test_an_example_ends_in_a_conformant_record(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = loaded(name)
    path, _, content = short(example.PLAN, tmp_path)
    monkeypatch.setattr(example, "PLAN", path)
    monkeypatch.setattr(
        "affidavit.trainer.private_loop.trusted_or_own", lambda _: trusting(KEY.public)
    )
    (tmp_path / "bundle.json").write_bytes(content)
    arguments = tmp_path / "bundle.json", tmp_path / "run"
    if name == "fsdp":
        assert on_ranks(2, example.main, *arguments) == [0, 0]
    else:
        assert example.main(*arguments) is not None
    predicate = verify(content, trusting(KEY.public)).predicate
    result = check_conformance((tmp_path / "run" / "record.jsonl").read_bytes(), predicate)
    assert result.conformant, result.findings
    assert result.steps_released == 3


RANK = """
import sys
from pathlib import Path
from importlib import import_module
from affidavit.trust import TrustedKeys, read_public_keys
from affidavit.trainer import private_loop

folder = Path(sys.argv[1])
keys = read_public_keys(folder / "keys.json")
private_loop.trusted_or_own = lambda _: TrustedKeys(keys, policy=None)
example = import_module(sys.argv[2])
example.PLAN = folder / "plan.json"
example.main(folder / "bundle.json", folder / "run")
"""


@pytest.mark.soak
@pytest.mark.parametrize("name", ["fsdp", "plain_loop"])
def test_torchrun_trains_an_example_on_two_ranks(name: str, tmp_path: Path) -> None:
    _, _, content = short(EXAMPLES / "digits-dp-muon.yaml", tmp_path)
    (tmp_path / "bundle.json").write_bytes(content)
    (tmp_path / "keys.json").write_text(json.dumps(KEY.public.as_record()))
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    path = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(tmp_path / "rank.py"), str(tmp_path), name],
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    predicate = verify(content, trusting(KEY.public)).predicate
    record = (tmp_path / "run" / "record.jsonl").read_bytes()
    result = check_conformance(record, predicate)
    assert result.conformant, result.findings
    assert json.loads(record.splitlines()[0])["performance"]["ranks"] == 2
