"""The tree of RFC 9162 by its definition: recursive and slow.

It shares nothing with the product but SHA-256. Section 2.1.1 is ``tree_hash``, 2.1.3.1
``path``, 2.1.4.1 ``proof``; inclusion is checked as in 2.1.3.2 but by recursion on the
tree's shape, without bit tricks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache


def tree_hash(leaves: tuple[bytes, ...]) -> bytes:
    """MTH of leaves given by their entries."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    k = half(len(leaves))
    return hashlib.sha256(b"\x01" + remembered(leaves[:k]) + remembered(leaves[k:])).digest()


remembered = cache(tree_hash)


def half(size: int) -> int:
    """The largest power of two smaller than ``size``."""
    k = 1
    while 2 * k < size:
        k *= 2
    return k


def path(index: int, leaves: tuple[bytes, ...]) -> list[bytes]:
    """PATH(m, D_n)."""
    if len(leaves) == 1:
        return []
    k = half(len(leaves))
    if index < k:
        return [*path(index, leaves[:k]), remembered(leaves[k:])]
    return [*path(index - k, leaves[k:]), remembered(leaves[:k])]


def proof(first: int, leaves: tuple[bytes, ...]) -> list[bytes]:
    """PROOF(m, D_n)."""
    return subproof(first, leaves, whole=True)


def subproof(first: int, leaves: tuple[bytes, ...], *, whole: bool) -> list[bytes]:
    """SUBPROOF(m, D_n, b)."""
    if first == len(leaves):
        return [] if whole else [remembered(leaves)]
    k = half(len(leaves))
    if first <= k:
        return [*subproof(first, leaves[:k], whole=whole), remembered(leaves[k:])]
    return [*subproof(first - k, leaves[k:], whole=False), remembered(leaves[:k])]


def root_by(index: int, size: int, leaf: bytes, proof: Sequence[bytes]) -> bytes | None:
    """The root that an inclusion proof leads to, or None if it has the wrong length."""
    if size == 1:
        return leaf if not proof else None
    if not proof:
        return None
    *below, beside = proof
    k = half(size)
    if index < k:
        left, right = root_by(index, k, leaf, below), beside
    else:
        left, right = beside, root_by(index - k, size - k, leaf, below)
    if left is None or right is None:
        return None
    return hashlib.sha256(b"\x01" + left + right).digest()
