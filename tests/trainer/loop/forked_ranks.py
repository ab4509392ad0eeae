"""Run a rank of the small run, or torchrun with its ranks, as forked processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from affidavit.trainer.distributed import ranks


def prepare() -> None:
    """Import what ranks and torchrun do; that reads its level of messages as it is imported."""
    os.environ["LOGLEVEL"] = "CRITICAL"
    for name in ("torch.distributed.run", "tests.trainer.loop.rank", "torch._dynamo"):
        import_module(name)


def main(arguments: Sequence[str]) -> None:
    """``rank FOLDER …``, or ``ranks N COMMAND…`` as the child of a worker."""
    kind, *rest = arguments
    if kind == "ranks":
        os.environ["AFFIDAVIT_LAUNCHER"] = str(os.getpid())
        ranks.exit_like_rank(ranks.main(rest))
    sys.argv = [kind, *rest]
    import_module("tests.trainer.loop.rank").main()
