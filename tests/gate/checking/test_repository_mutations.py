"""No form of a public repository passes once a line changes its noise or adds a step.

Each form that is certified is changed at a random statement, in one of the ways that scripts change
what they were told late, and is then read again.
"""

from __future__ import annotations

import ast
from random import Random
from typing import Any

import pytest

from affidavit.importers.partial_plan import PartialPlan
from affidavit.importers.scripts import importer
from affidavit.plan import MalformedPlan
from tests.gate.checking.test_repositories import CASES

NOISE = (
    "{o}.noise_multiplier = 0.01", "{o}.noise_multiplier *= 0.5", "{o}.noise_multiplier -= 0.3",
    "setattr({o}, 'noise_multiplier', 0.01)", "setattr({o}, 'noise_' + 'multiplier', 0.01)",
    "vars({o})['noise_multiplier'] = 0.01", "{o}.__dict__['noise_multiplier'] = 0.01",
    "{o}.__dict__.update(noise_multiplier=0.01)", "{o}.__setattr__('noise_multiplier', 0.01)",
    "late = {o}\nlate.noise_multiplier = 0.01",
    "[setattr(o, 'noise_multiplier', 0) for o in [{o}]]",
    "for o in [{o}]:\n    o.noise_multiplier = 0", "exec('{o}.noise_multiplier = 0')",
    "from opacus.schedulers import ExponentialNoise\nExponentialNoise({o}, gamma=0.5)",
)  # fmt: skip
"""Ways to change the noise of an optimiser."""
STEPS = (
    "{o}.step()", "again = {o}.step\nagain()", "getattr({o}, 'step')()",
    "getattr({o}, 'st' + 'ep')()",
    "for again in range(9):\n    {o}.step()", "[{o}.step() for again in range(9)]",
    "list(map(lambda again: {o}.step(), range(9)))",
)  # fmt: skip
"""Ways to step an optimiser once more."""
CERTIFIED = [
    case
    for case in CASES
    if case["exit"] == 0 and "opacus" in case["script"] and "make_private" in case["script"]
]


def _read(case: dict[str, Any], text: str) -> PartialPlan | None:
    lines = "".join(f"# affidavit: {line}\n" for line in case["lines"])
    try:
        return importer.read((text + lines).encode())
    except MalformedPlan:
        return None


def _changed(random: Random, text: str, line: str) -> str:
    """The script with a line before a random statement of a random block."""
    tree = ast.parse(text)
    blocks = [
        body
        for node in ast.walk(tree)
        for field in ("body", "orelse")
        if isinstance(body := getattr(node, field, None), list) and body
    ]
    block = random.choice(blocks)
    place = random.randrange(len(block) + 1)
    block[place:place] = ast.parse(line).body
    return ast.unparse(ast.fix_missing_locations(tree))


def _refuses(number: int, seed: int) -> None:
    random = Random(seed)
    unchanged = [_read(case, case["script"]) for case in CERTIFIED if "files" not in case]
    assert len(unchanged) > 5
    assert all(partial is not None for partial in unchanged)
    for _ in range(number):
        case = random.choice(CERTIFIED)
        kind = random.choice((NOISE, STEPS))
        name = random.choice(("optimizer", "opt"))
        text = case["script"] if name == "optimizer" else case["script"] + "\nopt = optimizer\n"
        changed = _changed(random, text, random.choice(kind).format(o=name))
        partial = _read(case, changed)
        if partial is None or partial.broken:
            continue
        assert kind is STEPS, changed
        stated = any("epochs=" in line or "steps=" in line for line in case["lines"])
        settled = {"epochs", "steps"} & partial.data.keys()
        assert stated or not settled, changed


def test_some_late_changes_of_public_forms_do_not_pass() -> None:
    _refuses(75, seed=3)


@pytest.mark.soak
def test_ten_thousand_late_changes_of_public_forms_do_not_pass() -> None:
    _refuses(10_000, seed=4)
