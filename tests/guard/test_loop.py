"""``Guard`` in a loop of one's own: what is said is compared, seen where it can be, recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from affidavit.evidence import check_conformance
from affidavit.guard import Guard, GuardStop
from affidavit.trust import SigningKey
from tests.guard.conftest import LOT, RECORDS, STEPS
from tests.support.trust import trusting

Begin = Callable[..., Guard]


@pytest.fixture
def begin(certified: Any, guarded_plan: Any, key: SigningKey, tmp_path: Path) -> Begin:
    """A right beginning, with arguments changed."""

    def make(**changes: Any) -> Guard:
        stated: dict[str, Any] = {
            "certificate": certified()[1],
            "plan": guarded_plan(),
            "sampler": "poisson",
            "dataset_size": RECORDS,
            "lot_size": LOT,
            "blocks": {"all": {"weight": np.zeros((5, 8)), "bias": np.zeros(5)}},
            "generator": "chacha20",
            "trusted": trusting(key.public, at=changes.pop("at", None)),
            "record": tmp_path / "run",
            **changes,
        }
        return Guard(**stated)

    return make


def noised(run: Guard, draws: np.random.Generator, **changes: Any) -> None:
    """One right release, or one with something changed."""
    sums = {"weight": draws.uniform(-9, 9, (5, 8)), "bias": draws.uniform(-9, 9, 5)}
    released = {name: item + 1.2 * draws.normal(size=item.shape) for name, item in sums.items()}
    stated: dict[str, Any] = {
        "clip_norm": 1.0,
        "noise_multiplier": 1.2,
        "divisor": LOT,
        "sums": sums,
        "released": released,
        **changes,
    }
    run.step(**stated)


def test_a_right_run_is_recorded_as_it_was_certified(
    begin: Begin, certified: Any, tmp_path: Path
) -> None:
    draws = np.random.default_rng(1)
    with begin() as run:
        for left in range(STEPS, 0, -1):
            assert run.steps_left == left
            noised(run, draws, key=draws.bytes(32))
    result = check_conformance((tmp_path / "run/record.jsonl").read_bytes(), certified()[0])
    assert (result.findings, result.steps_charged, result.steps_released) == ((), STEPS, STEPS)
    assert run.notes == ()


def test_one_step_more_than_certified_is_stopped_and_so_is_all_that_follows(begin: Begin) -> None:
    run, draws = begin(), np.random.default_rng(1)
    for _ in range(STEPS):
        noised(run, draws)
    for _ in range(2):
        with pytest.raises(GuardStop) as stop:
            noised(run, draws)
        assert stop.value.code == "too_many_steps"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"sampler": "shuffled"}, "other_sampler"),
        ({"dataset_size": RECORDS + 1}, "dataset_size"),
        ({"lot_size": LOT + 1}, "other_probability"),
        ({"lot_size": None, "probability": 0.11}, "other_probability"),
        ({"lot_size": None}, "bad_argument"),
        ({"blocks": {"hidden": {"weight": np.zeros(3)}}}, "other_blocks"),
        ({"blocks": {"all": {}}}, "other_blocks"),
        ({"trusted": trusting(SigningKey.generate("other").public)}, "unknown_key"),
        ({"trusted": [SigningKey.generate().public]}, "bad_argument"),
        ({"certificate": b"{}"}, "bad_form"),
        ({"certificate": "/none/bundle.json"}, "unreadable"),
        ({"at": datetime.now(UTC) + timedelta(days=4000)}, "expired"),
        ({"generator": {"noise": "chacha20"}}, "bad_argument"),
    ],
)
def test_what_does_not_fit_stops_before_anything_is_written(
    begin: Begin, tmp_path: Path, changes: dict[str, Any], code: str
) -> None:
    with pytest.raises(GuardStop) as stop:
        begin(**changes)
    assert stop.value.code == code
    assert stop.value.remedy
    assert not (tmp_path / "run").exists()


def test_another_plan_and_another_verdict_are_stopped(
    begin: Begin, certified: Any, guarded_plan: Any
) -> None:
    with pytest.raises(GuardStop) as stop:
        begin(plan=guarded_plan(steps=STEPS + 1))
    assert stop.value.code == "other_plan"
    low = {"target": {"epsilon": 0.1, "delta": 1e-4}}
    with pytest.raises(GuardStop) as stop:
        begin(certificate=certified(**low)[1], plan=guarded_plan(**low))
    assert stop.value.code == "under_noised"


def test_what_cannot_be_seen_from_outside_is_refused(
    begin: Begin, certified: Any, guarded_plan: Any
) -> None:
    correlated = {
        "adjacency": "zero_out",
        "sampling": {"scheme": "cyclic", "lot_size": 75},
        "noise": {"kind": "bidiagonal", "lambda": 0.5},
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 9}],
    }
    with pytest.raises(GuardStop) as stop:
        begin(certificate=certified(**correlated)[1], plan=guarded_plan(**correlated))
    assert stop.value.code in {"unsupported", "unknown_obligation"}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"noise_multiplier": 1.1999999}, "noise_below"),
        ({"noise_multiplier": None, "noise_std": 1.1}, "noise_below"),
        ({"clip_norm": 1.0000001, "noise_multiplier": 2}, "clip_norm_above"),
        ({"clip_norm": {"hidden": 1.0}}, "other_blocks"),
        ({"clip_norm": float("nan")}, "bad_argument"),
        ({"noise_std": 1.2}, "bad_argument"),
        ({"divisor": 61}, "other_divisor"),
        ({"released": None}, "bad_argument"),
        ({"released": {}}, "tensor_not_noised"),
    ],
)
def test_a_release_that_does_not_fit_is_stopped_and_not_charged(
    begin: Begin, tmp_path: Path, changes: dict[str, Any], code: str
) -> None:
    run, draws = begin(), np.random.default_rng(1)
    noised(run, draws)
    with pytest.raises(GuardStop) as stop:
        noised(run, draws, **changes)
    assert stop.value.code == code
    lines = (tmp_path / "run/record.jsonl").read_text().splitlines()
    types = [json.loads(line)["type"] for line in lines]
    assert types == ["header", "checkpoint", "charge", "release"]


def test_noise_that_is_not_there_and_keys_used_twice_are_stopped(begin: Begin) -> None:
    draws = np.random.default_rng(1)
    sums = {"weight": np.ones((5, 8)), "bias": np.ones(5)}
    with pytest.raises(GuardStop) as stop:
        noised(begin(), draws, sums=sums, released=sums)
    assert stop.value.code == "tensor_not_noised"


def test_a_key_that_was_used_is_stopped(begin: Begin) -> None:
    run, draws = begin(), np.random.default_rng(1)
    noised(run, draws, key=b"one")
    with pytest.raises(GuardStop) as stop:
        noised(run, draws, key=b"one")
    assert stop.value.code == "noise_repeated"


def test_noise_that_was_only_declared_is_said_to_be(begin: Begin) -> None:
    run = begin(generator="numpy")
    run.step(clip_norm=1.0, noise_multiplier=1.2)
    assert len(run.notes) == 2


def test_a_failure_of_the_guard_itself_stops_the_run(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, draws = begin(), np.random.default_rng(1)
    monkeypatch.setattr(run._noise_test, "check", lambda _noises: 1 / 0)
    for _ in range(2):
        with pytest.raises(GuardStop) as stop:
            noised(run, draws)
        assert stop.value.code == "guard_failure"


def test_a_record_is_never_written_over_nor_lost(begin: Begin, tmp_path: Path) -> None:
    begin()
    with pytest.raises(GuardStop) as stop:
        begin()
    assert stop.value.code == "record_exists"
    (tmp_path / "file").write_text("")
    with pytest.raises(GuardStop) as stop:
        begin(record=tmp_path / "file")
    assert stop.value.code in {"not_written", "record_exists"}


def test_a_run_that_breaks_off_is_charged_every_step(
    begin: Begin, certified: Any, tmp_path: Path
) -> None:
    run = begin()
    noised(run, np.random.default_rng(1))
    run.close()
    result = check_conformance((tmp_path / "run/record.jsonl").read_bytes(), certified()[0])
    assert {finding.code for finding in result.findings} == {"unfinished"}
    assert (result.steps_charged, result.steps_to_charge) == (1, STEPS)


def test_no_framework_is_imported() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from affidavit import guard\n"
            "assert not {'torch', 'opacus', 'sqlalchemy', 'fastapi', 'jax'} & sys.modules.keys()",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
