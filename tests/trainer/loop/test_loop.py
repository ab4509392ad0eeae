"""What a run computes: the certified mechanism, against a reference written out by hand."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from affidavit.evidence import check_conformance
from affidavit.trainer.distributed.peers import Peers
from affidavit.trainer.errors import Diverged, RunFailure
from affidavit.trainer.noise import grid, source
from affidavit.trainer.noise.chacha import Ratchet, commitment_to
from affidavit.trainer.noise.normal import standard_normal
from affidavit.trainer.run_config import bind
from affidavit.trainer.run_folder.checkpoint_storage import CHECKPOINT_FILE
from affidavit.trainer.run_folder.run_writer import RunSecrets
from affidavit.trainer.settings import Settings
from affidavit.trainer.sources import UnknownSource, load_data
from affidavit.trainer.steps import sampling
from affidavit.trainer.steps.training_state import RunKeys, TrainingState
from tests.support.trust import trusting
from tests.trainer.loop.small_run import (
    KEY,
    RECORDS,
    STEPS,
    FinishedRun,
    MadeUpData,
    SmallModel,
    bundle_of,
    entropy_of,
    plan_with,
)

Run = Callable[..., FinishedRun]

GROUPS = (("0.weight", "0.bias"), ("2.weight", "2.bias"))
CYCLIC = {"adjacency": "zero_out", "sampling": {"scheme": "cyclic", "lot_size": 12}}
FLAT = {
    "clipping": "flat",
    "releases": [{"name": "all", "count": 1, "clip_norm": 0.5, "noise_multiplier": 8.0}],
}


def secrets_of(seed: int) -> RunSecrets:
    """The keys of a run with this seed."""
    return RunSecrets.generate(entropy_of(seed))


def lots_of(seed: int, steps: int = STEPS) -> list[Tensor]:
    """The Poisson lots of a run of the small plan."""
    ratchet, result = secrets_of(seed).ratchet, []
    for step in range(steps):
        sampler = sampling.poisson(
            ratchet.key_for("lot"), size=RECORDS, probability=Fraction(12, RECORDS)
        )
        result.append(sampler(step))
        ratchet = ratchet.next()
    return result


def gradients(
    model: SmallModel, values: dict[str, Tensor], x: Tensor, y: Tensor
) -> dict[str, Tensor]:
    """Each record's gradient, formed in full."""

    def loss(at: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        return (functional_call(model.module, at, (one.unsqueeze(0),))[0, 0] - target).square()

    return vmap(grad(loss), in_dims=(None, 0, 0))(values, x, y)


def reference(seed: int, clip_norm: float = 0.5, noise_std: float = 1.0) -> dict[str, Tensor]:
    """DP-SGD of the small plan, step by step from the paper's definition."""
    model, data, ratchet = SmallModel(), MadeUpData(), secrets_of(seed).ratchet
    values = {name: item.detach().clone() for name, item in model.module.named_parameters()}
    for step, lot in enumerate(lots_of(seed)):
        item = gradients(model, values, data.x[lot], data.y[lot])
        sums = {name: torch.zeros_like(value) for name, value in values.items()}
        for names in GROUPS:
            square = sum(item[name].flatten(1).square().sum(1) for name in names)
            weights = (clip_norm / torch.as_tensor(square).sqrt()).clamp(max=1)
            for name in names:
                sums[name] += torch.tensordot(weights, item[name], dims=1)
        key = ratchet.key_for("noise")
        for place, (name, value) in enumerate(values.items()):
            noise = standard_normal(key, step=step, tensor=place, shape=value.shape)
            values[name] -= 0.1 * (sums[name] + noise_std * noise) / 12
        ratchet = ratchet.next()
    return values


def test_a_run_is_dp_sgd_as_certified(run: Run) -> None:
    created, expected = run(seed=1), reference(1)
    for name, parameter in created.model.module.named_parameters():
        assert torch.allclose(parameter, expected[name], atol=1e-6), name


def test_every_lot_is_the_samplers_and_is_read_once(run: Run) -> None:
    created = run(seed=1)
    lots = [lot.tolist() for lot in lots_of(1)]
    assert created.data.asked == [lot for lot in lots if lot]
    assert len({len(lot) for lot in lots}) > 2  # so that the fixed divisor is not the size


@pytest.mark.ordinary("5")
@pytest.mark.parametrize("microbatch", [1, 5, 64])
def test_the_microbatch_changes_nothing(run: Run, microbatch: int) -> None:
    one, other = run(seed=2, microbatch=microbatch), run(seed=2, microbatch=7)
    assert torch.allclose(one.values, other.values, atol=1e-6)


def test_empty_lots_release_noise_and_count(run: Run) -> None:
    plan = plan_with(sampling={"scheme": "poisson", "probability": 1e-9})
    created = run(plan, seed=3)
    assert created.data.asked == []
    assert created.outcome.charged == created.outcome.released == STEPS
    digests = [entry["parameters"] for entry in created.entries if entry["type"] == "release"]
    assert len(set(digests)) == STEPS


def test_lots_are_cut_where_the_plan_says_so(run: Run) -> None:
    sampling_ = {"scheme": "truncated_poisson", "lot_size": 12, "max_lot_size": 9}
    created = run(plan_with(sampling=sampling_), seed=4)
    sizes = [len(lot) for lot in created.data.asked]
    assert max(sizes) == 9
    assert sizes.count(9) > STEPS // 2


@pytest.mark.by_turns
@pytest.mark.parametrize(
    "changes",
    [
        {"adjacency": "replace_one", "sampling": {"scheme": "fixed_size", "lot_size": 12}},
        {"adjacency": "zero_out", "sampling": {"scheme": "shuffled", "lot_size": 12}},
        CYCLIC,
        {"sampling": {"scheme": "balls_in_bins", "lot_size": 12}},
        {"sampling": {"scheme": "random_allocation", "participations": 3}},
        {"sampling": {"scheme": "full_batch"}},
        {
            "adjacency": "zero_out",
            "sampling": {"scheme": "cyclic_poisson", "lot_size": 12, "groups": 3},
            "noise": {"kind": "banded", "bands": 2},
        },
        {
            "sampling": {"scheme": "b_min_sep", "lot_size": 12, "separation": 3},
            "noise": {"kind": "banded", "bands": 3},
        },
        {**CYCLIC, "noise": {"kind": "bidiagonal", "lambda": 0.9}},
        {**CYCLIC, "noise": {"kind": "tree"}},
        {**CYCLIC, "noise": {"kind": "blt", "buffers": 2}},
        {**CYCLIC, "clip_schedule": [1.0] * 6 + [0.5] * 6},
        FLAT,
        {"optimizer": {"name": "dp_adambc", "learning_rate": 0.01}},
        {
            "optimizer": {"name": "dp_muonbc", "learning_rate": 0.01},
            "releases": [
                {"name": "hidden", "clip_norm": 0.5, "noise_multiplier": 4},
                {"name": "auxiliary", "clip_norm": 0.5, "noise_multiplier": 4},
            ],
        },
        {**FLAT, "optimizer": {"name": "dp_disk", "learning_rate": 0.1}},
        {
            **FLAT,
            "releases": [{"name": "all", "clip_norm": 0.5, "noise_multiplier": 80}],
            "optimizer": {
                "name": "dp_dice",
                "learning_rate": 0.1,
                "error_clip_norm": 0.01,
                "pre_clip_norm": 0.6,
            },
        },
        {**CYCLIC, "noise": {"kind": "bidiagonal"}, "optimizer": {"name": "dp_corrmom",
            "learning_rate": 0.1, "momentum": 0.9}},
        {
            "steps": ...,
            "sampling": ...,
            "releases": ...,
            "phases": [
                {"sampling": {"scheme": "poisson", "lot_size": 12}, "steps": 5,
                 "releases": [{"name": "all", "count": 2, "clip_norm": 0.5,
                               "noise_multiplier": 4}]},
                {"sampling": {"scheme": "poisson", "lot_size": 20}, "steps": 7,
                 "releases": [{"name": "all", "count": 2, "clip_norm": 0.25,
                               "noise_multiplier": 3}]},
            ],
        },
    ],
    ids=lambda changes: json.dumps(changes, default=str)[:60],
)  # fmt: skip
def test_every_kind_of_plan_runs_to_its_end_and_conforms(run: Run, changes: dict[str, Any]) -> None:
    plan = plan_with(**changes)
    names = [release.name for release in plan.phases[0].releases]
    model = SmallModel({"hidden": ("0",), "auxiliary": ("2",)}) if len(names) > 1 else SmallModel()
    bundle = bundle_of(plan)
    created = run(plan, model=model, bundle=bundle, seed=6)
    result = check_conformance((created.out / "record.jsonl").read_bytes(), predicate_of(bundle))
    assert result.findings == ()
    assert result.steps_to_charge == STEPS
    assert torch.isfinite(created.values).all()


def predicate_of(bundle: bytes) -> dict[str, Any]:
    """What a bundle says, unverified."""
    import base64

    payload = json.loads(bundle)["envelope"]["payload"]
    result: dict[str, Any] = json.loads(base64.b64decode(payload))["predicate"]
    return result


def test_a_clip_schedule_is_followed_and_the_noise_is_not_scheduled(run: Run) -> None:
    created = run(plan_with(**CYCLIC, clip_schedule=[1.0] * 6 + [0.5] * 6), seed=7)
    charges = [entry for entry in created.entries if entry["type"] == "charge"]
    assert [entry["clip_norm"]["all"] for entry in charges] == [0.5] * 6 + [0.25] * 6
    assert {entry["noise_std"]["all"] for entry in charges} == {1.0}


def test_combined_gradients_are_clipped_as_one(run: Run) -> None:
    """With flat clipping and hardly any noise the update's length shows what was clipped."""
    quiet = [{"name": "all", "clip_norm": 1e-3, "noise_multiplier": 1e-6}]
    plan = plan_with(
        sampling={"scheme": "full_batch"},
        clipping="flat",
        releases=quiet,
        steps=2,
        optimizer={"name": "dp_disk", "learning_rate": 1.0, "kappa": 0.3, "gamma": 0.5},
    )
    model = SmallModel()
    before = torch.cat([parameter.detach().flatten() for parameter in model.module.parameters()])
    created = run(plan, model=model, seed=8)
    # g̃_1 + g̃_2 with g̃_2 = (1-κ) g̃_1 + κ r_2, every r of length at most C: no more than 2C,
    # while sums combined after clipping could have reached (1 + 0.7 + 0.3 · 8.33) C.
    moved = float((created.values - before).norm())
    assert 0 < moved <= 2e-3 * 1.001


def test_combined_gradients_are_those_at_both_points(run: Run) -> None:
    plan = plan_with(
        sampling={"scheme": "full_batch"},
        clipping="flat",
        releases=[{"name": "all", "clip_norm": 1e3, "noise_multiplier": 1e-9}],
        steps=2,
        optimizer={"name": "dp_disk", "learning_rate": 0.01, "kappa": 0.6, "gamma": 0.5},
    )
    model, data = SmallModel(), MadeUpData()
    start = {name: item.detach().clone() for name, item in model.module.named_parameters()}
    created = run(plan, model=model, data=data, seed=9)

    def mean(values: dict[str, Tensor]) -> dict[str, Tensor]:
        result = gradients(model, values, data.x, data.y)
        return {name: item.mean(0) for name, item in result.items()}

    c = 0.4 / (0.6 * 0.5)
    first = mean(start)
    after = {name: start[name] - 0.01 * first[name] for name in start}
    ahead = {name: after[name] + 0.5 * (after[name] - start[name]) for name in start}
    there, here = mean(ahead), mean(after)
    for name, parameter in created.model.module.named_parameters():
        combined = c * there[name] + (1 - c) * here[name]
        smooth = 0.4 * first[name] + 0.6 * combined
        assert torch.allclose(parameter, after[name] - 0.01 * smooth, atol=1e-5), name


def test_learning_rates_are_public_and_scheduled(run: Run) -> None:
    created = run(seed=10, schedule="cosine", warmup=2)
    rates = [entry["learning_rate"] for entry in created.entries if entry["type"] == "charge"]
    assert rates[:2] == [0.05, 0.1]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    listed = [0.1 / (step + 1) for step in range(STEPS)]
    workload = {"kind": "momentum", "momentum": 0.0, "learning_rates": listed}
    noise = {"kind": "bidiagonal", "lambda": 0.5}
    created = run(plan_with(**CYCLIC, workload=workload, noise=noise), seed=10)
    assert [e["learning_rate"] for e in created.entries if e["type"] == "charge"] == listed


def test_autocast_trains_in_bfloat16_with_clipping_in_float32(run: Run) -> None:
    created, exact = run(seed=11, precision="bfloat16"), run(seed=11)
    assert not torch.equal(created.values, exact.values)
    assert torch.allclose(created.values, exact.values, atol=0.02)
    assert all(parameter.dtype == torch.float32 for parameter in created.model.module.parameters())


class Narrow(SmallModel):
    """Its parameters are in bfloat16, as many published models are."""

    def __init__(self) -> None:
        super().__init__()
        self.module = self.module.bfloat16()

    def losses(self, batch: Any) -> Tensor:
        x, y = batch
        return super().losses((x.bfloat16(), y.bfloat16()))


@pytest.mark.by_turns
@pytest.mark.parametrize(("name", "rate"), [("dp_sgd", 1e-3), ("dp_adamw", 2e-4)])
def test_updates_below_the_precision_of_a_parameter_add_up(
    run: Run, name: str, rate: float
) -> None:
    # bfloat16 has 8 bits: most of these updates alone would leave a parameter as it is.
    plan = plan_with(optimizer={"name": name, "learning_rate": rate})
    narrow, start = run(plan, model=Narrow(), seed=3), Narrow()
    wide = SmallModel()
    wide.module.load_state_dict(start.module.state_dict())
    exact = run(plan, model=wide, seed=3)
    assert {item.dtype for item in narrow.model.module.parameters()} == {torch.bfloat16}
    begin = torch.cat([item.detach().flatten() for item in start.module.parameters()])
    assert (narrow.values != begin).any()
    # Half a unit in the last place, and what the rounded parameters change of the gradients.
    assert torch.allclose(narrow.values.float(), exact.values, rtol=2**-8, atol=1e-4)


def test_the_masters_of_narrow_parameters_are_in_a_checkpoint() -> None:
    plan = plan_with(optimizer={"name": "dp_sgd", "learning_rate": 1e-4})
    bound = bind(bundle_of(plan), trusting(KEY.public), plan, records=RECORDS)

    def fresh() -> TrainingState:
        return TrainingState(
            bound, Narrow(), MadeUpData(), settings=Settings(), peers=Peers.alone("cpu"),
            keys=RunKeys(lots=bytes(32), probes=bytes(32)),
        )  # fmt: skip

    one, two, ratchet = fresh(), fresh(), secrets_of(3).ratchet
    one.step(0, ratchet, lambda _: None)
    two.load(one.state())
    for training in (one, two):
        training.step(1, ratchet.next(), lambda _: None)
    rounded = dict(one.module.named_parameters())
    for name, master in one.state()["masters"].items():
        assert torch.equal(master, two.state()["masters"][name])
        assert not torch.equal(master, rounded[name].float())


class Stopping(MadeUpData):
    """Asks the run to stop in its fifth lot."""

    def collate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.asked) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().collate(indices)


