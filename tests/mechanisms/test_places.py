"""A record has one place in all phases of a fixed order."""

from __future__ import annotations

import numpy as np
import pytest

from affidavit.mechanisms.strategies import Participation, Strategy
from affidavit.mechanisms.strategies.lengths_by_place import lengths_by_place
from affidavit.mechanisms.strategies.toeplitz import Toeplitz
from affidavit.mechanisms.strategies.tree import Tree

STRATEGIES = {
    "falling": lambda steps: Toeplitz.from_strategy([1, 0.5, 0.2], steps=steps),
    "signed": lambda steps: Toeplitz.from_strategy([1, -0.7, 0.3, 0.1], steps=steps),
    "tree": lambda steps: Tree.of(steps=steps),
}


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize(("steps", "turn"), [(7, 2), (8, 2), (9, 4), (5, 1), (6, 7), (12, 3)])
def test_lengths_are_those_of_the_columns(kind: str, steps: int, turn: int) -> None:
    strategy: Strategy = STRATEGIES[kind](steps)
    matrix = strategy.visible_matrix()
    longest = []
    for place in range(min(turn, steps)):
        columns = matrix[:, place::turn]
        alternating = (-1.0) ** np.arange(columns.shape[1])
        both = columns @ np.stack([np.ones_like(alternating), alternating], axis=1)
        longest.append(np.linalg.norm(both, axis=0).max())
    lengths = lengths_by_place(strategy, turn)
    assert (lengths <= np.array(longest) * (1 + 1e-15)).all()
    assert np.allclose(lengths, longest, rtol=1e-9)
    often = Participation.fixed_epoch(participations=steps, separation=turn)
    assert lengths.max() <= strategy.sensitivity(often).value
