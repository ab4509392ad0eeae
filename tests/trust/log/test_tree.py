"""The tree against the RFC's definition, published vectors, and hostile proofs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affidavit.trust.log import merkle_tree
from tests.support.random_seeds import examples
from tests.trust.log import reference_tree

VECTORS = json.loads(
    (Path(__file__).parents[2] / "vectors/log/rfc6962.json").read_text(encoding="utf-8")
)
LARGEST = 70
ENTRIES = tuple(b"entry %d" % item for item in range(LARGEST))


def grown(
    entries: tuple[bytes, ...],
) -> tuple[merkle_tree.Frontier, dict[merkle_tree.Place, bytes]]:
    """The tree of these entries, and the hashes of all its perfect subtrees."""
    tree, nodes = merkle_tree.Frontier(), {}
    for entry in entries:
        nodes.update(tree.append(merkle_tree.leaf_hash(entry)))
    return tree, nodes


TREE, NODES = grown(ENTRIES)


def root(size: int) -> bytes:
    return reference_tree.remembered(ENTRIES[:size])


def inclusion(index: int, size: int) -> list[bytes]:
    return merkle_tree.assemble(merkle_tree.inclusion_path(index, size), NODES)


def consistency(first: int, second: int) -> list[bytes]:
    return merkle_tree.assemble(merkle_tree.consistency_path(first, second), NODES)


# ---- published vectors ---------------------------------------------------------------


def test_the_published_roots() -> None:
    entries = tuple(bytes.fromhex(vector) for vector in VECTORS["leaves"])
    for size, requested in enumerate(VECTORS["roots"]):
        assert grown(entries[:size])[0].root().hex() == requested
        assert reference_tree.tree_hash(entries[:size]).hex() == requested


@pytest.mark.parametrize("vector", VECTORS["inclusion"], ids=str)
def test_the_published_inclusion_proofs(vector: dict[str, Any]) -> None:
    entries = tuple(bytes.fromhex(item) for item in VECTORS["leaves"])
    _, nodes = grown(entries)
    index, size = vector["index"], vector["size"]
    created = merkle_tree.assemble(merkle_tree.inclusion_path(index, size), nodes)
    assert [entry.hex() for entry in created] == vector["proof"]
    merkle_tree.verify_inclusion(
        merkle_tree.leaf_hash(entries[index]),
        index=index,
        size=size,
        proof=created,
        root=bytes.fromhex(VECTORS["roots"][size]),
    )


@pytest.mark.parametrize("vector", VECTORS["consistency"], ids=str)
def test_the_published_consistency_proofs(vector: dict[str, Any]) -> None:
    _, nodes = grown(tuple(bytes.fromhex(element) for element in VECTORS["leaves"]))
    first, second = vector["first"], vector["second"]
    created = merkle_tree.assemble(merkle_tree.consistency_path(first, second), nodes)
    assert [entry.hex() for entry in created] == vector["proof"]
    roots = [bytes.fromhex(item) for item in VECTORS["roots"]]
    merkle_tree.verify_consistency(
        first=first,
        second=second,
        first_root=roots[first],
        second_root=roots[second],
        proof=created,
    )


# ---- the RFC's definition, every size to 70 -------------------------------------------


@pytest.mark.parametrize("size", range(LARGEST + 1))
def test_every_tree_to_70_leaves_is_the_rfcs(size: int) -> None:
    tree, nodes = grown(ENTRIES[:size])
    assert tree.root() == root(size)
    requested = merkle_tree.frontier_places(size)
    assert len(requested) == size.bit_count()
    assert merkle_tree.Frontier(size, [nodes[place] for place in requested]).root() == root(size)
    for index in range(size):
        created = inclusion(index, size)
        assert created == reference_tree.path(index, ENTRIES[:size])
        leaf = merkle_tree.leaf_hash(ENTRIES[index])
        assert reference_tree.root_by(index, size, leaf, created) == root(size)
        merkle_tree.verify_inclusion(leaf, index=index, size=size, proof=created, root=root(size))
    for first in range(1, size + 1):
        created = consistency(first, size)
        assert created == reference_tree.proof(first, ENTRIES[:size])
        check(first, size, root(first), root(size), created)


def check(first: int, second: int, old: bytes, new: bytes, proof: list[bytes]) -> None:
    merkle_tree.verify_consistency(
        first=first, second=second, first_root=old, second_root=new, proof=proof
    )


@pytest.mark.soak
def test_a_hundred_thousand_leaves() -> None:
    """Roots at many sizes against the definition, level by level, and proofs at the edges."""
    size = 100_000
    entries = [b"%d" % item for item in range(size)]
    tree, nodes = merkle_tree.Frontier(), {}
    roots: dict[int, bytes] = {}
    for entry in entries:
        nodes.update(tree.append(merkle_tree.leaf_hash(entry)))
        if tree.size in (1, 65_535, 65_536, 65_537, 99_999, size):
            roots[tree.size] = tree.root()
    for requested, result in roots.items():
        assert result == by_levels(entries[:requested])
    for index in (0, 1, 65_535, 65_536, 98_303, 99_998, 99_999):
        proof = merkle_tree.assemble(merkle_tree.inclusion_path(index, size), nodes)
        leaf = merkle_tree.leaf_hash(entries[index])
        assert reference_tree.root_by(index, size, leaf, proof) == roots[size]
        merkle_tree.verify_inclusion(leaf, index=index, size=size, proof=proof, root=roots[size])
    for first in sorted(roots):
        check(
            first,
            size,
            roots[first],
            roots[size],
            merkle_tree.assemble(merkle_tree.consistency_path(first, size), nodes),
        )


def by_levels(entries: list[bytes]) -> bytes:
    """The root by pairing neighbours level by level, an odd one going up as it is."""
    level = [hashlib.sha256(b"\x00" + entry).digest() for entry in entries]
    while len(level) > 1:
        pairs = [
            hashlib.sha256(b"\x01" + level[at] + level[at + 1]).digest()
            for at in range(0, len(level) - 1, 2)
        ]
        level = [*pairs, *level[len(pairs) * 2 :]]
    return level[0]


def test_a_proof_takes_about_two_log_n_hashes() -> None:
    for size in (10**6, 10**6 + 1, 2**20 - 1):
        for index in (0, size // 3, size - 1):
            requested = [
                place
                for part in merkle_tree.inclusion_path(index, size)
                for place in merkle_tree.places(part)
            ]
            assert len(requested) <= 2 * size.bit_length()
        for first in (1, size // 3, size - 1):
            requested = [
                place
                for part in merkle_tree.consistency_path(first, size)
                for place in merkle_tree.places(part)
            ]
            assert len(requested) <= 2 * size.bit_length() + 2


def test_appending_makes_about_two_hashes_a_leaf() -> None:
    tree = merkle_tree.Frontier()
    created = [len(tree.append(bytes(32))) for _ in range(1024)]
    assert sum(created) == 2 * 1024 - 1
    assert max(created) == 11


# ---- what must not pass ----------------------------------------------------------------


def mutations(proof: list[bytes]) -> list[list[bytes]]:
    """Proofs that are not ``proof``: longer, shorter, changed, in another order."""
    stranger = hashlib.sha256(b"stranger").digest()
    result = [[*proof, stranger], [stranger, *proof], [*proof, *proof], [*proof, b""]]
    for at in range(len(proof)):
        changed = bytes([proof[at][0] ^ 1]) + proof[at][1:]
        result += [
            proof[:at] + proof[at + 1 :],
            [*proof[:at], changed, *proof[at + 1 :]],
            [*proof[:at], proof[at][:31], *proof[at + 1 :]],
            [*proof[:at], proof[at], *proof[at:]],
        ]
    if len(proof) > 1:
        result.append(proof[::-1])
    return [item for item in result if item != proof]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13, 32, 33, 70])
def test_no_changed_inclusion_proof_passes(size: int) -> None:
    for index in range(size):
        leaf, proof = merkle_tree.leaf_hash(ENTRIES[index]), inclusion(index, size)
        for other in range(size + 3):
            if other != index:
                refuse_inclusion(leaf, other, size, proof, root(size))
        for other in (0, size - 1, size + 1, 2 * size, size + 64):
            # Another size is another root; some keep the path, as the RFC's algorithm allows.
            if 0 < other <= LARGEST and other != size:
                refuse_inclusion(leaf, index, other, proof, root(other))
        refuse_inclusion(merkle_tree.leaf_hash(b"another"), index, size, proof, root(size))
        refuse_inclusion(leaf, index, size, proof, merkle_tree.EMPTY_ROOT)
        refuse_inclusion(leaf, index, size, proof, b"")
        refuse_inclusion(leaf[:31], index, size, proof, root(size))
        for mutated in mutations(proof):
            refuse_inclusion(leaf, index, size, mutated, root(size))


@pytest.mark.parametrize("second", [1, 2, 3, 4, 6, 8, 13, 33, 64])
def test_no_changed_consistency_proof_passes(second: int) -> None:
    for first in range(1, second + 1):
        proof = consistency(first, second)
        old, new = root(first), root(second)
        for mutated in mutations(proof):
            refuse_consistency(first, second, old, new, mutated)
        refuse_consistency(second + 1, second, old, new, proof)
        refuse_consistency(0, second, old, new, proof)
        refuse_consistency(-1, second, old, new, proof)
        refuse_consistency(first, second, merkle_tree.EMPTY_ROOT, new, proof)
        refuse_consistency(first, second, old, merkle_tree.EMPTY_ROOT, proof)
        if first != second:
            refuse_consistency(first, second, new, old, proof)
            refuse_consistency(second, first, new, old, proof)


def test_the_empty_tree_has_no_leaf_and_proves_nothing() -> None:
    assert merkle_tree.Frontier().root() == merkle_tree.EMPTY_ROOT == hashlib.sha256(b"").digest()
    refuse_inclusion(merkle_tree.leaf_hash(b""), 0, 0, [], merkle_tree.EMPTY_ROOT)
    refuse_consistency(0, 0, merkle_tree.EMPTY_ROOT, merkle_tree.EMPTY_ROOT, [])
    refuse_consistency(0, 1, merkle_tree.EMPTY_ROOT, root(1), [])
    for first, second in ((0, 1), (-1, 1), (2, 1)):
        with pytest.raises(merkle_tree.ProofError):
            merkle_tree.consistency_path(first, second)
    for index, size in ((0, 0), (1, 1), (-1, 1)):
        with pytest.raises(merkle_tree.ProofError):
            merkle_tree.inclusion_path(index, size)


def test_a_node_does_not_pass_as_a_leaf() -> None:
    left, right = merkle_tree.leaf_hash(b"a"), merkle_tree.leaf_hash(b"b")
    assert merkle_tree.leaf_hash(left + right) != merkle_tree.node_hash(left, right)
    assert merkle_tree.leaf_hash(b"") != merkle_tree.EMPTY_ROOT


def test_a_fork_has_no_proof_from_the_tree_that_was_seen() -> None:
    """What an operator who drops the last rows and appends others would have to find."""
    forked = (*ENTRIES[:40], b"another", *ENTRIES[41:])
    _, nodes = grown(forked)
    for second in range(50, LARGEST + 1):
        created = merkle_tree.assemble(merkle_tree.consistency_path(50, second), nodes)
        refuse_consistency(50, second, root(50), reference_tree.tree_hash(forked[:second]), created)


@settings(max_examples=examples(60))
@given(st.integers(1, 300), st.data())
def test_random_trees(size: int, data: Any) -> None:
    entries = tuple(data.draw(st.lists(st.binary(max_size=3), min_size=size, max_size=size)))
    tree, nodes = grown(entries)
    assert tree.root() == by_levels(list(entries))
    index = data.draw(st.integers(0, size - 1))
    first = data.draw(st.integers(1, size))
    proof = merkle_tree.assemble(merkle_tree.inclusion_path(index, size), nodes)
    merkle_tree.verify_inclusion(
        merkle_tree.leaf_hash(entries[index]), index=index, size=size, proof=proof, root=tree.root()
    )
    (old,) = merkle_tree.assemble([merkle_tree.Range(0, first)], nodes)
    check(
        first,
        size,
        old,
        tree.root(),
        merkle_tree.assemble(merkle_tree.consistency_path(first, size), nodes),
    )


def test_a_frontier_has_a_hash_for_every_bit_of_its_size() -> None:
    with pytest.raises(ValueError, match="perfect subtrees"):
        merkle_tree.Frontier(5, [bytes(32)])


def refuse_inclusion(leaf: bytes, index: int, size: int, proof: list[bytes], of: bytes) -> None:
    with pytest.raises(merkle_tree.ProofError):
        merkle_tree.verify_inclusion(leaf, index=index, size=size, proof=proof, root=of)


def refuse_consistency(first: int, second: int, old: bytes, new: bytes, proof: list[bytes]) -> None:
    with pytest.raises(merkle_tree.ProofError):
        check(first, second, old, new, proof)
