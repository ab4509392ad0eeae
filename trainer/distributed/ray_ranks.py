"""``python -m affidavit.trainer.distributed.ray_ranks HOSTS N COMMAND…``: N ranks per Ray node.

On each of HOSTS nodes, an actor runs torchrun (``ranks``), and the ranks meet at a
port of the first node. They share one output folder and one Python, by the same paths. If
ranks of a node die, or the node does, the other ranks report a lost rank and end. This process
then ends like the rank that failed, or can be resumed. If this process is killed, Ray ends its
actors, and the kernel ends their ranks.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
from typing import Any

from affidavit.trainer.distributed.ranks import UNFINISHED, USAGE, exit_like_rank

GRACE_SECONDS = 60.0
"""Seconds for the ranks of other nodes to end after a failure."""
CHILD = ("-m", "affidavit.worker.exec_with_parent")
"""Ends with the process that started it."""


class Host:
    """An actor that runs torchrun on one node."""

    def find_address(self) -> tuple[str, int]:
        """Return an address of this node and a free port for the ranks to meet."""
        ray: Any = importlib.import_module("ray")
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def run(self, python: str, words: list[str], folder: str, log: str) -> int:
        """Run torchrun in ``folder`` to its end, and return its exit code."""
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [python, *CHILD, str(os.getpid()), python, *words],
                cwd=folder,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )
            return process.wait()


def main(arguments: list[str]) -> int:
    """Run the ranks to their end, and return the exit code of the one that failed, or 0."""
    numbers, command = arguments[:2], arguments[2:]
    if not command or not all(word.isdecimal() and int(word) > 0 for word in numbers):
        sys.stderr.write(
            "usage: python -m affidavit.trainer.distributed.ray_ranks HOSTS N COMMAND...\n"
        )
        return USAGE
    hosts, processes = map(int, numbers)
    ray: Any = importlib.import_module("ray")
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    gpus = 0 if "--device=cpu" in command or not ray.cluster_resources().get("GPU") else processes
    share = {"CPU": 1, **({"GPU": gpus} if gpus else {})}
    group = ray.util.placement_group([share] * hosts, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    strategy: Any = importlib.import_module("ray.util.scheduling_strategies")
    actors = [
        ray.remote(Host)
        .options(
            num_cpus=1,
            num_gpus=gpus,
            scheduling_strategy=strategy.PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
        )
        .remote()
        for index in range(hosts)
    ]
    address, port = ray.get(actors[0].find_address.remote())
    ranks = ["-m", "affidavit.trainer.distributed.ranks", str(processes), f"--nnodes={hosts}"]
    find_address = [f"--master-addr={address}", f"--master-port={port}"]
    folder, log = os.getcwd(), os.path.realpath("/proc/self/fd/2")
    runs = []
    for index, actor in enumerate(actors):
        words = [*ranks, f"--node-rank={index}", *find_address, *command]
        runs.append(actor.run.remote(sys.executable, words, folder, log))
    codes = _wait_for_codes(ray, runs)
    ray.shutdown()
    failed = [code for code in codes if code]
    return next((code for code in failed if code != UNFINISHED), failed[0] if failed else 0)


def _wait_for_codes(ray: Any, runs: list[Any]) -> list[int]:
    """Wait for all exit codes; after a failure, the others get ``GRACE_SECONDS`` seconds to end."""
    codes: list[int] = []
    until = float("inf")
    while runs and time.monotonic() < until:
        done, runs = ray.wait(runs, num_returns=1, timeout=0.5)
        for one in done:
            try:
                codes.append(ray.get(one))
            except ray.exceptions.RayError:
                codes.append(UNFINISHED)  # the node is lost
            if codes[-1] and until == float("inf"):
                until = time.monotonic() + GRACE_SECONDS
    return codes + [UNFINISHED] * len(runs)


if __name__ == "__main__":
    exit_like_rank(main(sys.argv[1:]))
