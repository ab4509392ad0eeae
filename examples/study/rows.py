"""The rows of the study: an optimiser, its blocks and its noise, as a plan.

All rows see as many records in as many steps. Every block is clipped to the norm of the DP-Muon
paper. The noise of ``dp-muon-published`` is what ε takes by that paper's derivation, which accounts
each block by a sample of its own; its plan states no ε, and gets the one that it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from affidavit.assessment import certify
from affidavit.plan import plan_from

RECORDS = 4672
"""N of E2E's development set."""
DELTA = 1e-5
CLIP_NORM = 0.1
PUBLISHED = "dp-muon-published"


@dataclass(frozen=True, kw_only=True)
class Size:
    """The public model and how long it is trained; ``meanings``: each so manieth is tested."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    public_steps: int
    lot: int
    steps: int
    choice_steps: int
    meanings: int
    microbatch: int

    @property
    def config(self) -> dict[str, Any]:
        """GPT-2's ``config.json``."""
        return {
            "n_layer": self.layers,
            "n_head": self.heads,
            "n_embd": self.width,
            "n_positions": 160,
            "tie_word_embeddings": False,
        }


SIZES = {
    "small": Size(
        layers=2, heads=4, width=48, vocabulary=1024, public_steps=400, lot=64, steps=30,
        choice_steps=10, meanings=6, microbatch=64,
    ),
    "large": Size(
        layers=6, heads=8, width=512, vocabulary=10_000, public_steps=4000, lot=512, steps=300,
        choice_steps=100, meanings=1, microbatch=256,
    ),
}  # fmt: skip
"""For two processors, and for a GPU: 0.2 and 30 million parameters."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row; ``rates`` names whose learning rate it takes, ``more`` has fields of its plan."""

    title: str
    rates: str
    optimizer: Mapping[str, Any]
    blocks: str = "all"
    more: Mapping[str, Any] = field(default_factory=dict)


MUON = {"name": "dp_muon", "momentum": 0.95, "newton_schulz_start": "frobenius"}
ADAM = {"name": "dp_adam", "beta1": 0.9, "beta2": 0.999}
ROWS = {
    "dp-adam": Row(title="DP-Adam", rates="dp-adam", optimizer=ADAM),
    "dp-muon": Row(title="DP-Muon", rates="dp-muon", optimizer=MUON, blocks="hidden"),
    "dp-sgd": Row(
        title="DP-SGD", rates="dp-sgd", optimizer={"name": "dp_sgd", "momentum": 0.9}
    ),
    "dp-adambc": Row(
        title="DP-AdamBC", rates="dp-adambc", optimizer=ADAM | {"name": "dp_adambc"}
    ),
    "dp-muon-optimal": Row(
        title="DP-Muon, optimal allocation", rates="dp-muon", optimizer=MUON, blocks="kinds",
        more={"allocation": "optimal"},
    ),
    "dp-muonbc": Row(
        title="DP-MuonBC", rates="dp-muon", blocks="hidden",
        optimizer=MUON | {"name": "dp_muonbc", "probes": 1},
    ),
    "dp-muon-paper-start": Row(
        title="DP-Muon, the paper's start", rates="dp-muon-paper-start", blocks="hidden",
        optimizer=MUON | {"newton_schulz_start": "paper"},
    ),
    PUBLISHED: Row(
        title="DP-Muon, noise as published", rates="dp-muon", optimizer=MUON, blocks="hidden"
    ),
    "dp-corrsgd": Row(
        title="DP-CorrSGD, λ = 0.5", rates="dp-sgd",
        optimizer={"name": "dp_corrsgd", "momentum": 0.9},
        more={
            "sampling": {"scheme": "balls_in_bins"},
            "noise": {"kind": "bidiagonal", "lambda": 0.5},
        },
    ),
    "dp-matrix": Row(
        title="DP-Matrix, 4 bands", rates="dp-sgd",
        optimizer={"name": "dp_matrix_me", "momentum": 0.9},
        more={
            "sampling": {"scheme": "cyclic_poisson", "groups": 4},
            "noise": {"kind": "banded", "bands": 4},
        },
    ),
    "dp-adam-denoised": Row(
        title="DP-Adam, denoised", rates="dp-adam", optimizer=ADAM | {"denoise": True}
    ),
    "dp-muon-denoised": Row(
        title="DP-Muon, denoised", rates="dp-muon", optimizer=MUON | {"denoise": True},
        blocks="hidden",
    ),
}  # fmt: skip
"""In the order in which they are run."""

GRIDS = {
    "dp-adam": (0.002, 0.006),
    "dp-sgd": (1.0, 3.0),
    "dp-adambc": (0.0003, 0.001),
    "dp-muon": (0.02, 0.06),
    "dp-muon-paper-start": (0.02, 0.06),
}
"""Learning rates that are tried on public text; DP-Adam's is the auxiliary one of DP-Muon."""


def plan(
    name: str,
    size: Size,
    epsilon: float,
    blocks: Sequence[tuple[str, int, int]],
    rate: float,
    auxiliary_rate: float,
) -> dict[str, Any]:
    """The plan of a row, whose ``blocks`` are name, count and entries of each release."""
    row = ROWS[name]
    optimizer = {**row.optimizer, "learning_rate": rate}
    if row.blocks != "all":
        optimizer["auxiliary_learning_rate"] = auxiliary_rate
    document = {
        "version": 1,
        "name": f"{name}-{epsilon:g}",
        "dataset": {"name": "e2e-dev", "size": RECORDS},
        "adjacency": "add_remove",
        "steps": size.steps,
        "releases": [
            {"name": of, "count": count, "clip_norm": CLIP_NORM, "dimension": entries}
            for of, count, entries in blocks
        ],
        "clipping": "flat" if row.blocks == "all" else "per_block",
        "optimizer": optimizer,
        "target": {"epsilon": epsilon, "delta": DELTA},
        **row.more,
    }
    sampling = {"scheme": "poisson", **document.get("sampling", {}), "lot_size": size.lot}
    document["sampling"] = sampling
    if sampling["scheme"] == "balls_in_bins":
        document["adjacency"] = "zero_out"
    if name == PUBLISHED:
        sigma = published_noise(document, sum(count for _, count, _ in blocks))
        for release in document["releases"]:
            release["noise_multiplier"] = sigma
        del document["target"]["epsilon"]
    return document


def published_noise(document: Mapping[str, Any], blocks: int) -> float:
    """σ of each block by the paper's derivation: as if each block had a sample of its own."""
    alone = {
        **document,
        "steps": blocks * document["steps"],
        "releases": [{"name": "all", "clip_norm": CLIP_NORM}],
        "clipping": "flat",
        "optimizer": {"name": "dp_sgd"},
    }
    (release,) = certify(plan_from(alone), second_opinion=False).releases
    assert release.required is not None
    return release.required
