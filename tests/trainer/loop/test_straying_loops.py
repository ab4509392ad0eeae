"""Loops that were sound when they were probed and are not any more: stopped and recorded."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

from affidavit.certificate import verify
from affidavit.evidence import check_conformance
from affidavit.trainer import PrivateRun
from affidavit.trainer.clipping import invariants
from affidavit.trainer.clipping.invariants import Reprobing
from affidavit.trainer.errors import MixedRecords, RunFailure, UnsupportedModel
from tests.support.trust import trusting
from tests.trainer.loop.small_run import KEY, RECORDS, entries_of
from tests.trainer.loop.test_private_loop import DATA, begin_run, bundle, losses, network, take_step

STRAYED = (MixedRecords, UnsupportedModel, RunFailure)
SWITCH_AT = 7
"""The microbatch in which a loop begins to stray, counted from 0: the second of the second step."""

PLAN: dict[str, Any] = {"sampling": {"scheme": "full_batch"}}
"""Changes of the small plan, so that each microbatch has ten records."""


class Switch:
    """Is on from some microbatch of the run on; the loops of a test turn it."""

    on = False


Change = Callable[[Switch, nn.Module, Any], Tensor]


def go_astray(out: Path, model: Any, loss: Any, switch: Switch, **changes: Any) -> PrivateRun:
    """Take steps, turn the switch, and take one more, which has to fail."""
    run = begin_run(out, model, losses=loss, batch_size=10, plan=PLAN, **changes)
    for place, batch in enumerate(islice(run, SWITCH_AT + 1)):
        switch.on = place == SWITCH_AT
        if not switch.on:
            take_step(run, batch)
        else:
            with pytest.raises(STRAYED):
                take_step(run, batch)
    return run


def require_recorded(out: Path, code: str) -> None:
    """The record names the code, and the step is charged and was not released."""
    entries = entries_of(out)
    assert [entry["code"] for entry in entries if entry["type"] == "strayed"] == [code]
    charged, released = (
        sum(entry["type"] == kind for entry in entries) for kind in ("charge", "release")
    )
    assert charged == released + 1
    predicate = verify(bundle(**PLAN)[0], trusting(KEY.public)).predicate
    result = check_conformance((out / "record.jsonl").read_bytes(), predicate)
    assert {finding.code for finding in result.findings} == {"unfinished"}


# ---- tensors outside of the model --------------------------------------------------------

torch.manual_seed(1)
TENSOR = torch.zeros(1, requires_grad=True)
FOREIGN: dict[str, tuple[list[Tensor], Callable[[Tensor], Tensor]]] = {}


def foreign(name: str, module: nn.Module, call: Callable[[Any, Tensor], Tensor]) -> None:
    """Add a term of the model's outputs (n,) that trains ``module``."""
    FOREIGN[name] = list(module.parameters()), lambda z: call(module, z)


foreign("head", nn.Linear(1, 1), lambda m, z: m(z[:, None]).squeeze(1))
foreign("frozen in part", nn.LayerNorm(1, bias=False), lambda m, z: m(z[:, None]).squeeze(1))
foreign(
    "discriminator",
    nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1)),
    lambda m, z: functional.softplus(m(z[:, None]).squeeze(1)),
)
foreign("convolution", nn.Conv1d(1, 1, 1), lambda m, z: m(z[:, None, None]).flatten())
foreign("table", nn.Embedding(2, 1), lambda m, z: m((z > 0).long()).squeeze(1) * z)
foreign("prototypes", nn.ParameterList([nn.Parameter(torch.ones(2))]), lambda m, z: z * m[0].sum())
UNCERTAINTY = nn.Parameter(torch.zeros(1))
FOREIGN["uncertainty"] = (
    [UNCERTAINTY],
    lambda z: (-UNCERTAINTY).exp() * z.square() + UNCERTAINTY,
)


