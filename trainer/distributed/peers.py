"""Peers: the processes that train one run together, or a single process.

Rank 0 writes the run log and the checkpoints and draws all keys; it sends the others what they
need. A lot is cut into disjoint shards by rank. Clipped sums are added over all
ranks, and each rank then adds the *same* noise to the same sum, drawn from the same key, so
that the result includes the noise once. Ranks compare the digests of their parameters; if one
differs or dies, all stop. (If tensors are sharded, each rank has its own part of
sum and noise: ``affidavit.trainer.distributed.shards``.)

>>> Peers.alone().is_leader
True

``torchrun`` sets RANK and WORLD_SIZE; without them, a process is alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# This module captures the process group that exists when it is imported as a default argument, and
# keeps it, with its threads, beyond ``leave``; a process with such threads may abort at its end.
# Parts of torch import it late, so it is imported here, before there is a group.
import torch.distributed.nn.functional
from torch import Tensor

from affidavit.trainer.errors import RunFailure

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """This process among the processes of its run."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def alone(cls, device: str = "cpu") -> Peers:
        """Return a single process."""
        return cls(rank=0, size=1, device=torch.device(device))

    @classmethod
    def join(cls, device: str) -> Peers:
        """Join the processes that ``torchrun`` started, or return this one alone."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls.alone(device)
        if device == "cuda":
            place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(place)
        else:
            place = torch.device(device)
        if not dist.is_initialized():  # a script that shards its model has initialized it
            dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
        return cls(rank=dist.get_rank(), size=dist.get_world_size(), device=place)

    @property
    def is_leader(self) -> bool:
        """Whether this process writes the run log."""
        return self.rank == 0

    def leave(self) -> None:
        """Leave the processes that ``join`` joined."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def all_reduce(self, sums: Mapping[str, Tensor]) -> None:
        """Replace each sum by its sum over all ranks, in place, bitwise equal on all ranks.

        Each has the shape of its parameter.
        """
        if self.size > 1:
            all_reduce(sums)

    def gather(self, item: T) -> list[T]:
        """Return the plain data of all ranks, in their order."""
        result: list[Any] = [None] * self.size
        if self.size == 1:
            return [item]
        with lost_ranks_reported():
            dist.all_gather_object(result, item)
        return result

    def run_on_leader(self, action: Callable[[], T]) -> T:
        """Return the result of ``action`` on rank 0, plain data, on every rank.

        Raises ``RunFailure`` on every rank if ``action`` raises it on rank 0.
        """
        if self.size == 1:
            return action()
        outcome: list[Any] = [None]
        if self.is_leader:
            try:
                outcome = [(True, action())]
            except RunFailure as failure:
                outcome = [(False, (failure.code, str(failure)))]
        with lost_ranks_reported():
            dist.broadcast_object_list(outcome, src=0)
        succeeded, result = outcome[0]
        if not succeeded:
            raise RunFailure(*result)
        return result

    def require_same(self, digest: str) -> None:
        """Raise ``RunFailure`` unless ``digest`` is the same on all ranks that have one."""
        if len(set(filter(None, self.gather(digest)))) > 1:
            raise RunFailure(
                "ranks_differ",
                "the parameters differ between ranks, so the run was stopped. Resume with --resume "
                "on identical machines.",
            )


def all_reduce(sums: Mapping[str, Tensor], group: Any = None) -> None:
    """Replace each sum by its sum over ``group``, in place, bitwise equal on all ranks.

    Each has the shape of its parameter.
    """
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for item in sums.values():
        by_type.setdefault(item.dtype, []).append(item)
    for same in by_type.values():
        flat = torch.cat([entry.flatten() for entry in same])
        all_reduce_identical(flat, group)
        for target, part in zip(same, flat.split([item.numel() for item in same]), strict=True):
            target.copy_(part.view_as(target))


def all_reduce_identical(values: Tensor, group: Any = None) -> None:
    """Replace ``values`` by their sum over ``group``, bitwise equal on all ranks.

    They have the same shape on all ranks.
    """
    with lost_ranks_reported():
        # Together these send as much as an all-reduce, and every rank gets the bits of rank 0.
        dist.reduce(values, group_dst=0, group=group)
        dist.broadcast(values, group_src=0, group=group)


@contextmanager
def lost_ranks_reported() -> Iterator[None]:
    """Report a rank that stops responding; charged steps stay charged.

    Raises ``RunFailure``.
    """
    try:
        yield
    except RuntimeError as error:
        raise RunFailure(
            "rank_lost",
            f"another rank stopped responding ({str(error).splitlines()[0]}). Resume with "
            "--resume.",
        ) from None
