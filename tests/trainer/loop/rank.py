"""One rank of a run of the small plan, as ``torchrun`` starts it: folder, bundle, what to do.

``die N`` has rank 1 end in its N-th lot; ``stray`` has it move one of its parameters; ``canaries``
is a small run with canaries instead.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from affidavit.plan import Plan
from affidavit.trainer import mlp
from affidavit.trainer.distributed.peers import Peers
from affidavit.trainer.errors import RunFailure
from affidavit.trainer.loop import train
from affidavit.trainer.settings import Settings
from affidavit.trust import read_public_keys
from tests.support.trust import trusting
from tests.trainer.loop.small_run import MadeUpData, SmallModel, entropy_of, plan_with


class Watched(MadeUpData):
    """Data that writes down which records this rank reads, and may end it or move ``stray``."""

    def __init__(self, folder: Path, rank: int, die: int | None, stray: SmallModel | None) -> None:
        super().__init__()
        self.path, self.die, self.stray = folder / f"read.{rank}", die, stray

    def collate(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self.asked) == self.die:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.stray is not None and len(self.asked) > 2:
            with torch.no_grad():
                self.stray.module[0].weight[0, 0] += 1
        with self.path.open("a") as stream:
            stream.write(" ".join(map(str, indices.tolist())) + "\n")
        return super().collate(indices)


def threads_of_peers() -> list[str]:
    """Threads of this process that still belong to a group of processes."""
    names = [task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return [name.strip() for name in names if "gloo" in name]


def main() -> None:
    """Train, and write the parameters of every rank."""
    folder, what = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    peers = Peers.join("cpu")
    die = int(what[1]) if what[:1] == ["die"] and peers.rank else None
    model: Any = SmallModel(seed=5 + peers.rank)
    stray = model if what[:1] == ["stray"] and peers.rank else None
    plan: Plan = plan_with()
    data: Any = Watched(folder, peers.rank, die, stray)
    if what == ["canaries"]:
        from tests.trainer.audit import test_canaries

        plan, data = test_canaries.FEW, test_canaries.POINTS
        model = mlp("4,seed=1,blocks=all", data)
    try:
        train(
            bundle=(folder / "bundle.json").read_bytes(),
            trusted=trusting(read_public_keys(folder / "keys.json")),
            plan=plan,
            data=data,
            model=model,
            out=folder / "run",
            settings=Settings(device="cpu", microbatch=4),
            quiet=True,
            peers=peers,
            entropy=entropy_of(1),
        )
    except RunFailure as failure:
        (folder / f"failure.{peers.rank}").write_text(failure.code)
        raise SystemExit(1) from None
    finally:
        peers.leave()
    (folder / f"threads.{peers.rank}").write_text(" ".join(threads_of_peers()))
    torch.save(model.module.state_dict(), folder / f"values.{peers.rank}")


if __name__ == "__main__":
    main()
