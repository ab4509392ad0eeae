"""A session in which a room was imported by its bare name fails.

The rooms stand at the root of the repository, so that a bare ``import plan`` works wherever
the root is on the path, and makes a second copy of every class.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import affidavit

ROOMS = frozenset(path.name for path in Path(affidavit.__file__).parent.iterdir() if path.is_dir())


@pytest.fixture(scope="session", autouse=True)
def rooms_by_their_full_name_only() -> Iterator[None]:
    """Fail at the end."""
    yield
    bare = sorted(ROOMS & sys.modules.keys())
    assert not bare, f"imported without `affidavit.` in front: {', '.join(bare)}"
