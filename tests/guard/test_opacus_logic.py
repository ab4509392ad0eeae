"""The guard's own logic around objects with Opacus' names: order, counting, and no way past it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from affidavit.evidence import check_conformance
from affidavit.guard import GuardStop, opacus
from affidavit.trust import SigningKey
from tests.guard.conftest import LOT, RECORDS, STEPS
from tests.guard.fakes import DistributedDPOptimizer, DPOptimizer, Engine, Loader
from tests.support.trust import trusting


class Script:
    """A training script under the guard."""

    def __init__(self, bundle: bytes, key: SigningKey, record: Path, **changes: Any) -> None:
        self.module = nn.Linear(8, 5)
        kind = changes.pop("kind", DPOptimizer)
        self.optimizer = kind(self.module, 1.2, 1.0, int(RECORDS / 10))
        for name, value in changes.pop("optimizer", {}).items():
            setattr(self.optimizer, name, value)
        self.loader, self.engine = Loader(changes.pop("records", RECORDS), LOT), Engine()
        self.guard = opacus(
            self.engine,
            self.optimizer,
            self.loader,
            bundle,
            trusted=trusting(key.public),
            record=record,
            **changes,
        )
        self.lots = self.endless()

    def endless(self) -> Any:
        while True:
            yield from self.loader.batch_sampler

    def step(self) -> None:
        next(self.lots)
        self.optimizer.sums(3.0)
        self.optimizer.step()


Begin = Callable[..., Script]


@pytest.fixture
def begin(certified: Any, key: SigningKey, tmp_path: Path) -> Begin:
    def make(plan: dict[str, Any] | None = None, **changes: Any) -> Script:
        return Script(certified(**(plan or {}))[1], key, tmp_path / "run", **changes)

    return make


def entries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run/record.jsonl").read_text().splitlines()]


def test_a_right_run_conforms_and_ends_at_its_last_step(
    begin: Begin, certified: Any, tmp_path: Path
) -> None:
    script = begin()
    for _ in range(STEPS):
        script.step()
    result = check_conformance((tmp_path / "run/record.jsonl").read_bytes(), certified()[0])
    assert (result.findings, result.steps_released) == ((), STEPS)
    before = script.module.weight.detach().clone()
    with pytest.raises(GuardStop) as stop:
        script.step()
    assert stop.value.code == "too_many_steps"
    assert torch.equal(before, script.module.weight)


def test_a_certified_probability_is_held_as_a_lot_size_is(begin: Begin) -> None:
    script = begin(plan={"sampling": {"scheme": "poisson", "probability": 0.1}})
    assert script.guard.notes == ()
    assert script.loader.batch_sampler.sample_rate <= 0.1
    for _ in range(STEPS):
        script.step()
    assert script.guard.steps_left == 0


def test_the_step_is_charged_before_its_noise_is_drawn(begin: Begin, tmp_path: Path) -> None:
    script = begin(generator="chacha20")
    drawn = []
    own = script.guard._add_noise
    script.guard._add_noise = lambda: (drawn.append(entries(tmp_path)[-1]["type"]), own())
    script.step()
    assert drawn == ["charge"]


def test_noise_and_lots_are_drawn_by_the_guard(begin: Begin) -> None:
    script = begin()
    sizes = []
    for _ in range(STEPS):
        torch.manual_seed(1)
        sizes.append(len(next(script.lots)))
        torch.manual_seed(len(sizes))
        script.optimizer.sums(0.0)
        script.optimizer.step()
    assert len(set(sizes)) > 2
    grad = script.module.weight.grad
    torch.manual_seed(len(sizes))
    theirs = torch.normal(0.0, 1.2, grad.shape) / LOT
    assert not torch.allclose(grad, theirs)
    assert 0.5 < float(grad.std()) * LOT / 1.2 < 1.5


def test_a_virtual_step_is_no_release(begin: Begin, tmp_path: Path) -> None:
    script = begin()
    next(script.lots)
    for skipped in (True, True, False):
        script.optimizer.signal_skip_step(skipped)
        script.optimizer.sums(1.0)
        script.optimizer.step()
    assert [entry["type"] for entry in entries(tmp_path)].count("charge") == 1
    assert script.guard.steps_left == STEPS - 1


@pytest.mark.ordinary("not changes9-*")
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"optimizer": {"noise_multiplier": 1.1}}, "noise_below"),
        ({"optimizer": {"max_grad_norm": 1.1}}, "clip_norm_above"),
        ({"optimizer": {"expected_batch_size": 61}}, "other_divisor"),
        ({"optimizer": {"loss_reduction": "sum"}}, "other_divisor"),
        ({"records": RECORDS + 1}, "dataset_size"),
        ({"kind": DistributedDPOptimizer}, "unsupported"),
        ({"plan": {"steps": STEPS, "clipping": "per_block",
                   "releases": [{"name": "all", "count": 2, "clip_norm": 1,
                                 "noise_multiplier": 2}]}}, "other_blocks"),
        ({"plan": {"sampling": {"scheme": "full_batch"}}}, "unsupported"),
        ({"generator": "dice"}, "bad_argument"),
        ({"blocks": {"all": ["weight"]}}, "other_blocks"),
        ({"module": nn.Linear(2, 2)}, None),
    ],
)  # fmt: skip
def test_what_does_not_fit_stops_before_anything_is_written(
    begin: Begin, tmp_path: Path, changes: dict[str, Any], code: str | None
) -> None:
    if code is None:  # a model that is not the optimiser's leaves its tensors without a name
        begin(**changes)
        assert entries(tmp_path)[0]["tensors"][0]["name"] == "parameter 0"
        return
    with pytest.raises(GuardStop) as stop:
        begin(**changes)
    assert stop.value.code == code
    assert not (tmp_path / "run").exists()


def test_no_other_optimiser_updates_the_model(begin: Begin) -> None:
    script = begin()
    script.step()
    before = script.module.bias.detach().clone()
    script.module.bias.grad = torch.ones(5)
    with pytest.raises(GuardStop) as stop:
        optim.AdamW([script.module.bias]).step()
    assert stop.value.code == "tensor_not_noised"
    assert torch.equal(before, script.module.bias)
    with pytest.raises(GuardStop):
        script.step()


def test_an_optimiser_of_another_model_is_left_alone(begin: Begin) -> None:
    script, other = begin(), nn.Linear(2, 2)
    script.step()
    optimizer = optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    script.module.bias.grad = torch.ones(5)
    with pytest.raises(GuardStop):
        script.optimizer.original_optimizer.step()
    optimizer.step()


def test_a_model_that_is_gone_guards_nothing(begin: Begin) -> None:
    script = begin()
    weight = script.module.weight
    del script
    gc.collect()
    weight.grad = torch.ones_like(weight)
    optim.SGD([weight], lr=0.1).step()


def test_a_step_that_breaks_off_ends_the_run(begin: Begin, tmp_path: Path) -> None:
    script = begin()
    script.step()

    def out_of_memory(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = script.optimizer.original_optimizer.register_step_pre_hook(out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        script.step()
    handle.remove()
    with pytest.raises(GuardStop) as stop:
        script.step()
    assert stop.value.code == "step_lost"
    assert [entry["type"] for entry in entries(tmp_path)].count("charge") == 2


def test_sums_that_are_not_finite_and_lots_that_nobody_drew_are_stopped(begin: Begin) -> None:
    script = begin()
    script.step()
    script.step()
    next(script.lots)
    script.optimizer.sums(float("inf"))
    with pytest.raises(GuardStop) as stop:
        script.optimizer.step()
    assert stop.value.code == "non_finite"


def test_a_step_without_a_lot_is_stopped(begin: Begin) -> None:
    script = begin()
    script.step()
    script.optimizer.sums(1.0)
    with pytest.raises(GuardStop) as stop:
        script.optimizer.step()
    assert stop.value.code == "other_loader"


def test_noise_of_opacus_own_is_watched_to_the_end(begin: Begin) -> None:
    with pytest.warns(UserWarning, match="not cryptographic"):
        script = begin(generator="opacus")
    for _ in range(4):
        script.step()
    script.guard._add_noise = lambda: [
        setattr(param, "grad", param.summed_grad.clone()) for param in script.optimizer.params
    ]
    with pytest.raises(GuardStop) as stop:
        script.step()
    assert stop.value.code == "tensor_not_noised"


def test_a_tensor_that_came_later_gets_no_plain_update(begin: Begin) -> None:
    script = begin()
    script.step()
    script.module.register_parameter("late", nn.Parameter(torch.zeros(2)))
    script.module.late.grad = torch.ones(2)
    with pytest.raises(GuardStop) as stop:
        optim.SGD([script.module.late], lr=0.1).step()
    assert (stop.value.code, "late" in stop.value.message) == ("tensor_not_noised", True)
    assert not script.module.late.any()


def test_a_tensor_thawed_on_the_way_is_stopped(begin: Begin) -> None:
    script = begin()
    script.step()
    script.module.register_parameter("late", nn.Parameter(torch.zeros(2)))
    script.optimizer.original_optimizer.add_param_group({"params": [script.module.late]})
    with pytest.raises(GuardStop) as stop:
        script.step()
    assert stop.value.code == "other_blocks"
