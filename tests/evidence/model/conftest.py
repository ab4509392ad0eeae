"""A model with its signed evidence; its record is written line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from safetensors.torch import save_file
from torch import Tensor

from affidavit.evidence import Evidence, sign_model
from affidavit.plan import Plan
from affidavit.trainer.adapters import digest_of_tensors
from affidavit.trust import SigningKey
from tests.evidence.test_conformance import chained, entries_of, plan_with, predicate_of
from tests.support.trust import trusting

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run leaves: the weights, and what is evidence for them."""

    weights: dict[str, Tensor]
    evidence: Evidence
    key: SigningKey

    def signed(self, folder: Path, openssf_key: ec.EllipticCurvePrivateKey | None = None) -> Path:
        """A model's folder, signed."""
        folder.mkdir(exist_ok=True)
        save_file(self.weights, folder / WEIGHTS)
        (folder / "README.md").write_text("# A model\n")
        (folder / "tokens").mkdir(exist_ok=True)
        (folder / "tokens" / "wörter.txt").write_text("a b c\n")
        self.sign(folder, openssf_key)
        return folder

    def sign(
        self,
        folder: Path,
        openssf_key: ec.EllipticCurvePrivateKey | None = None,
        exports: Iterable[str] = (),
    ) -> dict[str, Any]:
        """Sign a folder as it is."""
        now = datetime.now(UTC).replace(microsecond=0)
        trusted = trusting(self.key.public)
        return sign_model(
            folder,
            self.evidence,
            self.key,
            trusted=trusted,
            now=now,
            openssf_key=openssf_key,
            exports=exports,
        )


@pytest.fixture(scope="module")
def run(key: SigningKey) -> Run:
    """A run that conforms, whose record ends in the digest that the trainer computes."""
    return run_of(key)


def run_of(
    key: SigningKey,
    change: Callable[[list[dict[str, Any]]], None] | None = None,
    plan: Plan | None = None,
) -> Run:
    """The same of another plan, with the lines of the record changed before they are chained."""
    predicate, bundle = predicate_of(
        plan or plan_with(), key, datetime.now(UTC).replace(microsecond=0)
    )
    weights = {name: torch.randn(2) for name in "abc"}
    entries = entries_of(predicate, lost=False)
    end = digest_of_tensors(*weights.values())
    entries[-1]["parameters"] = entries[-2]["parameters"] = end
    if change is not None:
        change(entries)
    return Run(weights=weights, evidence=Evidence(bundle=bundle, record=chained(entries)), key=key)
