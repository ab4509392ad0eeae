"""Laws that every registered optimiser keeps; a new one is found by them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from affidavit.mechanisms.catalogue import MECHANISMS
from affidavit.plan import OPTIMIZER_FIELDS, Plan, RefusedPlan
from affidavit.trainer.optimizers.base import StepsExhausted
from affidavit.trainer.optimizers.inputs import optimizer_inputs
from affidavit.trainer.optimizers.registry import OPTIMIZERS, optimizer_of

NAMES = sorted(OPTIMIZERS)
EVERYTHING: dict[str, Any] = {
    "momentum": 0.9,
    "beta1": 0.8,
    "beta2": 0.9,
    "weight_decay": 0.1,
    "floor": 1e-3,
    "smoothing": 0.5,
    "probes": 2,
    "denoise": True,
}


def everything(name: str) -> dict[str, Any]:
    """Every field that the optimiser takes, without two first moments at once."""
    result = {
        field: value for field, value in EVERYTHING.items() if field in OPTIMIZER_FIELDS[name]
    }
    if name in ("dp_corrmom", "dp_disk"):
        del result["momentum"]
    return result


def test_what_may_be_certified_can_be_trained() -> None:
    assert OPTIMIZERS.keys() == MECHANISMS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_from_its_state_bit_for_bit(name: str, run_of: Callable[..., Any]) -> None:
    whole, first, second = (run_of(name, everything(name)) for _ in range(3))
    expected = whole.take([1, 2, 3, 4, 5])
    first.take([1, 2])
    state = copy.deepcopy(first.optimizer.state_dict())
    for parameter, value in zip(second.parameters().values(), first.values().values(), strict=True):
        parameter.data.copy_(value)
    second.optimizer.load_state_dict(state)
    result = second.take([3, 4, 5])
    assert all(torch.equal(result[tensor], expected[tensor]) for tensor in expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_dict_survives_a_safe_file(
    name: str, run_of: Callable[..., Any], tmp_path: Any
) -> None:
    run, other = run_of(name), run_of(name)
    run.take([1])
    torch.save(run.optimizer.state_dict(), tmp_path / "state.pt")
    other.optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.optimizer.param_groups[0]["step"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_means_of_zero_move_nothing(name: str, run_of: Callable[..., Any]) -> None:
    run = run_of(name)
    before = run.values()
    for _ in range(3):
        for parameter in run.parameters().values():
            parameter.grad = torch.zeros_like(parameter)
        run.optimizer.step()
    after = run.values()
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)


@pytest.mark.parametrize("name", NAMES)
def test_the_means_themselves_are_left_alone(name: str, run_of: Callable[..., Any]) -> None:
    run = run_of(name, everything(name))
    run.take([1, 2, 3])
    assert all(
        torch.equal(parameter.grad, run.means(3)[tensor])
        for tensor, parameter in run.parameters().items()
    )


@pytest.mark.parametrize("name", NAMES)
def test_gradients_may_be_overwritten_after_a_step(name: str, run_of: Callable[..., Any]) -> None:
    """No state is the mean's own memory, which the loop uses again."""
    settings = {"momentum": 0.9} if "momentum" in OPTIMIZER_FIELDS[name] else {}
    fresh, reused = run_of(name, settings), run_of(name, settings)
    expected = fresh.take([1, 2, 3])
    for parameter in reused.parameters().values():
        parameter.grad = torch.zeros_like(parameter)
    for step in (1, 2, 3):
        for tensor, mean in reused.means(step).items():
            reused.parameters()[tensor].grad.copy_(mean)
        reused.optimizer.step()
    result = reused.values()
    assert all(torch.equal(result[tensor], expected[tensor]) for tensor in expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_needs_every_mean_and_else_changes_nothing(
    name: str, run_of: Callable[..., Any]
) -> None:
    run = run_of(name)
    run.take([1])
    before, last = run.values(), list(run.parameters().values())[-1]
    mean = last.grad
    for wrong in (None, torch.full_like(last, float("nan")), torch.full_like(last, torch.inf)):
        last.grad = wrong
        with pytest.raises(ValueError, match="mean"):
            run.optimizer.step()
    last.grad = mean
    with pytest.raises(ValueError, match="closure"):
        run.optimizer.step(lambda: 0.0)
    after = run.values()
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)
    assert {group["step"] for group in run.optimizer.param_groups} == {1}