@pytest.mark.by_turns
@pytest.mark.parametrize("name", FOREIGN)
def test_a_head_outside_of_the_model_gets_no_raw_gradient(tmp_path: Path, name: str) -> None:
    tensors, term = FOREIGN[name]
    switch = Switch()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0]).squeeze(1)
        return (z - batch[1]).square() + (term(z) if switch.on else 0.0)

    run = go_astray(tmp_path / "run", network(), loss, switch)
    assert all(item.grad is None for item in tensors)
    require_recorded(tmp_path / "run", "foreign_tensor")
    run.close()


def test_a_tensor_that_is_no_parameter_gets_no_raw_gradient(tmp_path: Path) -> None:
    switch = Switch()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return losses(model, batch) * (TENSOR.exp() if switch.on else 1.0)

    run = begin_run(tmp_path / "run", network(), losses=loss)
    switch.on = True

    def go() -> None:
        for batch in islice(run, 2):  # the first time, it may be an activation
            take_step(run, batch)
            assert TENSOR.grad is None

    with pytest.raises(UnsupportedModel, match=r"shape \(1,\)"):
        go()
    run.close()


# ---- losses that begin to mix records ------------------------------------------------------

TERMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda z, y: (z - y).square() + 0.5 * (z - z.mean()).square(),
    "detached mean": lambda z, y: (z - z.detach().mean() - y).square(),
    "maximum": lambda z, y: (z / z.abs().max() - y).square(),
    "sorted": lambda z, y: (z.sort().values - y).square(),
    "softmax": lambda z, y: (z.softmax(0) - y).square(),
    "cumulative": lambda z, y: (z.cumsum(0) - y).square(),
    "rolled": lambda z, y: (z + 0.1 * z.roll(1) - y).square(),
    "contrast": lambda z, y: -(z[:, None] @ z[None]).log_softmax(1).diagonal() + 0 * y,
    "batch norm": lambda z, y: (functional.batch_norm(
        z[:, None], None, None, training=True).squeeze(1) - y).square(),
    "shared weight": lambda z, y: (z - y).square() / (1 + (z - y).square().detach().sum()),
    "number of records": lambda z, y: (z - y).square() / len(z),
    "place": lambda z, y: (z - y).square() * torch.linspace(1, 3, len(z)),
    "one for all": lambda z, y: (z - y).square().mean().expand(len(z)),
}  # fmt: skip


@pytest.mark.by_turns
@pytest.mark.parametrize("name", TERMS)
def test_a_term_of_several_records_stops_at_its_step(tmp_path: Path, name: str) -> None:
    switch = Switch()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        z, y = model(batch[0]).squeeze(1), batch[1]
        return TERMS[name](z, y) if switch.on else (z - y).square()

    run = go_astray(tmp_path / "run", network(), loss, switch)
    require_recorded(tmp_path / "run", "mixed_records")
    run.close()


