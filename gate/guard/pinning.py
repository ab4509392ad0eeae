"""Compare a run with the certified plan: parameters of each release, and tensors in blocks.

Under per-block clipping a release of count K has K blocks. A guard sees tensors, so a release is
either one block of all its tensors (count 1) or one block per tensor (count K).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from affidavit.certificate import FLAT, StepRequirement, block_name
from affidavit.gate.guard.errors import GuardStop
from affidavit.gate.guard.obligations import CertifiedRun


def require_certified_parameters(
    required: StepRequirement,
    *,
    clip_norm: Mapping[str, float],
    noise_std: Mapping[str, float],
    divisor: float | None,
) -> None:
    """Require clip norms at most, noise at least, and the divisor exactly as certified.

    Raises ``GuardStop`` otherwise.
    """
    for release, most in required.clip_norm.items():
        if not 0 < clip_norm[release] <= most:
            raise GuardStop(
                "clip_norm_above",
                f"{release} is clipped to {clip_norm[release]:g}, but at most {most:g} was "
                "certified.",
                f"Clip to {most!r}, or certify a plan with your clip norm.",
            )
    for release, least in required.noise_std.items():
        if not noise_std[release] >= least:
            raise GuardStop(
                "noise_below",
                f"{release} has noise of standard deviation {noise_std[release]:.9g} on the sum, "
                f"but at least {least:.9g} was certified.",
                f"Add {least!r} (noise multiplier times clip norm), or certify a plan with your "
                "noise.",
            )
    if divisor is not None and float(divisor) != float(Fraction(required.divisor)):
        raise GuardStop(
            "other_divisor",
            f"sums are divided by {divisor:g}, but {required.divisor} was certified.",
            "Divide by the certified number, whatever the size of the lot.",
        )


def assign_tensors(certified: CertifiedRun, blocks: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """The release of every tensor; raises ``GuardStop`` if the blocks are not the plan's."""
    releases = {release.name: release for release in certified.phase.releases}
    if blocks.keys() != releases.keys():
        raise GuardStop(
            "other_blocks",
            f"blocks are given for {', '.join(sorted(blocks)) or 'nothing'}; the plan releases "
            f"{', '.join(releases)}.",
            "Give the tensors of each release of the plan (blocks=).",
        )
    assigned: dict[str, str] = {}
    for release, tensors in blocks.items():
        names = list(tensors)
        if repeated := sorted(assigned.keys() & set(names)):
            raise GuardStop(
                "other_blocks",
                f"{', '.join(repeated)}: in two releases.",
                "Assign every tensor to one release.",
            )
        assigned.update(dict.fromkeys(names, release))
        count = releases[release].count
        flat = certified.phase.clipping == "flat"
        if not names or (not flat and count not in (1, len(names))):
            raise GuardStop(
                "other_blocks",
                f"release {release} has {len(names)} tensors and count {count}: neither one block "
                "in all nor one per tensor.",
                f"Certify the plan with count: {max(1, len(names))}, or count: 1.",
            )
    return assigned


def tensor_entries(
    certified: CertifiedRun, shapes: Mapping[str, list[int]], tensors: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Every tensor with its block, for a run record."""
    counts = {release.name: release.count for release in certified.phase.releases}
    places = dict.fromkeys(counts, 0)
    entries = []
    for name, release in tensors.items():
        flat = certified.phase.clipping == "flat"
        block = FLAT if flat else block_name(release, places[release])
        if counts[release] > 1:
            places[release] += 1
        entries.append({"name": name, "shape": shapes[name], "release": release, "block": block})
    return entries
