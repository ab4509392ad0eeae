"""jax-privacy itself: ``make try-peers`` runs this.

Both sides of each row of ``docs/reference/library.md`` are evaluated. The left sides must be what
``tests/vectors/jax_privacy.json`` holds, with which the suite compares where there is no JAX;
``python -m tests.peers.jax_privacy`` writes it.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from jax_privacy.batch_selection import PartitionType
from jax_privacy.experimental.execution_plan import BandMFExecutionPlanConfig

import affidavit
from tests.library.test_guide import AGREE, PAGE, ROW
from tests.support.document_blocks import DOCS, ROOT, blocks

VECTOR = ROOT / "tests" / "vectors" / "jax_privacy.json"
ROWS = ROW.findall(PAGE.read_text(encoding="utf-8").partition("## Equivalents of jax-privacy")[2])


def names() -> dict[str, Any]:
    """What the blocks of the page define, with the one about jax-privacy."""
    result: dict[str, Any] = {}
    for block in blocks(DOCS / "reference/library.md"):
        if block.language == "python" and (not block.excerpt or "jax-privacy" in block.excerpt):
            exec(compile(block.text, str(PAGE), "exec"), result)
    return result


@pytest.fixture(scope="module", name="names")
def _names() -> dict[str, Any]:
    return names()


@pytest.mark.parametrize(("theirs", "ours"), ROWS)
def test_an_equivalent_gives_the_same_number(names: dict[str, Any], theirs: str, ours: str) -> None:
    expected, result = float(eval(theirs, names)), eval(ours, names)
    assert expected == pytest.approx(json.loads(VECTOR.read_text())[theirs], rel=1e-9)
    assert result == pytest.approx(expected, rel=AGREE)
    assert getattr(result, "lower", 0.0) <= expected * (1 + 1e-9)


@pytest.mark.parametrize("bands", [1, 4])
def test_a_configuration_is_read_as_the_event_that_it_makes(bands: int) -> None:
    configuration = BandMFExecutionPlanConfig(
        iterations=1000,
        strategy=np.ones(bands),
        epsilon=None,
        delta=None,
        noise_multiplier=1.1,
        sampling_prob=0.01 * bands,
        partition_type=PartitionType.INDEPENDENT,
        accountant=PLDAccountant(),
    )
    event = configuration._get_dp_event(1.1)
    expected = PLDAccountant().compose(event).get_epsilon(1e-5)
    sized: Any = {"size": 60_000} if bands > 1 else {}
    result = affidavit.epsilon(configuration, delta=1e-5, **sized)
    assert result == pytest.approx(expected, rel=AGREE)


if __name__ == "__main__":
    defined = names()
    answers = {theirs: float(eval(theirs, defined)) for theirs, _ in ROWS}
    VECTOR.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
