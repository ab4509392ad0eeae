"""Blocks: the trainable tensors of a loop laid over the releases of the certified plan.

Under per-block clipping a release of count K has K blocks; a guard sees tensors, so that a
release is one block of all its tensors (count 1) or has one tensor a block (count K).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from affidavit.gate.guard.bound import Bound
from affidavit.gate.guard.stopping import GuardStop

FLAT = "all"
"""The name of the one block of flat clipping, as our own trainer writes it."""


def require_tensors(bound: Bound, blocks: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """The release of every tensor; raises ``GuardStop`` where that is not the plan's."""
    releases = {release.name: release for release in bound.phase.releases}
    if blocks.keys() != releases.keys():
        raise GuardStop(
            "other_blocks",
            f"blocks are given for {', '.join(sorted(blocks)) or 'nothing'}; the plan releases "
            f"{', '.join(releases)}.",
            "Say which tensors each release of the plan has (blocks=).",
        )
    found: dict[str, str] = {}
    for release, tensors in blocks.items():
        names = list(tensors)
        if repeated := sorted(found.keys() & set(names)):
            raise GuardStop(
                "other_blocks",
                f"{', '.join(repeated)}: in two releases.",
                "Put every tensor into one.",
            )
        found.update(dict.fromkeys(names, release))
        count = releases[release].count
        flat = bound.phase.clipping == "flat"
        if not names or (not flat and count not in (1, len(names))):
            raise GuardStop(
                "other_blocks",
                f"release {release} has {len(names)} tensors and count {count}: they are not one "
                "block of all, nor one block each.",
                f"Certify the plan with count: {max(1, len(names))}, or count: 1.",
            )
    return found


def entries_of(
    bound: Bound, shapes: Mapping[str, list[int]], tensors: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Every tensor with its block, for a run record."""
    counts = {release.name: release.count for release in bound.phase.releases}
    places = dict.fromkeys(counts, 0)
    found = []
    for name, release in tensors.items():
        block = FLAT if bound.phase.clipping == "flat" else f"{release}[{places[release]}]"
        if counts[release] > 1:
            places[release] += 1
        found.append({"name": name, "shape": shapes[name], "release": release, "block": block})
    return found
