"""Plans, releases and slow references of the optimisers.

A reference is written from the paper's equations, entry by entry in Python floats, and knows
nothing of the code that it is held against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from affidavit.mechanisms import Correlation, mechanism
from affidavit.mechanisms.strategies import Strategy
from affidavit.plan import Plan, plan_from
from affidavit.trainer.optimizers.base import DPOptimizer
from affidavit.trainer.optimizers.inputs import optimizer_inputs
from affidavit.trainer.optimizers.registry import optimizer_of

PROBE_KEY = bytes(range(32))
MUON = {"dp_muon", "dp_muonbc"}
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "all": {"weight": (4, 3), "wide": (3, 4), "bias": (5,), "scalar": ()},
    "hidden": {"tall": (4, 3), "wide": (3, 4), "square": (3, 3), "conv": (2, 3, 2)},
    "auxiliary": {"table": (6, 3), "bias": (5,)},
}


def strategies_of(plan: Plan) -> list[Strategy | None]:
    """What is injected in each phase."""
    return [
        None
        if phase.noise.kind == "independent"
        else Correlation(plan=plan, index=index).at(phase.steps or 0).strategy
        for index, phase in enumerate(plan.phases)
    ]


class Run:
    """An optimiser of a small plan, fed with means that are a function of the step alone."""

    def __init__(self, plan: Plan, *, dtype: torch.dtype = torch.float64, **performance: Any):
        self.plan, generator = plan, torch.Generator().manual_seed(5)
        names = [release.name for release in plan.phases[0].releases]
        self.tensors = {
            release: {
                name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
                for name, shape in SHAPES[release].items()
            }
            for release in names
        }
        inputs = optimizer_inputs(
            plan,
            self.tensors,
            strategies=strategies_of(plan),
            probe_key=PROBE_KEY if plan.optimizer.name == "dp_muonbc" else None,
            **performance,
        )
        self.optimizer: DPOptimizer = optimizer_of(inputs)

    def parameters(self) -> dict[str, nn.Parameter]:
        """All tensors by name."""
        return {
            f"{release}.{name}": tensor
            for release, tensors in self.tensors.items()
            for name, tensor in tensors.items()
        }

    def means(self, step: int) -> dict[str, Tensor]:
        """G̃ of a step from 1."""
        generator = torch.Generator().manual_seed(1000 + step)
        return {
            name: 0.3 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            for name, tensor in self.parameters().items()
        }

    def take(self, steps: Sequence[int]) -> dict[str, Tensor]:
        """The tensors after these steps."""
        for step in steps:
            for name, mean in self.means(step).items():
                self.parameters()[name].grad = mean
            self.optimizer.step()
        return self.values()

    def values(self) -> dict[str, Tensor]:
        """Copies of the tensors."""
        return {name: tensor.detach().clone() for name, tensor in self.parameters().items()}


def plan_for(name: str, settings: Mapping[str, Any] | None = None, **changes: Any) -> Plan:
    """The mechanism's own example with an optimiser's fields given."""
    document = mechanism(name).minimal_plan()  # type: ignore[arg-type]
    optimizer = {**document.get("optimizer", {}), "name": name, "learning_rate": 0.1}
    return plan_from(
        {**document, "steps": 12, **changes, "optimizer": {**optimizer, **(settings or {})}}
    )


@pytest.fixture(scope="session")
def plan_with() -> Callable[..., Plan]:
    """``plan_for``."""
    return plan_for


@pytest.fixture(scope="session")
def run_of() -> Callable[..., Run]:
    """``Run`` of ``plan_for``; ``performance`` is passed on to the optimiser."""

    def make(
        name: str,
        settings: Mapping[str, Any] | None = None,
        *,
        dtype: torch.dtype = torch.float64,
        performance: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Run:
        return Run(plan_for(name, settings, **changes), dtype=dtype, **(performance or {}))

    return make
