"""Clip norms that follow a noisy quantile: as the paper says, and as a record can be held to."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from affidavit.certificate import verify
from affidavit.evidence import START, check_conformance, encode_line
from affidavit.trainer.errors import Interrupted, NotCertified
from tests.support.trust import trusting
from tests.trainer.loop.small_run import (
    KEY,
    STEPS,
    FinishedRun,
    MadeUpData,
    SmallModel,
    bundle_of,
    plan_with,
)
from tests.trainer.loop.test_loop import Stopping, gradients, lots_of

Run = Callable[..., FinishedRun]


def adapting(**changes: Any) -> Any:
    """Two blocks, each with a clip norm of its own that a count steers."""
    event = {"kind": "adaptive_clipping_quantile", "name": "clip", "noise_std": 2, "count": 2}
    release = {"count": 2, "clip_norm": 0.5, "noise_multiplier": 8.0}
    return plan_with(
        releases=[{"name": "all", **release}],
        extra=[{**event, "quantile": 0.4, "learning_rate": 0.5, **changes}],
    )


def charges(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["type"] == "charge"]


def followed(entries: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Clip norms and counts of every step, the norms as the paper has them follow the counts."""
    norms = [entry["clip_norm"] for entry in charges(entries)]
    counts = [entry["clip_counts"] for entry in entries if entry["type"] == "release"]
    assert len(norms) == len(counts) == STEPS
    assert norms[0] == {"all[0]": 0.5, "all[1]": 0.5}
    for step in range(STEPS - 1):
        for block, norm in norms[step].items():
            noisy = counts[step][block] / 12 + 0.5
            moved = norm * math.exp(-0.5 * (noisy - 0.4))
            assert norms[step + 1][block] == pytest.approx(moved, rel=1e-12)
    return norms, counts


def within(clip_norms: list[dict[str, float]], seed: int) -> list[dict[str, int]]:
    """Twice the exact sums of the first step: records below the norm less those above."""
    model, data = SmallModel(), MadeUpData()
    values = {name: item.detach().clone() for name, item in model.module.named_parameters()}
    lot = lots_of(seed)[0]
    item = gradients(model, values, data.x[lot], data.y[lot])
    result = {}
    for block, layer in (("all[0]", "0"), ("all[1]", "2")):
        square = sum(
            item[f"{layer}.{part}"].flatten(1).square().sum(1) for part in ("weight", "bias")
        )
        below = torch.as_tensor(square).sqrt() <= clip_norms[0][block]
        result[block] = 2 * int(below.sum()) - len(below)
    return [result]


def test_norms_follow_the_counts_and_the_noise_follows_the_norms(run: Run) -> None:
    bundle = bundle_of(adapting())
    created = run(adapting(), bundle=bundle, seed=4)
    entries = created.entries
    norms, counts = followed(entries)
    for entry in charges(entries):
        for block, std in entry["noise_std"].items():
            assert std == pytest.approx(8 * entry["clip_norm"][block], rel=1e-12)
            assert std >= 8 * entry["clip_norm"][block]
    # The noise on a count is the plan's, around half of those below less half of those above.
    exact = within(norms, 4)[0]
    for block, value in counts[0].items():
        assert 0 < abs(value - exact[block] / 2) < 2 * 5
    result = check_conformance(
        (created.out / "record.jsonl").read_bytes(), verify(bundle, trusting(KEY.public)).predicate
    )
    assert result.conformant, result.findings


@pytest.mark.by_turns
@pytest.mark.ordinary("*-unknown_fields0", "*-clip_norm_above0", "*-noise_below")
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda lines: lines[3]["clip_counts"].update({"all[0]": 100.0}), "clip_norm_above"),
        (lambda lines: lines[3].pop("clip_counts"), "unknown_fields"),
        (lambda lines: lines[3]["clip_counts"].pop("all[1]"), "unknown_fields"),
        (lambda lines: lines[3]["clip_counts"].update({"all[1]": True}), "unknown_fields"),
        (lambda lines: lines[4]["clip_norm"].update({"all[0]": 9.0}), "clip_norm_above"),
        (lambda lines: lines[4]["noise_std"].update({"all[0]": 1e-3}), "noise_below"),
    ],
)
def test_a_record_that_does_not_follow_its_counts_does_not_conform(
    run: Run, change: Any, code: str
) -> None:
    bundle = bundle_of(adapting())
    created = run(adapting(), bundle=bundle, seed=4, checkpoint_every=100)
    lines = created.entries
    assert [lines[place]["type"] for place in (3, 4)] == ["release", "charge"]
    change(lines)
    content, head = b"", START
    for line in lines:
        rest = {name: value for name, value in line.items() if name not in ("digest", "previous")}
        text, head = encode_line(rest, head)
        content += text
    result = check_conformance(content, verify(bundle, trusting(KEY.public)).predicate)
    assert code in {finding.code for finding in result.findings}
    assert not result.conformant


def test_the_norms_outlast_a_stop(run: Run, tmp_path: Path) -> None:
    plan, out = adapting(), tmp_path / "run"
    bundle = bundle_of(plan)
    with pytest.raises(Interrupted):
        run(plan, bundle=bundle, out=out, data=Stopping(), seed=3)
    again = run(plan, bundle=bundle, out=out, resume=True)
    followed(again.entries)
    result = check_conformance(
        (out / "record.jsonl").read_bytes(), verify(bundle, trusting(KEY.public)).predicate
    )
    assert result.conformant, result.findings


@pytest.mark.parametrize("count", [1, 3])
def test_a_plan_that_leaves_open_which_norm_a_count_steers_is_refused(run: Run, count: int) -> None:
    with pytest.raises(NotCertified, match="count: 2"):
        run(adapting(count=count), seed=1)
