"""Objects that behave as Opacus' do, by its names, so that the guard's logic is tested without it.

A model of one layer whose clipped sums are given instead of computed. What Opacus itself does
is tested in ``test_opacus.py``, with Opacus.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn, optim


class UniformWithReplacementSampler:
    """Opacus' Poisson sampler."""

    def __init__(self, *, num_samples: int, sample_rate: float) -> None:
        self.num_samples, self.sample_rate = num_samples, sample_rate
        self.steps = int(1 / sample_rate)

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            mask = torch.rand(self.num_samples) < self.sample_rate
            yield mask.nonzero().reshape(-1).tolist()


class Loader:
    """What the guard reads of a DPDataLoader."""

    def __init__(self, records: int, batch_size: int) -> None:
        self.dataset, self.num_workers = range(records), 0
        rate = 1 / -(-records // batch_size)
        self.batch_sampler: Any = UniformWithReplacementSampler(
            num_samples=records, sample_rate=rate
        )


class Engine:
    """A PrivacyEngine whose accountant is a list."""

    def __init__(self) -> None:
        self.accountant: list[Any] = []


class DPOptimizer:
    """Opacus' flat optimiser from the clipped sum on."""

    generator: Any = None
    loss_reduction = "mean"
    secure_mode = False
    accumulated_iterations = 1

    def __init__(self, module: nn.Module, sigma: float, clip: float, lot: int) -> None:
        self.original_optimizer: Any = optim.SGD(module.parameters(), lr=0.1)
        self.noise_multiplier, self.max_grad_norm, self.expected_batch_size = sigma, clip, lot
        self._step_skip_queue: list[bool] = []
        self._is_last_step_skipped = False

    @property
    def params(self) -> list[Any]:
        groups = self.original_optimizer.param_groups
        return [item for group in groups for item in group["params"] if item.requires_grad]

    def sums(self, value: float) -> None:
        """Clipped sums of one lot, all entries alike."""
        for param in self.params:
            param.summed_grad = torch.full_like(param, value)

    def signal_skip_step(self, do_skip: bool) -> None:
        self._step_skip_queue.append(do_skip)

    def add_noise(self) -> None:
        for param in self.params:
            std = self.noise_multiplier * self.max_grad_norm
            noise = torch.normal(0.0, std, param.shape, generator=self.generator)
            param.grad = param.summed_grad + noise
            param.summed_grad._processed = True

    def step(self, closure: Any = None) -> Any:
        if self._step_skip_queue and self._step_skip_queue.pop(0):
            self._is_last_step_skipped = True
            return None
        self.add_noise()
        for param in self.params:
            param.grad /= self.expected_batch_size
        self._is_last_step_skipped = False
        return self.original_optimizer.step(closure)


class DistributedDPOptimizer(DPOptimizer):
    """Of several processes."""
