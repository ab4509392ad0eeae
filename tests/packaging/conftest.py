"""A distribution that several tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.release.building import built, copy_of_the_tree


@pytest.fixture(scope="session")
def wheel_of_the_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is made from a copy of the tracked files, without an sdist between."""
    where = tmp_path_factory.mktemp("wheel")
    (wheel,) = built(copy_of_the_tree(where / "tree"), where / "out", "--wheel")
    return wheel
