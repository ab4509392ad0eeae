"""The accountant as it is, and by its lattices alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from affidavit.accountants import fourier_accountant as accountant


@pytest.fixture(scope="module")
def lattice_alone() -> Iterator[None]:
    """Switch off the inversion of the transform, which answers most plans before a lattice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accountant, "invert_epsilon", lambda *_: None)
        patch.setattr(accountant, "invert_delta", lambda *_: None)
        yield


@pytest.fixture(scope="module", params=["inversion first", "lattice alone"])
def each_method(request: pytest.FixtureRequest) -> None:
    """Run a module's tests twice."""
    if request.param == "lattice alone":
        request.getfixturevalue("lattice_alone")
