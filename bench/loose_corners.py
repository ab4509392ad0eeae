"""Measure how far apart the two ends of ε are, on random plans of every kind.

    python bench/loose_corners.py [--minutes N] [--plans N] [--only TEXT] [--realistic]

A cell is a sampling scheme, a privacy unit, an adjacency and a kind of noise. Schemes and kinds
are those of the registries, so that a new one is measured without a change here. ``--plans`` is
the number of plans of each cell; ``--only`` keeps the cells whose name contains the text. Noise is
drawn until ε can lie between 0.1 and 20. ``--realistic`` draws plans as people train with, with
published strategies and an upper end between 0.5 and 10. Both ends meet in a plan if they are at
most a percent apart; elsewhere the lower end is what a test of the released outputs shows, and the
upper end a bound. Cells are measured in an order of their own, so that those of the first
``--minutes`` are a sample of all. Progress goes to the standard error.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any, get_args

from affidavit.assessment import certify
from affidavit.mechanisms.sampling_schemes import SCHEMES
from affidavit.plan import MalformedPlan, plan_from
from affidavit.plan.strategies import FORMS
from affidavit.plan.vocabulary import ONE_LOT_PER_EPOCH, REQUIRED_FIELDS, Adjacency, PrivacyUnit

SEED = 52
SMALLEST, LARGEST = 0.1, 20.0
"""The range of ε. A plan counts if its bracket meets it."""
REALISTIC = 0.5, 10.0
"""The range of the upper end of realistic plans."""
TRIES = 3
"""Noise multipliers that are tried for a plan, and plans for a cell before it counts as refused."""
SECONDS = 6.0
"""Time limit for one bracket, of the processor."""
WORST = 5
"""Widest plans that are listed."""

Draw = random.Random
Cell = tuple[str, str, str, str]
"""Scheme, unit, adjacency and kind of noise."""


def log_uniform(draw: Draw, low: float, high: float) -> float:
    """Return a number whose logarithm is uniform."""
    return math.exp(draw.uniform(math.log(low), math.log(high)))


NOISE: dict[str, Callable[[Draw, int], dict[str, Any]]] = {
    "bidiagonal": lambda draw, _: {"lambda": round(draw.uniform(0.3, 0.999), 3)},
    "toeplitz": lambda draw, _: {"coefficients": falling(draw, 1.0)},
    "toeplitz_inverse": lambda draw, _: {"coefficients": falling(draw, -0.5)},
    "bsr": lambda draw, _: {"bands": draw.choice((2, 4, 16, 64))},
    "bisr": lambda draw, _: {"bands": draw.choice((2, 4, 16))},
    "banded_inverse": lambda draw, _: {"bands": draw.choice((2, 4, 8))},
    "banded": lambda draw, _: {"bands": draw.choice((2, 4, 8))},
    "blt": lambda draw, _: {
        "decays": [round(1 - log_uniform(draw, 1e-3, 0.1), 4), round(draw.uniform(0.3, 0.85), 3)],
        "scales": [round(draw.uniform(0.02, 0.15), 3), round(draw.uniform(0.1, 0.4), 3)],
    },
    "matrix": lambda draw, steps: {"rows": decaying_rows(steps, round(draw.uniform(0.0, 0.9), 2))},
}
"""Parameters of a kind of noise. Kinds that are not here are drawn as their form's example."""
MAX_STEPS = {"dense": 128, "matrix": 64, "banded": 2000, "banded_inverse": 2000}
"""Steps of kinds whose strategy is optimised, or given in full."""


def falling(draw: Draw, scale: float) -> list[float]:
    """Return a first coefficient of 1 and some that fall in size, of the sign of ``scale``."""
    rate = draw.uniform(0.2, 0.9)
    return [1.0, *(round(scale * rate**at, 4) for at in range(1, draw.randint(2, 9)))]


def decaying_rows(steps: int, rate: float) -> list[list[float]]:
    """Return N of AR(1) noise."""
    return [[-rate * (i == j + 1) + (i == j) for j in range(steps)] for i in range(steps)]