def test_records_that_are_not_finite_add_nothing(run: Run) -> None:
    data = MadeUpData()
    data.x[::2] = float("nan")
    created = run(data=data, seed=12)
    assert torch.isfinite(created.values).all()


def test_an_update_that_diverges_ends_the_run_and_stays_charged(run: Run, tmp_path: Any) -> None:
    plan = plan_with(
        optimizer={"name": "dp_sgd", "learning_rate": 3e38},
        releases=[{"name": "all", "count": 2, "clip_norm": 100, "noise_multiplier": 2.0}],
    )
    with pytest.raises(Diverged, match="learning_rate"):
        run(plan, out=tmp_path / "run", seed=13)
    lines = (tmp_path / "run" / "record.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert (last["type"], last["ended"]) == ("final", "diverged")
    assert last["charged"] == last["released"] + 1
    assert not (tmp_path / "run" / "weights.pt").exists()
    with pytest.raises(RunFailure, match="nothing to resume"):
        run(plan, out=tmp_path / "run", resume=True)


def test_nothing_private_is_readable_or_recorded(run: Run) -> None:
    created = run(seed=14, show_private=True)
    record = (created.out / "record.jsonl").read_text()
    opening = json.loads((created.out / "opening.json").read_text())
    assert created.data.digest not in record
    assert "loss" not in record
    assert not (created.out / CHECKPOINT_FILE).exists()
    for path in created.out.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    secret = bytes.fromhex(opening["secret"])
    assert opening["secret"] not in record
    header, *rest = created.entries
    assert header["data"]["commitment"] == commitment_to(secret, "data", created.data.digest)
    releases = [entry for entry in rest if entry["type"] == "release"]
    for step, (entry, lot) in enumerate(zip(releases, lots_of(14), strict=True)):
        opened = commitment_to(secret, f"lot size of step {step}", str(len(lot)))
        assert entry["lot_size_commitment"] == opened


def test_no_default_key_and_no_key_twice(run: Run) -> None:
    one, other = run(), run()
    keys = [e["key_commitment"] for item in (one, other) for e in item.entries
            if e["type"] == "charge"]  # fmt: skip
    assert len(set(keys)) == 2 * STEPS
    assert not torch.equal(one.values, other.values)


def test_the_ratchet_gives_the_next_key_and_not_the_one_before() -> None:
    first = Ratchet(bytes(32))
    purposes = {first.key_for(item) for item in ("lot", "noise", "dropout of rank 0")}
    assert len({*purposes, first.key, first.next().key, first.reseeded().key}) == 6
    assert first.commitment != first.next().commitment


def test_a_tied_tensor_of_which_each_use_is_clipped_keeps_to_both_shares(run: Run) -> None:
    from affidavit.trainer.adapters import Group

    class Tied(SmallModel):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            first, last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            last.weight = first.weight
            self.module = nn.Sequential(first, nn.Tanh(), last, nn.Flatten(), nn.Linear(3, 1))
            self.module[4].requires_grad_(False)

        def blocks(self) -> dict[str, tuple[Group, ...]]:
            return {"all": (Group(names=("0.weight",), uses={"0": 0.25, "2": 0.75}),)}

    plan = plan_with(
        steps=1,
        sampling={"scheme": "full_batch"},
        releases=[{"name": "all", "clip_norm": 0.5, "noise_multiplier": 1e-6}],
        optimizer={"name": "dp_sgd", "learning_rate": 1.0},
    )
    model = Tied()
    before = model.module[0].weight.detach().clone()
    run(plan, model=model, seed=15)
    moved = float((model.module[0].weight.detach() - before).norm())
    assert 0 < moved <= 0.5


def test_unknown_data_is_told_by_name() -> None:
    with pytest.raises(UnknownSource, match="unknown data"):
        load_data("nowhere")
    with pytest.raises(UnknownSource, match="no_such_module"):
        load_data("python:no_such_module:function")


def test_exact_noise_is_the_plans_and_in_the_record(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded: list[float] = []
    real = grid.add_grid_noise

    def seen(sums: Tensor, *given: Any, scale: float, **named: Any) -> None:
        real(sums, *given, scale=scale, **named)
        steps = sums.double() / grid.grid_step(scale)
        rounded.append(float((steps - steps.round()).abs().max()))

    monkeypatch.setattr(source, "add_grid_noise", seen)
    noise = {"kind": "independent", "arithmetic": "exact_grid"}
    exact = run(plan_with(noise=noise), seed=3)
    assert exact.entries[0]["phases"][0]["noise"] == noise
    assert len(rounded) == STEPS * len(exact.entries[0]["tensors"])
    assert max(rounded) == 0
    rounded.clear()
    assert run(seed=3).outcome.released == exact.outcome.released == STEPS
    assert not rounded
