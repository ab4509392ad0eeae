"""What MLflow and Weights & Biases hold after one certified run is logged to them, read back.

Run where both are installed; it writes the vector that the suite compares with:
``PYTHONPATH=src:. python -m tests.library.real_trackers > tests/vectors/trackers.json``
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import affidavit
from affidavit.trust import SigningKey

Held = dict[str, Any]
BLOCK = 32_768
WHOLE, LAST = 1, 4
RECORDED = Path(__file__).resolve().parents[1] / "vectors" / "trackers.json"


def answer() -> affidavit.Certification:
    """One certified plan."""
    plan = affidavit.Plan.dp_sgd(
        adjacency="add_remove",
        sampling="poisson",
        size=10_000,
        lot_size=100,
        steps=60,
        noise_multiplier=1.5,
        delta=1e-5,
    )
    return affidavit.certify(plan).require()


def mlflow_of(uri: str, record: Path) -> Held:
    """What a real store of MLflow at ``uri`` says of the run."""
    import mlflow

    mlflow.set_tracking_uri(uri)
    with mlflow.start_run() as run:
        affidavit.log_to_mlflow(answer(), record=record, key=SigningKey.generate("logs"))
    client = mlflow.MlflowClient(uri)
    data = client.get_run(run.info.run_id).data
    history = client.get_metric_history(run.info.run_id, "privacy/epsilon_spent")
    return {
        "parameters": data.params,
        "metrics": {name: v for name, v in data.metrics.items() if not name.endswith("spent")},
        "spent": sorted([point.step, point.value] for point in history),
        "files": sorted(file.path for file in client.list_artifacts(run.info.run_id, "privacy")),
    }


def wandb_of(folder: Path, record: Path) -> Held:
    """What Weights & Biases wrote offline, read from its own file."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    run = wandb.init(mode="offline", project="p", dir=str(folder))
    affidavit.log_to_wandb(answer(), run, record=record, key=SigningKey.generate("logs"))
    run.finish()
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    held: Held = {"parameters": {}, "metrics": {}, "spent": [], "files": []}
    for data in records_of(path.read_bytes()):
        message = wandb_internal_pb2.Record()
        message.ParseFromString(data)
        _read(message, held)
    return {**held, "spent": sorted(held["spent"]), "files": sorted(held["files"])}


def records_of(content: bytes) -> Iterator[bytes]:
    """The records of a ``.wandb`` file: LevelDB's log format after a header of seven bytes."""
    place, parts = 7, b""
    while place + 7 <= len(content):
        left = BLOCK - place % BLOCK
        if left < 7:
            place += left
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""


def _read(message: Any, held: Held) -> None:
    def items(updates: Any) -> Iterator[tuple[str, Any]]:
        for item in updates:
            yield item.key or "/".join(item.nested_key), json.loads(item.value_json)

    kind = message.WhichOneof("record_type")
    if kind == "config":
        held["parameters"] |= {k: v for k, v in items(message.config.update) if k != "_wandb"}
    elif kind == "summary":
        held["metrics"] |= {
            k: v
            for k, v in items(message.summary.update)
            if k in ("privacy/epsilon", "privacy/delta")
        }
    elif kind == "history":
        row = dict(items(message.history.item))
        if "privacy/step" in row:
            held["spent"].append([row["privacy/step"], row["privacy/epsilon_spent"]])
    elif kind == "artifact":
        held["files"] += [entry.path for entry in message.artifact.manifest.contents]
    elif kind == "request" and message.request.HasField("log_artifact"):
        contents = message.request.log_artifact.artifact.manifest.contents
        held["files"] += [entry.path for entry in contents]


def held_in(folder: Path) -> Held:
    """What each store holds of the run; their files are below ``folder``."""
    line = folder / "record.jsonl"
    line.write_text("{}\n")
    os.chdir(folder)
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    return {
        "mlflow file": mlflow_of(f"file:{folder}/mlruns", line),
        "mlflow sqlite": mlflow_of(f"sqlite:///{folder}/mlflow.db", line),
        "wandb offline": wandb_of(folder, line),
    }


def recorded(store: str) -> Held:
    """What that store held; a bracket can be narrowed within its width of 1e-4."""
    values = json.loads(RECORDED.read_text())[store]
    spent = [[step, pytest.approx(value, rel=1e-4)] for step, value in values["spent"]]
    return {**values, "metrics": pytest.approx(values["metrics"], rel=1e-4), "spent": spent}


@pytest.mark.filterwarnings("ignore")  # of the packages
def test_real_trackers_hold_what_was_recorded(tmp_path: Path) -> None:
    """``make try-trackers`` runs this, with both installed."""
    result = held_in(tmp_path)
    assert result == {store: recorded(store) for store in json.loads(RECORDED.read_text())}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        sys.stdout.write(json.dumps(held_in(Path(name)), indent=1, sort_keys=True) + "\n")
