"""The source distribution is enough: the wheel made from it is the wheel made from the tree.

And whoever builds at the same commit gets the same bytes, given ``SOURCE_DATE_EPOCH``.
"""

from __future__ import annotations

import hashlib
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.building import built, copy_of_the_tree


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of the tree and the wheel of that sdist, as ``build`` makes them by default."""
    where = tmp_path_factory.mktemp("sdist")
    wheel, sdist = built(copy_of_the_tree(where / "tree"), where / "out")
    return sdist, wheel


def contents(wheel: Path) -> dict[str, str]:
    """Every file of a wheel with the digest of what is in it."""
    with zipfile.ZipFile(wheel) as result:
        return {n: hashlib.sha256(result.read(n)).hexdigest() for n in result.namelist()}


@pytest.mark.soak
def test_the_wheel_of_the_sdist_is_the_wheel_of_the_tree_to_the_byte(
    distributions: tuple[Path, Path], wheel_of_the_tree: Path
) -> None:
    _, of_sdist = distributions
    assert contents(wheel_of_the_tree) == contents(of_sdist)
    assert wheel_of_the_tree.read_bytes() == of_sdist.read_bytes()


@pytest.mark.soak
def test_the_sdist_holds_files_and_no_links_and_no_secrets(
    distributions: tuple[Path, Path],
) -> None:
    with tarfile.open(distributions[0]) as result:
        members = result.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    names = [member.name for member in members]
    assert any(name.endswith("/LICENSE") for name in names)
    assert not [name for name in names if name.endswith((".pem", ".db", ".sqlite", ".env"))]
