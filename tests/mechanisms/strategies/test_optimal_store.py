"""The store of constructed strategies: kept whole, read with suspicion, never trusted."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from affidavit.mechanisms.noise_files import register_noise, registered_noise
from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal
from affidavit.mechanisms.strategies.blt import Blt
from affidavit.mechanisms.strategies.dense import Dense
from affidavit.mechanisms.strategies.scheduled import Scheduled
from affidavit.mechanisms.strategies.store import (
    Store,
    coefficients_digest,
    default_store,
)
from affidavit.mechanisms.strategies.strategy import Strategy
from affidavit.mechanisms.strategies.toeplitz import Toeplitz
from affidavit.mechanisms.strategies.tree import Tree

REQUEST = {"kind": "dense", "steps": 3, "learning_rates": [1.0, 0.1, 1e-30]}
ARRAYS = {"strategy": np.array([[1.0, 0.0], [-0.5, 1.0]]), "gap": np.array(1e-9)}
OTHERS = {**ARRAYS, "gap": np.array(0.5)}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(directory=tmp_path / "strategies")


def never() -> dict[str, np.ndarray]:
    raise AssertionError("computed although it was kept")


class TestKeeping:
    def test_comes_back_bit_by_bit(self, store: Store) -> None:
        store.get_or_compute(REQUEST, lambda: ARRAYS)
        again = store.get_or_compute(REQUEST, never)
        assert coefficients_digest(again) == coefficients_digest(ARRAYS)

    def test_every_part_of_the_request_counts(self, store: Store) -> None:
        store.get_or_compute(REQUEST, lambda: ARRAYS)
        other = store.get_or_compute({**REQUEST, "steps": 4}, lambda: {"strategy": np.eye(2)})
        assert other["strategy"].tolist() == np.eye(2).tolist()

    def test_numbers_are_compared_as_in_plans(self, store: Store) -> None:
        store.get_or_compute({"tau": 8}, lambda: ARRAYS)
        store.get_or_compute({"tau": 8.0}, never)

    def test_nothing_is_left_behind(self, store: Store) -> None:
        store.get_or_compute(REQUEST, lambda: ARRAYS)
        assert sorted(path.suffix for path in store.directory.iterdir()) == [".json", ".npz"]

    def test_the_oldest_go_first(self, tmp_path: Path) -> None:
        small = Store(directory=tmp_path, max_bytes=3000)
        for steps in range(6):
            small.get_or_compute({"steps": steps}, {"noise": np.full(100, float(steps))}.copy)
        assert sum(path.stat().st_size for path in tmp_path.glob("*.npz")) <= 3000
        small.get_or_compute({"steps": 5}, never)
        assert "gap" in small.get_or_compute({"steps": 0}, lambda: ARRAYS)
        assert len(list(tmp_path.glob("*.json"))) == len(list(tmp_path.glob("*.npz")))

    def test_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path))
        assert default_store().directory == tmp_path / "strategies"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(ARRAYS["strategy"].tobytes())] ^= 1
    path.write_bytes(content)


def describe(change: dict[str, object]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        beside = path.with_suffix(".json")
        beside.write_text(json.dumps({**json.loads(beside.read_text()), **change}))

    return damage


def rewritten(content: bytes) -> Callable[[Path], object]:
    """Another archive."""
    return lambda path: path.write_bytes(content)


def archive(name: str, member: bytes, how: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", how) as created:
        created.writestr(name, member)
    return stream.getvalue()


def packed(arrays: dict[str, np.ndarray]) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("a pickle was loaded",))


def pickled() -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.array([1.0, None], dtype=object), allow_pickle=True)
    head = stream.getvalue()[: stream.getvalue().index(b"\n") + 1]
    return head + pickle.dumps(Bomb())


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flip,
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "empty": lambda path: path.write_bytes(b""),
    "description not JSON": lambda path: path.with_suffix(".json").write_text("{"),
    "description a list": lambda path: path.with_suffix(".json").write_text("[]"),
    "another request": describe({"request": {"kind": "blt"}}),
    "another digest": describe({"digest": "sha256:" + "0" * 64}),
    "other numbers": rewritten(packed({**ARRAYS, "gap": np.array(0.0)})),
    "not finite": rewritten(packed({"strategy": np.array([np.nan])})),
    "a pickle": rewritten(archive("strategy.npy", pickled())),
    "compressed": rewritten(archive("strategy.npy", bytes(10**6), zipfile.ZIP_DEFLATED)),
    "half of it": lambda path: path.with_suffix(".json").unlink(),
    "no archive": rewritten(b"PK\x03\x04 and nothing more"),
}


class TestSuspicion:
    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
    def test_corrupt_entries_are_computed_again(
        self, store: Store, damage: Callable[[Path], object]
    ) -> None:
        store.get_or_compute(REQUEST, lambda: ARRAYS)
        damage(next(store.directory.glob("*.npz")))
        assert store.get_or_compute(REQUEST, lambda: OTHERS)["gap"] == 0.5
        assert store.get_or_compute(REQUEST, never)["gap"] == 0.5

    def test_no_directory_costs_only_the_cache(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        blocked = Store(directory=tmp_path / "file")
        for _ in range(2):
            assert blocked.get_or_compute(REQUEST, lambda: ARRAYS).keys() == ARRAYS.keys()


class TestDigest:
    def test_names_shapes_and_bits_count(self) -> None:
        flat = np.arange(4.0)
        digests = {
            coefficients_digest({"a": flat}),
            coefficients_digest({"b": flat}),
            coefficients_digest({"a": flat.reshape(2, 2)}),
            coefficients_digest({"a": np.nextafter(flat, 9)}),
            coefficients_digest({"a": flat[:2], "b": flat[2:]}),
        }
        assert len(digests) == 5

    def test_order_and_layout_do_not(self) -> None:
        square = np.arange(4.0).reshape(2, 2)
        one = {"a": square, "b": square}
        other = {"b": np.asfortranarray(square), "a": square.astype(">f8")}
        assert coefficients_digest(one) == coefficients_digest(other)


class TestFiles:
    def test_a_plan_can_name_what_is_packed(self) -> None:
        content = packed({"noise": np.array([1.0, -0.5])})
        np.testing.assert_array_equal(registered_noise(register_noise(content)), [1.0, -0.5])


class TestCoefficients:
    @pytest.mark.parametrize(
        ("strategy", "expected"),
        [
            (Toeplitz.from_strategy([1.0, 0.5], 4), {"strategy": [1.0, 0.5]}),
            (Toeplitz.from_noise([1.0, -0.5], 4), {"noise": [1.0, -0.5]}),
            (Bidiagonal.of(0.25, 4), {"noise": [1.0, -0.25]}),
            (Blt.of([0.5], [0.25], 4), {"decays": [0.5], "scales": [0.25]}),
            (Dense.from_noise(np.eye(2)), {"noise": np.eye(2)}),
            (Dense.from_strategy(np.eye(2)), {"strategy": np.eye(2)}),
            (Scheduled.of(Dense.from_strategy(np.eye(2)), [1.0, 0.5]), {"strategy": np.eye(2)}),
            (Tree.of(4, period=None), {}),
        ],
    )
    def test_what_a_strategy_is_made_of(
        self, strategy: Strategy, expected: dict[str, object]
    ) -> None:
        result = strategy.coefficients
        assert result.keys() == expected.keys()
        for name, array in result.items():
            np.testing.assert_array_equal(array, expected[name])
