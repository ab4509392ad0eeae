"""Replay finds each planted fault, with its line and tensor, and refutes no honest loop."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from threading import Thread
from time import gmtime, monotonic, strftime

import pytest

from affidavit.replay import ReplayRefused, child, driver, replay_command, to_text
from affidavit.replay.driver import Launch
from affidavit.replay.randomness import fix_randomness
from affidavit.replay.settings import Job
from tests.replay.conftest import Replay
from tests.replay.faults import Fault, parameters
from tests.replay.opacus_loop import FAULTS, LOOP
from tests.replay.plain_loop import PLAIN, PLAIN_FAULTS
from tests.replay.straying_loop import HONEST, STOPPED, STRAYING, STRAYING_FAULTS

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "train.py"]
PRINTED = "print(loss.item())"
HELD_OUT = {
    "dataset = TensorDataset(X, Y)": "class Named(TensorDataset):\n"
    "        def __len__(self):\n"
    "            return len(self.tensors[0])\n"
    "        def __getitem__(self, place):\n"
    "            return X[place] + 0.1 * torch.randn(8), Y[place]\n"
    "    whole = Named(X, Y)\n"
    "    dataset, held_out = torch.utils.data.random_split(whole, [160, 40])",
    "PrivacyEngine()": "PrivacyEngine(accountant='rdp')",
    "    # end": "    print(engine.get_epsilon(1e-5))\n"
    "    with open('accuracy', 'w') as file:\n"
    "        file.write(str(accuracy(model, DataLoader(held_out, batch_size=40))))\n"
    "    import datetime\n"
    "    with open('when', 'w') as file:\n"
    "        file.write(str(datetime.datetime.now()))",
}
"""A split that no private loader reads, stored with the private records, which are augmented."""


def test_an_honest_loop_of_opacus_is_not_refuted(tmp_path: Path, replay: Replay) -> None:
    loop = LOOP.replace("        # epoch\n", f"        {PRINTED}\n")
    for old, new in HELD_OUT.items():
        loop = loop.replace(old, new)
    record = replay(loop, 4)
    assert record.verdict == "not_refuted", to_text(record)
    assert {check for _, check in record.checks} == {"shown"}
    assert record.largest_move is not None
    assert 0.5 < record.largest_move <= 1.001
    printed = loop[: loop.index(PRINTED)].count("\n") + 1
    assert printed in record.files[0].lines
    stepped = loop[: loop.index("optimizer.step()")].count("\n") + 1
    written = loop[: loop.index("open(")].count("\n") + 1
    assert {(item.code, item.where, item.refutes) for item in record.findings} == {
        ("raw_value_logged", f"train.py:{printed}", False),
        ("not_finite_released", f"train.py:{stepped}", False),  # Opacus clips no NaN
        ("file_differs", f"train.py:{written}", False),  # of records that are not protected
    }
    assert not any(note.startswith("file_not_compared") for note in record.notes)  # nor the date
    assert not (tmp_path / "model.pt").exists()  # runs write to copies


def test_an_honest_loop_of_ones_own_is_not_refuted(replay: Replay) -> None:
    """It makes two releases of each lot."""
    loss = (
        "        losses = error.abs().sum()\n"
        "        noisy = losses + 2 * torch.randn(())\n"
        "        noisy = affidavit.release(losses, noisy, clip_norm=1.0, noise_multiplier=2.0)\n"
        "        optimizer.param_groups[0]['lr'] = 0.5 + float(noisy.sigmoid())\n"
    )
    record = replay(PLAIN.replace("        # stepped\n", loss))
    assert record.verdict == "not_refuted", to_text(record)
    assert record.steps == 12
    assert record.checks.sensitivity == record.checks.noise == "shown"
    assert record.largest_move is not None
    assert 0.5 < record.largest_move <= 1.001


def test_a_slow_loop_has_fewer_steps_and_records_unless_they_are_named(
    tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    monkeypatch.setattr(driver, "STEP_SECONDS", 0.0)
    monkeypatch.setattr(driver, "ALL_SECONDS", 0.0)
    record = replay_command(COMMAND, folder=tmp_path, launch=launch)
    assert (record.steps, record.neighbours) == (3, 7)
    assert [note for note in record.notes if "--steps" in note]
    named = replay_command(COMMAND, folder=tmp_path, steps=5, records=2, launch=launch)
    assert (named.steps, named.neighbours, named.notes) == (5, 9, ())


@pytest.mark.soak
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("max_grad_norm=1.0,", "max_grad_norm=[1.0] * 4, clipping='per_layer',"),
        (
            "model, optimizer, loader = engine.make_private(",
            "model, optimizer, criterion, loader = engine.make_private(\n"
            "        grad_sample_mode='ghost', criterion=criterion,",
        ),
        (
            "    # before\n",
            "    from torch import distributed\n"
            "    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel\n"
            "    store = distributed.HashStore()\n"
            "    distributed.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
            "    model = DifferentiallyPrivateDistributedDataParallel(model)\n",
        ),
        (
            "    for epoch in range(3):\n",
            "    from opacus.utils.batch_memory_manager import BatchMemoryManager\n"
            "    with BatchMemoryManager(\n"
            "        data_loader=loader, max_physical_batch_size=5, optimizer=optimizer\n"
            "    ) as small:\n"
            "        loader = small\n"
            "    for epoch in range(3):\n",
        ),
    ],
)
def test_other_honest_uses_of_opacus_are_not_refuted(replay: Replay, old: str, new: str) -> None:
    record = replay(LOOP.replace(old, new))
    assert record.verdict == "not_refuted", to_text(record)
    assert record.steps == 6
    assert {check for _, check in record.checks} == {"shown"}
    assert any(note.startswith("divisor_follows_size") for note in record.notes)


@pytest.mark.soak
def test_a_loop_under_the_guard_is_not_refuted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path / "home"))
    plan = ROOT / "examples/opacus/digits.yaml"
    for words in (["keys", "new"], ["certify", str(plan), "--out", "bundle.json"]):
        subprocess.run([sys.executable, "-m", "affidavit", *words], cwd=tmp_path, check=True)
    (tmp_path / "mnist.py").write_bytes(plan.with_name("mnist.py").read_bytes())
    record = replay_command([sys.executable, "mnist.py"], folder=tmp_path, records=1)
    assert record.verdict == "not_refuted", to_text(record)
    assert record.steps == 12


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    # end\n", "    torch.save(is_late(), 'late.pt')\n"),
        ("    # before\n", "    model[0].bias.data[0] += is_late()\n"),
        ("        # epoch\n", "        if is_late():\n            break\n"),
        (
            "    # prepared\n",
            "    def accumulate(clip=optimizer.clip_and_accumulate):\n"
            "        clip()\n"
            "        optimizer.params[0].summed_grad += 3 * is_late()\n"
            "    optimizer.clip_and_accumulate = accumulate\n",
        ),
    ],
)
def test_what_differs_between_runs_on_the_same_data_refutes_nothing(
    replay: Replay, old: str, new: str
) -> None:
    """The given data's first two runs agree by chance, and all later runs differ from these."""
    late = (
        "import os\ndef is_late():\n    return int(os.environ['TMPDIR'].rpartition('run')[2]) > 2\n"
    )
    record = replay(late + LOOP.replace(old, new))
    assert record.verdict != "refuted", to_text(record)
    assert record.unstable or any(note.startswith("file_not_compared") for note in record.notes)


