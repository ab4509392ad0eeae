"""Rounds of Flower's client end in one conformant record."""

from __future__ import annotations

from pathlib import Path

import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from affidavit.certificate import verify
from affidavit.evidence import check_conformance
from examples.train import flower_client
from tests.support.trust import trusting
from tests.trainer.loop.small_run import KEY
from tests.trainer.loop.test_examples import short

ROUNDS, STEPS = 3, 2


@pytest.mark.filterwarnings("ignore")  # of the package
def test_rounds_are_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, content = short(flower_client.PLAN, tmp_path, steps=ROUNDS * STEPS - 1)
    bundle = tmp_path / "bundle.json"
    bundle.write_bytes(content)
    monkeypatch.setattr(flower_client, "PLAN", path)
    monkeypatch.setattr(
        "affidavit.trainer.private_loop.trusted_or_own", lambda _: trusting(KEY.public)
    )
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    node = {"certificate": str(bundle), "out": str(tmp_path / "run")}
    context = Context(1, 1, node, RecordDict(), {"local-steps": STEPS})
    weights = flower_client.network().state_dict()
    for _ in range(ROUNDS):
        arrays = RecordDict({"arrays": ArrayRecord(weights)})
        reply = flower_client.app(Message(arrays, 1, "train"), context)
        after = reply.content["arrays"].to_torch_state_dict()
        weights = {name: item / 2 for name, item in after.items()}  # as if averaged with others
    record = (tmp_path / "run" / "record.jsonl").read_bytes()
    result = check_conformance(record, verify(content, trusting(KEY.public)).predicate)
    assert result.conformant, result.findings
    assert result.steps_released == ROUNDS * STEPS - 1
