"""Witnesses as the JSON data of certificates. Nothing here is trusted: any witness is sound."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any

from affidavit.accountants.checker import Grid, Rule, RunWitness, Unproved, Witness


def witness_document(witness: Witness) -> dict[str, Any]:
    """``witness`` as JSON data, its doubles as the hexadecimal text of ``float.hex``."""
    return {
        "epsilon": witness.epsilon,
        "delta": witness.delta,
        "runs": [
            {
                "grid": _grid_document(run.grid),
                "rules": [
                    {"spacing": rule.spacing.hex(), "reach": rule.reach.hex()}
                    | ({} if rule.sums is None else {"sums": _grid_document(rule.sums)})
                    for rule in run.rules
                ],
            }
            for run in witness.runs
        ],
    }


def witness_from(document: Mapping[str, Any]) -> Witness:
    """The witness of ``witness_document``; raises ``Unproved`` for what is none."""
    try:
        return Witness(
            epsilon=document["epsilon"],
            delta=document["delta"],
            runs=tuple(
                RunWitness(
                    grid=_grid(run["grid"], linear=False),
                    rules=tuple(
                        Rule(
                            spacing=float.fromhex(rule["spacing"]),
                            reach=float.fromhex(rule["reach"]),
                            sums=_grid(rule["sums"], linear=True) if "sums" in rule else None,
                        )
                        for rule in run["rules"]
                    ),
                )
                for run in document["runs"]
            ),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise Unproved("bad_witness", f"This is no witness: {error}.", "Search again.") from None


def _grid_document(grid: Grid) -> dict[str, Any]:
    return {
        "step": grid.step.hex(),
        "reach": grid.reach,
        "scales": grid.scales,
        "bits": grid.bits,
    }


def _grid(document: Mapping[str, Any], *, linear: bool) -> Grid:
    return Grid(
        step=float.fromhex(document["step"]),
        reach=index(document["reach"]),
        scales=index(document["scales"]),
        bits=index(document["bits"]),
        linear=linear,
    )