def test_a_clock_that_was_imported_before_the_run_is_replaced() -> None:
    """Otherwise a checkpoint that is due by the clock is written in some runs alone."""

    def run(_: Job) -> None:
        fix_randomness(2e9)
        began = monotonic()
        assert monotonic() - began == pytest.approx(0.001)
        first = datetime.now(UTC)
        reader = Thread(target=monotonic)  # as often as the machine's load lets it
        reader.start()
        reader.join()
        assert datetime.now(UTC) - first == timedelta(milliseconds=1)
        assert date.today() == datetime.today().date()
        assert strftime("%Y-%m-%d", gmtime()) == f"{datetime.now(UTC):%Y-%m-%d}"

    assert child.fork(Job(folder="", out=""), 10, run) == 0


@pytest.mark.soak
def test_the_adaptive_clipping_of_opacus_is_refuted(replay: Replay) -> None:
    """It divides by the exact number of records in the batch."""
    adaptive = (
        "max_grad_norm=1.0, clipping='adaptive', target_unclipped_quantile=0.5, "
        "clipbound_learning_rate=0.2, max_clipbound=10.0, min_clipbound=0.1, "
        "unclipped_num_std=5.0,"
    )
    record = replay(LOOP.replace("max_grad_norm=1.0,", adaptive))
    (refuting,) = (finding for finding in record.findings if finding.refutes)
    assert refuting.subject == "AdaClipDPOptimizer.max_grad_norm"
    assert refuting.neighbour is not None
    assert refuting.neighbour.kind == "removed"


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_a_fault_in_a_loop_of_opacus_is_named(replay: Replay, fault: Fault) -> None:
    loop = fault.planted(LOOP)
    record = replay(loop)
    assert fault.is_named(record, loop), to_text(record)


@pytest.mark.parametrize("fault", parameters(STRAYING_FAULTS))
def test_a_fault_that_the_trainer_stops_is_named(replay: Replay, fault: Fault) -> None:
    loop = fault.planted(STRAYING)
    record = replay(loop)
    assert fault.is_named(record, loop), to_text(record)


@pytest.mark.by_turns
@pytest.mark.parametrize("name", HONEST)
def test_the_honest_loops_of_these_are_not_refuted(replay: Replay, name: str) -> None:
    record = replay(Fault(name, HONEST[name], "").planted(STRAYING), 4)
    assert record.verdict == "not_refuted", to_text(record)


@pytest.mark.by_turns
@pytest.mark.parametrize("name", STOPPED)
def test_a_fault_that_opacus_stops_is_no_replay(replay: Replay, name: str) -> None:
    with pytest.raises(ReplayRefused) as refused:
        replay(Fault(name, STOPPED[name], "").planted(STRAYING))
    assert refused.value.code == "loop_failed"


@pytest.mark.parametrize("fault", parameters(PLAIN_FAULTS))
def test_a_fault_in_a_loop_of_ones_own_is_named(replay: Replay, fault: Fault) -> None:
    loop = fault.planted(PLAIN)
    record = replay(loop)
    assert fault.is_named(record, loop), to_text(record)


@pytest.mark.parametrize(
    ("command", "loop", "code", "remedy"),
    [
        (["bash", "train.sh"], "", "command_unknown", "replay -- python train.py"),
        ([sys.executable, "other.py"], "", "command_unknown", "in the folder of the script"),
        (COMMAND, "print(1 / 0)", "loop_failed", "by itself"),
        (COMMAND, "import os; os.environ['LOCAL_RANK']", "loop_failed", "WORLD_SIZE=1"),
        (COMMAND, "open('../raw', 'w')", "loop_failed", "below the folder"),
        (COMMAND, "print('no training')", "no_records_seen", "affidavit.records"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(
    tmp_path: Path, launch: Launch, command: list[str], loop: str, code: str, remedy: str
) -> None:
    (tmp_path / "train.py").write_text(loop)
    with pytest.raises(ReplayRefused) as refused:
        replay_command(command, folder=tmp_path, launch=launch)
    assert refused.value.code == code
    assert remedy in refused.value.remedy