@pytest.mark.parametrize("name", NAMES)
def test_no_step_is_taken_beyond_the_plan(name: str, run_of: Callable[..., Any]) -> None:
    run = run_of(name)
    steps = run.plan.phases[0].steps
    run.take(range(1, steps + 1))
    with pytest.raises(StepsExhausted, match=f"{steps} steps"):
        run.take([steps + 1])


def test_a_checkpoint_of_another_optimiser_is_refused(run_of: Callable[..., Any]) -> None:
    state = run_of("dp_adamw").optimizer.state_dict()
    with pytest.raises(ValueError, match="dp_adamw"):
        run_of("dp_adam").optimizer.load_state_dict(state)


def test_a_learning_rate_schedule_works_on_it(run_of: Callable[..., Any]) -> None:
    run, half = run_of("dp_sgd"), run_of("dp_sgd", {"learning_rate": 0.05})
    torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda _step: 0.5)
    result, expected = run.take([1]), half.take([1])
    assert all(torch.equal(result[tensor], expected[tensor]) for tensor in expected)


@pytest.mark.parametrize(
    ("name", "settings", "code"),
    [
        ("dp_sgd", {"learning_rate": None}, "missing_learning_rate"),
        ("dp_adambc", {"floor": 0}, "unsupported"),
        ("dp_adam_floor", {"floor": 0}, "unsupported"),
        ("dp_corrmom", {"momentum": 0.9, "beta1": 0.9}, "conflict"),
        ("dp_disk", {"momentum": 0.9, "beta2": 0.9}, "conflict"),
        ("dp_disk", {"combine": "after_clipping"}, "unsound_optimizer"),
        ("dp_disk", {"noise_divisor": "filter_norm"}, "unsound_optimizer"),
        ("dp_dice", {"error_clip_norm": None}, "unsound_optimizer"),
    ],
)
def test_what_has_no_certified_form_is_refused(
    name: str, settings: dict[str, Any], code: str, run_of: Callable[..., Any]
) -> None:
    with pytest.raises(RefusedPlan) as refusal:
        run_of(name, settings)
    assert [reason.code for reason in refusal.value.reasons] == [code]
    assert refusal.value.reasons[0].pointer.startswith("/optimizer/")
    assert refusal.value.reasons[0].remedy


@pytest.mark.parametrize("name", ["dp_adambc", "dp_muonbc"])
def test_adapted_clip_norms_are_refused_where_the_noise_must_be_known(
    name: str, run_of: Callable[..., Any]
) -> None:
    event = {"kind": "adaptive_clipping_quantile", "name": "norms", "noise_std": 10}
    with pytest.raises(RefusedPlan, match="beforehand"):
        run_of(name, extra=[event])
    run_of("dp_sgd", extra=[event])
    with pytest.raises(RefusedPlan, match="beforehand"):
        run_of("dp_sgd", {"denoise": True}, extra=[event])


@pytest.mark.parametrize(
    "tensor", [torch.zeros(0, 3), torch.zeros(2, 2, dtype=torch.bfloat16)], ids=["empty", "bf16"]
)
@pytest.mark.parametrize("name", ["dp_sgd", "dp_muon"])
def test_tensors_without_entries_or_digits_are_refused(
    name: str, tensor: torch.Tensor, plan_with: Callable[..., Plan]
) -> None:
    plan = plan_with(name)
    tensors = {
        release.name: {"odd": Parameter(tensor.clone())} for release in plan.phases[0].releases
    }
    with pytest.raises(ValueError, match="odd"):
        optimizer_of(optimizer_inputs(plan, tensors))


def test_releases_and_tensors_must_match(plan_with: Callable[..., Plan]) -> None:
    tensor = Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="releases"):
        optimizer_inputs(plan_with("dp_sgd"), {"other": {"w": tensor}})
    with pytest.raises(ValueError, match="no tensors"):
        optimizer_of(optimizer_inputs(plan_with("dp_sgd"), {"all": {}}))
    with pytest.raises(ValueError, match="strategy"):
        optimizer_inputs(plan_with("dp_corrsgd"), {"all": {"w": tensor}})
