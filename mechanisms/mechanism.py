"""A mechanism: what an optimiser releases, and why the rest of it costs nothing.

Every optimiser that may be certified has a file of its own that states, for a reader who
wants to check it: what is released, how sensitive that is, what is done with the noisy
releases afterwards (post-processing, free), which state sees raw data (none, or it must
be accounted), and the source.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Mechanism:
    """The privacy-relevant description of one optimiser."""

    name: str
    title: str
    releases: str
    sensitivity: str
    post_processing: tuple[str, ...]
    state_on_raw_data: tuple[str, ...] = ()
    needs_auxiliary_block: bool = False
    sources: tuple[str, ...]