class Switched(nn.Module):
    """Two layers that mix records where an attribute says so, on the inputs or between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.centring, self.share, self.kind = False, 0.0, "record"
        self.act: Any = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        """(n, 1)."""
        x = x - x.mean(0) if self.kind == "batch" else x
        x = (1 - self.share) * x + self.share * x.flip(0)
        h = self.act(self.first(x))
        return self.last(h - h.mean(0) if self.centring else h)


def over_records(h: Tensor) -> Tensor:
    """A softmax in the wrong dimension."""
    return h.softmax(0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("centring", True), ("share", 0.3), ("kind", "batch"), ("act", over_records)],
)
def test_an_attribute_that_begins_to_mix_records_stops_at_its_step(
    tmp_path: Path, name: str, value: Any
) -> None:
    model = Switched()
    run = begin_run(tmp_path / "run", model, batch_size=10, plan=PLAN)
    for place, batch in enumerate(islice(run, SWITCH_AT + 1)):
        if place < SWITCH_AT:
            take_step(run, batch)
            continue
        setattr(model, name, value)
        with pytest.raises(MixedRecords):
            run.loss(batch)
        setattr(model, name, Switched().__dict__.get(name))  # corrected, so that it goes on
        run.loss(batch)
    run.close()
    require_recorded(tmp_path / "run", "mixed_records")


def test_a_statistic_of_the_first_records_stops_at_its_step(tmp_path: Path) -> None:
    class Started(Switched):
        start: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            if self.centring and self.start is None:
                self.start = h.detach().mean(0)
            return self.last(h if self.start is None else h - self.start)

    model = Started()
    run = begin_run(tmp_path / "run", model, batch_size=10, plan=PLAN)
    for place, batch in enumerate(islice(run, SWITCH_AT + 1)):
        if place < SWITCH_AT:
            take_step(run, batch)
            continue
        model.centring = True
        with pytest.raises(MixedRecords):
            run.loss(batch)
    run.close()
    require_recorded(tmp_path / "run", "mixed_records")


def test_what_a_model_keeps_of_shapes_alone_changes_nothing(tmp_path: Path) -> None:
    class Cached(Switched):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.zeros(0), persistent=False)
            self.seen: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if not len(self.scale):
                self.scale = torch.full(x.shape[1:], 0.5)
            self.seen = x.detach()
            return super().forward(x * self.scale)

    model = Cached()
    run = begin_run(tmp_path / "run", model, batch_size=10, plan=PLAN)
    assert not len(model.scale)
    assert model.seen is None
    for batch in islice(run, SWITCH_AT):
        take_step(run, batch)
    run.close()


def test_a_branch_that_an_outlier_takes_stops_at_its_step(tmp_path: Path) -> None:
    class Rescued(Switched):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.last(h / h.abs().max() if h.abs().max() > 50 else torch.tanh(h))

    x = DATA.x.clone()
    x[31] = 1e3
    run = begin_run(
        tmp_path / "run",
        Rescued(),
        loader=DataLoader(TensorDataset(x, DATA.y), batch_size=RECORDS),
        plan=PLAN,
    )
    with pytest.raises(MixedRecords):
        run.loss(next(iter(run)))
    run.close()


def test_mixup_that_is_rare_stops_where_it_draws(tmp_path: Path) -> None:
    class Mixing(Switched):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and float(torch.rand(())) < 0.05:
                x = 0.7 * x + 0.3 * x[torch.randperm(len(x))]
            return super().forward(x)

    def go() -> None:
        run = begin_run(
            tmp_path / "run",
            Mixing(),
            batch_size=RECORDS,
            plan={**PLAN, "steps": 300},
        )
        try:
            for batch in run:
                take_step(run, batch)
        finally:
            run.close()

    with pytest.raises(MixedRecords):
        go()


def test_what_shows_in_values_alone_is_found_where_a_microbatch_is_probed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariants, "REPROBED_SHARE", 1.0)
    switch = Switch()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return losses(model, (x, (y + y.mean()) / 2 if switch.on else y))

    run = go_astray(tmp_path / "run", network(), loss, switch)
    require_recorded(tmp_path / "run", "mixed_records")
    run.close()


def test_the_share_that_is_probed_again_at_random() -> None:
    drawn = Reprobing(_random=random.Random(3))
    counts = [drawn.count_passes(graph=1) for _ in range(64_000)]
    assert counts[:2] == [3, 1]
    assert abs(sum(counts[1000:]) / 63_000 / invariants.REPROBED_SHARE - 1) < 0.15
    changing = Reprobing(_random=random.Random(3))
    counts = [changing.count_passes(graph=place) for place in range(64_000)]
    assert sum(counts) / 64_000 < invariants.REPROBED_SHARE + 3 / 512 + 0.01


# ---- hooks of the optimiser ------------------------------------------------------------------


@pytest.mark.by_turns
@pytest.mark.parametrize("when", ["pre", "post", "everywhere"])
@pytest.mark.parametrize("late", [True, False])
def test_a_hook_of_the_optimiser_that_writes_stops_the_run(
    tmp_path: Path, when: str, late: bool
) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def write(at: Any, *_: Any) -> None:
        for item in at.param_groups[0]["params"]:
            (item.grad if when == "pre" else item).data.add_(float(DATA.x[0].sum()))

    def add() -> Any:
        if when == "everywhere":
            return register_optimizer_step_post_hook(write)
        return getattr(optimizer, f"register_step_{when}_hook")(write)

    handle = None if late else add()
    run = begin_run(tmp_path / "run", model, optimizer=optimizer, batch_size=RECORDS, plan=PLAN)
    batch = next(iter(run))
    handle = handle or add()
    try:
        with pytest.raises(STRAYED):
            take_step(run, batch)
    finally:
        handle.remove()
    run.close()
    require_recorded(
        tmp_path / "run", "noise_not_certified" if when == "pre" else "changed_weights"
    )


def test_a_hook_of_the_optimiser_that_only_looks_changes_nothing(tmp_path: Path) -> None:
    model, seen = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda at, *_: seen.append(at.param_groups[0]["lr"]))
    optimizer.register_step_post_hook(lambda *_: seen.append(0.0))
    run = begin_run(tmp_path / "run", model, optimizer=optimizer)
    for batch in run:
        take_step(run, batch)
    assert len(seen) == 2 * run.step
    assert len(optimizer._optimizer_step_post_hooks) == 1


# ---- rows that a mask picks --------------------------------------------------------------------

IDS = torch.randint(0, 9, (RECORDS, 4), generator=torch.Generator().manual_seed(2))
ONCE = torch.zeros(RECORDS, 4, dtype=torch.bool)
ONCE[:, 1] = True
UNEVEN = ONCE.clone()
UNEVEN[40, 2], UNEVEN[41] = True, False


class Masked(nn.Module):
    """A head on the masked tokens, as masked language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 3), nn.Linear(3, 9)


