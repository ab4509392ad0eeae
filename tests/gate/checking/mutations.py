"""Plans mutated at random, and an oracle of its own for what they really cost.

The oracle reads the mutated document itself, joins a step's blocks into one release and asks
dp_accounting's optimistic privacy loss distribution, or the closed form of the Gaussian where
nothing is amplified: a *lower* bound of ε. A plan whose target lies below it is under-noised,
whatever anybody's accountant says, and the gate must not end with 0.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.optimize import brentq
from scipy.special import log_ndtr
from typer.testing import CliRunner

from affidavit.gate.cli import app

SIZE = 10_000
COARSEST, OPTIMISM = 1e-3, 0.3

Document = dict[str, Any]


def draw(source: random.Random) -> Document:
    """A plan near the edge of its target, then one or two of its fields changed."""
    plan: Document = {
        "version": 1,
        "dataset": {"size": SIZE},
        "adjacency": "add_remove",
        "sampling": {"scheme": "poisson", "lot_size": source.choice([50, 200, 1000])},
        "steps": source.choice([10, 100, 600]),
        "releases": [
            {
                "name": f"block{index}",
                "count": source.choice([1, 1, 4, 12]),
                "clip_norm": round(source.uniform(0.1, 2), 2),
                "noise_multiplier": round(math.exp(source.uniform(0.3, 2)), 4),
            }
            for index in range(source.choice([1, 1, 2, 3]))
        ],
        "target": {"epsilon": 1.0, "delta": 1e-5},
    }
    truth = least_epsilon(plan)
    plan["target"]["epsilon"] = round(max(0.05, truth * source.uniform(0.97, 1.15)), 6)
    for _ in range(source.choice([0, 1, 1, 2])):
        mutate(plan, source)
    return plan


def mutate(plan: Document, source: random.Random) -> None:
    """Change one field, for better or worse."""
    release = source.choice(plan["releases"])
    match source.randrange(8):
        case 0:
            noise = "noise_std" if "noise_std" in release else "noise_multiplier"
            release[noise] *= source.choice([0.5, 0.9, 0.999, 1.001, 1.1])
        case 1:
            release["count"] += source.choice([1, 5])
        case 2:
            plan["steps"] = int(plan["steps"] * source.choice([0.5, 1.01, 2])) + 1
        case 3:
            plan["sampling"]["lot_size"] = min(SIZE, plan["sampling"]["lot_size"] * 2)
        case 4:
            plan["sampling"] = {"scheme": "shuffled", "lot_size": plan["sampling"]["lot_size"]}
            plan["adjacency"] = "zero_out"
        case 5:
            release["clip_norm"] *= 3
            if source.random() < 0.5:
                release["noise_std"] = release.pop("noise_multiplier", release.get("noise_std"))
        case 6:
            plan["target"]["delta"] = source.choice([1e-4 * 0.9, 1e-7])
        case _:
            plan["target"]["epsilon"] *= source.choice([0.5, 0.99, 1.01, 2])


def least_epsilon(plan: Document) -> float:
    """A lower bound of the plan's ε at its δ, from nothing of the product."""
    inverse_square = 0.0
    for release in plan["releases"]:
        sigma = release.get("noise_multiplier")
        if sigma is None:
            sigma = release["noise_std"] / release["clip_norm"]
        inverse_square += release.get("count", 1) / sigma**2
    joint, delta = inverse_square**-0.5, plan["target"]["delta"]
    lot, steps = plan["sampling"]["lot_size"], plan["steps"]
    if plan["sampling"]["scheme"] == "shuffled":
        # The most a record can take part, less one for the last epoch, which may not be whole.
        turns = max(1, steps // math.ceil(SIZE / lot))
        return _gaussian(math.sqrt(turns) / joint, delta)
    if lot == SIZE:
        return _gaussian(math.sqrt(steps) / joint, delta)
    step = pld.from_gaussian_mechanism(
        joint,
        sampling_prob=lot / SIZE,
        pessimistic_estimate=False,
        use_connect_dots=False,
        value_discretization_interval=min(COARSEST, OPTIMISM / steps),
    )
    return float(step.self_compose(steps).get_epsilon_for_delta(delta))


def _gaussian(mu: float, delta: float) -> float:
    def excess(epsilon: float) -> float:
        first = math.exp(log_ndtr(mu / 2 - epsilon / mu))
        return float(first - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)) - delta)

    return 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0.0, mu * mu + 40 * mu)) * (1 - 1e-9)


def let_through(plan: Document, folder: Path) -> bool:
    """Whether the gate ends with 0 for ``plan``."""
    file = folder / "plan.json"
    file.write_text(json.dumps(plan))
    return CliRunner().invoke(app, ["check", "--no-cache", str(file)]).exit_code == 0


def wrong(source: random.Random, folder: Path) -> Iterator[str]:
    """What the gate did wrong with one mutated plan."""
    plan = draw(source)
    if least_epsilon(plan) > plan["target"]["epsilon"] and let_through(plan, folder):
        yield f"under-noised and let through: {json.dumps(plan)}"


def main(arguments: list[str]) -> int:
    """Mutate without end, or with a seed and a number.

    python -m tests.gate.checking.mutations [SEED [NUMBER]]
    """
    seed = int(arguments[0]) if arguments else secrets.randbits(32)
    number = int(arguments[1]) if len(arguments) > 1 else None
    source = random.Random(seed)
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for index in itertools.count(1) if number is None else range(1, number + 1):
            for line in wrong(source, Path(folder)):
                failures += 1
                sys.stdout.write(f"seed {seed}, plan {index}: {line}\n")
            if index % 100 == 0:
                sys.stdout.write(f"{index} plans, {failures} let through\n")
                sys.stdout.flush()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