PUBLISHED: dict[str, Callable[[Draw, int], dict[str, Any]]] = {
    "independent": lambda *_: {},
    "banded": lambda draw, _: {"bands": draw.choice((4, 16, 64))},
    "banded_inverse": lambda draw, _: {"bands": draw.choice((2, 4, 8))},
    "bsr": lambda draw, _: {"bands": draw.choice((4, 16, 64))},
    "bisr": lambda draw, _: {"bands": draw.choice((2, 4, 16))},
    "blt": lambda draw, _: {"buffers": draw.choice((2, 3))},
    "tree": lambda *_: {},
}
"""Parameters of published strategies, as they are recommended."""


SAMPLING: dict[str, Callable[[Draw, int, int], int]] = {
    "max_lot_size": lambda draw, _, lot: math.ceil(lot + draw.uniform(0.0, 6.0) * math.sqrt(lot)),
    "groups": lambda draw, size, lot: draw.randint(2, max(2, min(100, size // lot))),
    "separation": lambda draw, size, lot: draw.randint(2, max(2, min(100, size // lot))),
}
"""Values of the field that a scheme requires, by the sizes of the data set and of a lot."""


def cells() -> list[Cell]:
    """Return every cell."""
    kinds = [kind for form in FORMS for kind in form.kinds()]
    return [*product(SCHEMES, get_args(PrivacyUnit), get_args(Adjacency), kinds)]


def random_plan(draw: Draw, cell: Cell) -> dict[str, Any]:
    """Return a plan of ``cell``, whose noise multiplier is a first guess."""
    kind = cell[3]
    size = round(log_uniform(draw, 1e3, 1e7))
    lot = max(1, round(size * log_uniform(draw, max(1e-5, 1 / size), 0.3)))
    steps = round(log_uniform(draw, 10, min(2e4, MAX_STEPS.get(kind, 2e4))))
    delta = float(f"{log_uniform(draw, 1e-10, 1e-5):.1e}")
    records = min(round(log_uniform(draw, 2, 30)), lot)
    noise = NOISE[kind](draw, steps) if kind in NOISE else {}
    return _document(draw, cell, size, lot, steps, delta, records, noise)


def realistic_plan(draw: Draw, cell: Cell) -> dict[str, Any]:
    """Return a plan as people train with, of a cell whose kind of noise is in ``PUBLISHED``.

    Lots have 256 to 16,384 records, at most a twentieth of them all, training takes 1 to 60 epochs
    and 100 to 20,000 steps, users have 2 to 10 records, and δ is below 1/N.
    """
    kind = cell[3]
    most = min(2e4, MAX_STEPS.get(kind, 2e4))
    while True:
        size = round(log_uniform(draw, 2e4, 1e7))
        lot = round(log_uniform(draw, 256, min(16384, size / 20)))
        steps = round(log_uniform(draw, 1, 60) * size / lot)
        if 100 <= steps <= most:
            break
    delta = float(f"{size**-1.1:.1e}")
    records = round(log_uniform(draw, 2, 10))
    noise = PUBLISHED[kind](draw, steps)
    result = _document(draw, cell, size, lot, steps, delta, records, noise)
    # Strategies with bands are made for as many steps between participations.
    turn = REQUIRED_FIELDS.get(cell[0])
    if turn in ("groups", "separation") and kind in ("banded", "bsr"):
        result["sampling"][turn] = min(noise["bands"], size // lot)
    return result


def _document(
    draw: Draw,
    cell: Cell,
    size: int,
    lot: int,
    steps: int,
    delta: float,
    records: int,
    parameters: dict[str, Any],
) -> dict[str, Any]:
    """Return a plan with these values, whose noise multiplier is a first guess."""
    scheme, unit, adjacency, kind = cell
    form = next(form for form in FORMS if kind in form.kinds())
    example = next(one for one in form.examples if one["kind"] == kind) if form.examples else {}
    noise = {"kind": kind, **parameters} if parameters else {**example, "kind": kind}
    sampling: dict[str, Any] = {"scheme": scheme}
    if scheme == "random_allocation":
        sampling["participations"] = max(1, round(steps * lot / size))
    elif scheme != "full_batch":
        sampling["lot_size"] = lot
    name = REQUIRED_FIELDS.get(scheme)
    if name in SAMPLING:
        sampling[name] = SAMPLING[name](draw, size, lot)
    dataset: dict[str, Any] = {"size": size}
    if unit == "user":
        dataset |= {"unit": "user", "contributions_per_user": records}
    rate = 1.0 if scheme == "full_batch" else lot / size
    drawn = steps * (rate if scheme in ONE_LOT_PER_EPOCH else rate**2)
    guess = math.sqrt(2 * math.log(1 / delta) * max(drawn, 0.05)) / log_uniform(draw, 0.3, 10)
    return {
        "version": 1,
        "adjacency": adjacency,
        "dataset": dataset,
        "sampling": sampling,
        "steps": steps,
        "noise": noise,
        "releases": [{"name": "all", "clip_norm": 1.0, "noise_multiplier": float(f"{guess:.3g}")}],
        "target": {"delta": delta},
    }


def state_participation(document: dict[str, Any]) -> None:
    """Add the pattern of lots in a new order each epoch, where the plan must state it."""
    lots = document["dataset"]["size"] // document["sampling"]["lot_size"]
    document["participation"] = {
        "schema": "min_separation",
        "participations": -(-document["steps"] // lots),
        "separation": 1,
    }


@dataclass(kw_only=True, slots=True)
class Measured:
    """The widths of the accepted plans of a row, and why others were refused."""

    widths: list[tuple[float, float, float, dict[str, Any]]] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


class TooSlow(Exception):
    """A bracket took longer than ``SECONDS``."""


TOO_SLOW = f"over {SECONDS:.0f} s"


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TooSlow`` after ``seconds``."""

    def stop(*_: Any) -> None:
        raise TooSlow

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def bracket(document: dict[str, Any]) -> tuple[float, float] | str:
    """Return both ends of ε, or a code why there are none."""
    try:
        with time_limit(SECONDS):
            result = certify(plan_from(document), second_opinion=False)
    except TooSlow:
        return TOO_SLOW
    except MalformedPlan as error:
        return error.reasons[0].code
    if result.epsilon is None:
        return result.reasons[0].code if result.reasons else "none"
    return result.epsilon.lower, result.epsilon.upper


def measure(draw: Draw, cell: Cell, into: Measured, *, realistic: bool = False) -> None:
    """Draw plans of ``cell`` until one is accepted with ε in range, and put it ``into``."""
    code = ""
    for _ in range(TRIES):
        document = (realistic_plan if realistic else random_plan)(draw, cell)
        (release,) = document["releases"]
        if code == TOO_SLOW:
            break
        for _ in range(TRIES):
            found = bracket(document)
            if found == "reshuffled_epochs":
                state_participation(document)
                found = bracket(document)
            if isinstance(found, str):
                code = found
                break
            lower, upper = found
            middle = max(upper, 1e-9)
            if not realistic:
                middle = math.sqrt(max(lower, upper * 1e-3, 1e-9) * middle)
            least, most = REALISTIC if realistic else (SMALLEST, LARGEST)
            if least <= upper and (upper if realistic else lower) <= most:
                ratio = upper / lower if lower > 0 else math.inf
                into.widths.append((ratio, lower, upper, document))
                return
            code = "out of range"
            # ε falls about as fast as the noise rises, or as its square where it is large.
            factor = (middle / math.sqrt(least * most)) ** (0.55 if middle > 1 else 0.9)
            release["noise_multiplier"] = float(f"{release['noise_multiplier'] * factor:.3g}")
    into.refused[code] += 1


def described(document: dict[str, Any]) -> str:
    """Return the parameters of a plan in one line."""
    sampling, noise, dataset = document["sampling"], document["noise"], document["dataset"]
    parts = [f"N = {dataset['size']}"]
    parts += [f"B = {sampling['lot_size']}"] if "lot_size" in sampling else []
    parts += [f"{name.split('_')[0]} {sampling[name]}" for name in SAMPLING if name in sampling]
    parts += [f"T = {document['steps']}", f"σ = {document['releases'][0]['noise_multiplier']:g}"]
    parts += [f"δ = {document['target']['delta']:g}"]
    if "contributions_per_user" in dataset:
        parts.append(f"m = {dataset['contributions_per_user']}")
    rows = noise.get("rows")
    values = [noise["kind"]] if rows else [str(value) for value in noise.values()]
    return ", ".join([*parts, " ".join(values)])


def rounded(ratio: float) -> str:
    """Return a ratio with three digits."""
    return "no lower end" if math.isinf(ratio) else f"{ratio:.3g}"


def print_report(measured: dict[Cell, Measured], cell_count: int) -> None:
    """Print the widths by scheme and noise, the refusals, and the widest plans."""
    rows: dict[tuple[str, ...], Measured] = defaultdict(Measured)
    for scheme, unit, adjacency, kind in sorted(measured):
        noise = "independent" if kind == "independent" else "correlated"
        row, of_cell = rows[scheme, unit, adjacency, noise], measured[scheme, unit, adjacency, kind]
        row.widths += of_cell.widths
        row.refused += of_cell.refused
    out = sys.stdout.write
    out(f"{len(measured)} of {cell_count} cells.\n\n")
    out("| scheme | noise | plans | ends meet | medians | largest |\n|---|---|---|---|---|---|\n")
    ratios: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for (scheme, _unit, _adjacency, noise), row in rows.items():
        if row.widths:
            ratios[scheme, noise].append([width[0] for width in row.widths])
    for key, groups in ratios.items():
        medians = sorted(map(statistics.median, groups))
        ends = " to ".join(dict.fromkeys(map(rounded, (medians[0], medians[-1]))))
        largest = rounded(max(map(max, groups)))
        plans = [ratio for group in groups for ratio in group]
        meet = sum(ratio <= 1.01 for ratio in plans)
        out(f"| {' | '.join(key)} | {len(plans)} | {meet} | {ends} | {largest} |\n")
    refused: dict[str, Counter[str]] = defaultdict(Counter)
    for key, row in rows.items():
        for code, count in row.refused.items():
            refused[code][key[0]] += count
    out("\nRefused, or not measured:\n\n| code | plans |\n|---|---|\n")
    for code, schemes in sorted(refused.items()):
        out(f"| {code} | {', '.join(f'{name} {count}' for name, count in schemes.items())} |\n")
    every = [(width, key) for key, row in rows.items() for width in row.widths]
    every.sort(key=lambda pair: -pair[0][0])
    out("\nThe widest:\n\n| ends apart | ε | scheme, unit, adjacency | plan |\n|---|---|---|---|\n")
    for (ratio, lower, upper, document), key in every[:WORST]:
        out(
            f"| {rounded(ratio)} | [{lower:.4g}, {upper:.4g}] | {', '.join(key[:3])} "
            f"| {described(document)} |\n"
        )


def main() -> None:
    """Measure every cell and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="when no other cell is begun")
    parser.add_argument("--plans", type=int, default=1, help="plans of each cell")
    parser.add_argument("--only", default="", help="cells whose name contains this text")
    parser.add_argument("--realistic", action="store_true", help="draw plans as people train with")
    options = parser.parse_args()
    chosen = [cell for cell in cells() if options.only in " ".join(cell)]
    if options.realistic:
        chosen = [cell for cell in chosen if cell[3] in PUBLISHED]
    chosen.sort(key=lambda cell: random.Random(str(cell)).random())
    measured: dict[Cell, Measured] = {}
    began = time.monotonic()
    for cell in chosen:
        if time.monotonic() - began > 60 * options.minutes:
            break
        measured[cell] = Measured()
        # A seed for each cell, so that another cell changes no other's plans.
        draw = random.Random(f"{SEED} {' '.join(cell)}")
        for _ in range(options.plans):
            measure(draw, cell, measured[cell], realistic=options.realistic)
        passed = time.monotonic() - began
        sys.stderr.write(f"{len(measured)}/{len(chosen)} {' '.join(cell)}: {passed:.0f} s\n")
        sys.stderr.flush()
    print_report(measured, len(chosen))


if __name__ == "__main__":
    main()
