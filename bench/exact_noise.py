"""Time exact grid noise against ordinary noise, as processor time per entry.

    python bench/exact_noise.py

Both add noise of one standard deviation to the same sums, alternating in one process on one
thread. The ratio is of medians, with the smallest and largest ratio of a turn. The last column
counts the entries that float64 leaves open and ball arithmetic decides.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import secrets
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from affidavit.trainer.noise import grid
from affidavit.trainer.noise.source import NoiseSource, TensorNoise

TURNS = 7
SIZES = (100_000, 1_000_000, 10_000_000)


def seconds(act: Callable[[], None]) -> float:
    """Return the processor time of ``act``."""
    began = time.process_time()
    act()
    return time.process_time() - began


def main() -> None:
    """Print one row for each size."""
    torch.set_num_threads(1)
    opened, settled = [0], grid._round_exactly

    def counted(*arguments: object) -> float:
        opened[0] += 1
        return settled(*arguments)  # type: ignore[arg-type]

    grid._round_exactly = counted  # type: ignore[assignment]
    sys.stdout.write("| entries | ordinary, ns each | exact, ns each | over ordinary | spread |")
    sys.stdout.write(" left open |\n|---|---|---|---|---|---|\n")
    for size in SIZES:
        tensors = {"w": TensorNoise(shape=(size,), scale=0.7)}
        key, sums, opened[0] = secrets.token_bytes(32), {"w": torch.randn(size)}, 0
        ordinary, exact = (NoiseSource(tensors, exact=which) for which in (False, True))
        for source in (ordinary, exact):
            source.add_to({"w": sums["w"].clone()}, key)
        times = [
            tuple(seconds(partial(source.add_to, sums, key)) for source in (ordinary, exact))
            for _ in range(TURNS)
        ]
        before, after = (statistics.median(column) for column in zip(*times, strict=True))
        ratios = [slow / fast for fast, slow in times]
        sys.stdout.write(
            f"| {size:,} | {before / size * 1e9:.1f} | {after / size * 1e9:.1f} | "
            f"{after / before:.2f} | {min(ratios):.2f}-{max(ratios):.2f} | "
            f"{opened[0]} of {(TURNS + 1) * size:,} |\n"
        )


if __name__ == "__main__":
    main()
