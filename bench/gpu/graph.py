"""A private microbatch as one graph: a CUDA graph on a device, a traced one on the processor.

No Python of the trainer or the model runs when a graph is replayed, so nothing that Python decides
may change in between, and none of the trainer's checks is made: the benchmark holds both, and the
trainer itself runs every microbatch eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from affidavit.trainer.clipping import ghost_norm
from affidavit.trainer.clipping.private_model import PrivateModel

WARM_UP = 3
"""Passes before a capture, in which kernels are compiled and memory is found."""


def captured(
    private: PrivateModel, losses: Callable[..., Tensor], batch: tuple[Tensor, ...]
) -> tuple[Callable[..., None], dict[str, Tensor]]:
    """Return what replays a microbatch of other records, and the sums that it adds to.

    ``losses`` returns the losses, (n,), of tensors like those of ``batch``, each (n, ...). The sums
    have the shapes of their parameters.
    """
    private.clear_sums()
    if batch[0].is_cuda:
        return _captured(private, losses, batch)
    with (
        patch.object(ghost_norm, "PROCESSORS", frozenset()),
        patch.object(ghost_norm, "has_kernels", lambda _: True),
    ):  # the ways of a device, which read no value
        traced = traced_microbatch(private, losses, batch)
    private.clear_sums()
    sums = private.sums()

    def replay(*records: Tensor) -> None:
        with torch.no_grad():
            _, added = traced(*records)
            for name, total in sums.items():
                total.add_(added[name])

    return replay, sums


def _captured(
    private: PrivateModel, losses: Callable[..., Tensor], batch: tuple[Tensor, ...]
) -> tuple[Callable[..., None], dict[str, Tensor]]:
    run = partial(private.accumulate, lambda: losses(*batch), records=len(batch[0]))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    sums = private.sums()  # the graph adds to these tensors, in place
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        run()

    def replay(*records: Tensor) -> None:
        for item, new in zip(batch, records, strict=True):
            item.copy_(new, non_blocking=True)
        recorded.replay()

    return replay, sums


def traced_microbatch(
    private: PrivateModel, losses: Callable[..., Tensor], batch: tuple[Tensor, ...]
) -> GraphModule:
    """Return the graph from ``batch`` to the losses and clipped sums of a private microbatch.

    The graph has the operations of both passes and of clipping, in their order, so that no Python
    runs between them and the host reads no value.
    """

    def run(*batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        private.clear_sums()
        of_records = private.accumulate(lambda: losses(*batch), records=len(batch[0]))
        return of_records, private.sums()

    run(*batch)
    return make_fx(run)(*batch)


def launches_of(replay: Callable[..., None], records: tuple[Tensor, ...]) -> dict[str, int]:
    """Count what the host launches on a device in one replay, by the runtime's function."""
    counts: dict[str, int] = {}
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        replay(*records)
        torch.cuda.synchronize()
    events: Any = profile.events()
    for event in events:
        if event.name.startswith(("cudaLaunch", "cudaGraphLaunch", "cuLaunch")):
            counts[event.name] = counts.get(event.name, 0) + 1
    return counts
