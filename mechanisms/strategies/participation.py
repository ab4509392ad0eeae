"""Participation: in which steps of a run one record may take part.

A pattern is a set of steps. The schemas differ in which patterns they allow:

=================  =====================================================================
schema             patterns
=================  =====================================================================
``single``         one step
``fixed_epoch``    o, o + b, o + 2b, ...: at most k of them, any first step o
``min_separation`` at most k steps, any two of them at least b apart
=================  =====================================================================

A record may always take part less often, because its contribution to a step may be zero;
only maximal patterns matter. With T = k·b steps, ``fixed_epoch`` is k passes over the data
in one order. Every ``fixed_epoch`` pattern is a ``min_separation`` pattern.

>>> Participation.fixed_epoch(participations=2, separation=3).most(steps=6)
2

References: Choquette-Choo, McMahan, Rush and Thakurta, arXiv:2211.06530 (fixed epochs);
Choquette-Choo et al., arXiv:2306.08153 (minimum separation).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Schema = Literal["single", "fixed_epoch", "min_separation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Participation:
    """A schema with its k (``participations``) and b (``separation``), both at least 1."""

    schema: Schema
    participations: int = 1
    separation: int = 1

    def __post_init__(self) -> None:
        if self.participations < 1 or self.separation < 1:
            raise ValueError("participations and separation must be at least 1")
        if self.schema == "single" and self.participations != 1:
            raise ValueError("single participation has one participation")

    @classmethod
    def single(cls) -> Participation:
        """Every record takes part in one step."""
        return cls(schema="single")

    @classmethod
    def fixed_epoch(cls, *, participations: int, separation: int) -> Participation:
        """At most k steps, exactly b apart."""
        return cls(schema="fixed_epoch", participations=participations, separation=separation)

    @classmethod
    def min_separation(cls, *, participations: int, separation: int) -> Participation:
        """At most k steps, at least b apart."""
        return cls(schema="min_separation", participations=participations, separation=separation)

    def most(self, steps: int) -> int:
        """The most participations of one record in a run of ``steps``: min(k, ⌈T/b⌉)."""
        return min(self.participations, -(-steps // self.separation))
