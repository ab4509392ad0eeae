"""Peers: the processes that train one run together, or one process alone.

Rank 0 keeps the run log and the checkpoints and draws every key; the others get what they
need from it. A lot is cut into disjoint shards by rank; clipped sums are added up over all
ranks, and every rank then adds the *same* noise to the same sum, drawn from the same key, so
that noise is in the result once. Parameters are compared across ranks by their digest, and a
rank that differs, or dies, stops all. (Where tensors are sharded, each rank has its own part of
sum and noise: ``affidavit.trainer.distributed.shards``.)

>>> Peers.alone().leads
True

``torchrun`` sets RANK and WORLD_SIZE; without them a process is alone.
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

# Its functions take the group that exists when it is imported as a default, and would keep it,
# with its threads, beyond ``leave``: a process with such threads may abort as it ends. Parts of
# torch import it late, so it comes first here, while there is no group.
import torch.distributed.nn.functional
from torch import Tensor

from affidavit.trainer.errors import RunFailure

T = TypeVar("T")

PATIENCE = timedelta(minutes=10)
"""How long a rank waits for the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """This process among those of its run."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def alone(cls, device: str = "cpu") -> Peers:
        """One process."""
        return cls(rank=0, size=1, device=torch.device(device))

    @classmethod
    def joined(cls, device: str) -> Peers:
        """The processes that ``torchrun`` started, or this one alone."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls.alone(device)
        if device == "cuda":
            place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(place)
        else:
            place = torch.device(device)
        if not dist.is_initialized():  # a script that shards its model has begun one
            dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=PATIENCE)
        return cls(rank=dist.get_rank(), size=dist.get_world_size(), device=place)

    @property
    def leads(self) -> bool:
        """Whether this process keeps the run log."""
        return self.rank == 0

    def leave(self) -> None:
        """End what ``joined`` began."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def add_up(self, sums: Mapping[str, Tensor]) -> None:
        """Replace each sum by that over all ranks, in place and with the same bits on each.

        Each has the shape of its parameter.
        """
        if self.size > 1:
            add_up(sums)

    def gathered(self, item: T) -> list[T]:
        """The plain data of all ranks, in their order."""
        result: list[Any] = [None] * self.size
        if self.size == 1:
            return [item]
        with while_all_live():
            dist.all_gather_object(result, item)
        return result

    def led(self, action: Callable[[], T]) -> T:
        """The result of ``action`` on rank 0, on every rank; a failure is raised on every rank.

        The result is plain data.

        Raises ``RunFailure`` on every rank where ``action`` did on rank 0.
        """
        if self.size == 1:
            return action()
        stated: list[Any] = [None]
        if self.leads:
            try:
                stated = [(True, action())]
            except RunFailure as failure:
                stated = [(False, (failure.code, str(failure)))]
        with while_all_live():
            dist.broadcast_object_list(stated, src=0)
        done, result = stated[0]
        if not done:
            raise RunFailure(*result)
        return result

    def require_same(self, digest: str) -> None:
        """Raise ``RunFailure`` unless ``digest`` is the same on all ranks that have one."""
        if len(set(filter(None, self.gathered(digest)))) > 1:
            raise RunFailure(
                "ranks_differ",
                "the parameters differ between ranks, so the run was stopped. Resume with --resume "
                "on identical machines.",
            )


def add_up(sums: Mapping[str, Tensor], group: Any = None) -> None:
    """Replace each sum by that over the ranks of ``group``, in place, with the same bits on each.

    Each has the shape of its parameter.
    """
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for item in sums.values():
        by_type.setdefault(item.dtype, []).append(item)
    for same in by_type.values():
        flat = torch.cat([entry.flatten() for entry in same])
        add_up_alike(flat, group)
        for target, part in zip(same, flat.split([item.numel() for item in same]), strict=True):
            target.copy_(part.view_as(target))


def add_up_alike(values: Tensor, group: Any = None) -> None:
    """Replace ``values`` by their sum over the ranks of ``group``, with the same bits on each.

    They have the same shape everywhere.
    """
    with while_all_live():
        # Both together send what an allreduce does, and every rank has the bits of the first.
        dist.reduce(values, group_dst=0, group=group)
        dist.broadcast(values, group_src=0, group=group)


@contextmanager
def while_all_live() -> Iterator[None]:
    """If a rank stops answering, end the run on all ranks; charged steps stay charged.

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