Pick = Callable[[Masked, Tensor, Tensor], Tensor]
PICKS: dict[str, Pick] = {
    "index": lambda m, ids, mask: m.head(m.words(ids)[mask]),
    "places": lambda m, ids, mask: m.head(m.words(ids)[mask.nonzero(as_tuple=True)]),
    "flat": lambda m, ids, mask: m.head(m.words(ids).flatten(0, 1)[mask.flatten()]),
    "rows": lambda m, ids, mask: m.head(
        m.words(ids).flatten(0, 1).index_select(0, mask.flatten().nonzero().squeeze(1))
    ),
    "selected": lambda m, ids, mask: m.head(
        m.words(ids).masked_select(mask[..., None]).view(-1, 3)
    ),
    "words": lambda m, ids, mask: m.head(m.words(ids[mask][:, None])).squeeze(1),
    "between": lambda m, ids, mask: m.head(torch.tanh(2 * m.words(ids)[mask] + 1)),
}


@pytest.mark.by_turns
@pytest.mark.parametrize("pick", PICKS)
def test_more_masked_rows_of_one_record_than_of_another_stop_the_run(
    tmp_path: Path, pick: str
) -> None:
    def masked(model: Any, batch: Any) -> Tensor:
        ids, mask = batch
        picked = functional.cross_entropy(
            PICKS[pick](model, ids, mask), ids[mask], reduction="none"
        )
        return torch.zeros(len(ids)).index_add(0, mask.nonzero()[:, 0], picked)

    for mask in (ONCE, UNEVEN):
        run = begin_run(
            tmp_path / f"run-{mask is ONCE}",
            Masked(),
            losses=masked,
            loader=DataLoader(TensorDataset(IDS, mask), batch_size=RECORDS),
            plan=PLAN,
        )
        batch = next(iter(run))
        if mask is ONCE:
            take_step(run, batch)
        else:
            with pytest.raises(MixedRecords):
                run.loss(batch)
            require_strayed(tmp_path / "run-False", "rows_of_a_mask")
        run.close()


def require_strayed(out: Path, code: str) -> None:
    """The record's last line names ``code``."""
    assert entries_of(out)[-1]["code"] == code
