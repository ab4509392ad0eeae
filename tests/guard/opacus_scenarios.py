"""Runs of the real Opacus, right and wrong, each without the guard and with it.

Forked by ``test_opacus.py`` with two arguments, the folder of the bundles and a file for one JSON
object: by scenario, what came of it unguarded (``finished`` or an exception) or guarded (the stop's
code, the releases before it, whether parameters changed).
"""

from __future__ import annotations

import contextlib
import io
import json
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from affidavit import guard
from affidavit.library.keys import trusted

RECORDS, LOT, STEPS, SIGMA, CLIP = 600, 64, 8, 1.2, 1.0


@dataclass
class Setting:
    """What a scenario changes of the right run."""

    bundle: str = "flat"
    sigma: float = SIGMA
    clip: Any = CLIP
    batch: int = LOT
    steps: int = STEPS
    make: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    guarded: dict[str, Any] = field(default_factory=dict)
    matrices_only: bool = False
    before_step: Callable[[int, Any], None] = lambda _step, _run: None
    after: Callable[[Any], None] = lambda _run: None
    physical: int | None = None
    lots_per_step: int = 1
    scheduler: bool = False
    own_loader: bool = False


class Run:
    """One run of Opacus, from its model to its last step."""

    def __init__(self, setting: Setting, folder: Path, record: Path | None) -> None:
        torch.manual_seed(7)
        self.setting, self.guard = setting, None
        self.model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
        self.data = TensorDataset(torch.randn(RECORDS, 12), torch.randint(0, 4, (RECORDS,)))
        loader = DataLoader(self.data, batch_size=setting.batch, **setting.loader)
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim == 2]
        if setting.matrices_only:
            private: Any = optim.Muon(matrices, lr=0.02)
            biases = [entry for entry in self.model.parameters() if entry.ndim < 2]
            self.plain: Any = optim.AdamW(biases, lr=0.01)
        else:
            private, self.plain = optim.SGD(self.model.parameters(), lr=0.1), None
        self.engine, self.criterion = PrivacyEngine(), nn.CrossEntropyLoss()
        created = self.engine.make_private(
            module=self.model, optimizer=private, data_loader=loader, criterion=self.criterion,
            noise_multiplier=setting.sigma, max_grad_norm=setting.clip, **setting.make,
        )  # fmt: skip
        if len(created) == 4:
            self.private, self.optimizer, self.criterion, self.loader = created
        else:
            self.private, self.optimizer, self.loader = created
        setting.after(self)
        self.before = [item.detach().clone() for item in self.model.parameters()]
        if record is not None:
            self.guard = guard.opacus(
                self.engine, self.optimizer, self.loader, folder / f"{setting.bundle}.json",
                trusted=trusted(folder / "keys.json"), record=record, **setting.guarded,
            )  # fmt: skip

    @property
    def changed(self) -> bool:
        """Whether a parameter is not what it was before the guard looked."""
        return any(
            not torch.equal(one, other)
            for one, other in zip(self.before, self.model.parameters(), strict=True)
        )

    def train(self) -> None:
        """The loop."""
        loader = self.loader
        if self.setting.own_loader:
            loader = DataLoader(self.data, batch_size=LOT, shuffle=True)
        scheduled = self.setting.scheduler
        rates = optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9) if scheduled else None
        if self.setting.physical is None:
            self.epochs(loader, rates)
            return
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=self.setting.physical,
            optimizer=self.optimizer,
        ) as split:  # fmt: skip
            self.epochs(split, rates)

    def epochs(self, loader: Any, rates: Any) -> None:
        """Real steps until there are as many as the setting says."""
        taken = batches = 0
        while True:
            for inputs, targets in loader:
                self.setting.before_step(taken, self)
                self.optimizer.zero_grad()
                batches += 1
                if self.setting.lots_per_step > 1:
                    self.optimizer.signal_skip_step(batches % self.setting.lots_per_step != 0)
                self.criterion(self.private(inputs), targets).backward()
                if self.plain is not None:
                    self.plain.step()
                    self.plain.zero_grad()
                self.optimizer.step()
                if rates is not None:
                    rates.step()
                taken += not self.optimizer._is_last_step_skipped
                if taken == self.setting.steps:
                    return


def reseeded(_step: int, _run: Any) -> None:
    torch.manual_seed(1)


def noiseless(run: Run) -> None:
    """An ``add_noise`` that somebody switched off while looking for a mistake."""

    def add_noise() -> None:
        for param in run.optimizer.params:
            param.grad = param.summed_grad.clone()

    run.optimizer.add_noise = add_noise


def one_tensor_noiseless(run: Run) -> None:
    """The noise is drawn for every tensor but the last bias."""
    add_noise = run.optimizer.add_noise

    def all_but_one() -> None:
        add_noise()
        run.optimizer.params[-1].grad = run.optimizer.params[-1].summed_grad.clone()

    run.optimizer.add_noise = all_but_one


def half_noise(run: Run) -> None:
    """Noise of half the standard deviation that the optimiser says."""
    add_noise = run.optimizer.add_noise

    def halved() -> None:
        run.optimizer.noise_multiplier /= 2
        add_noise()
        run.optimizer.noise_multiplier *= 2

    run.optimizer.add_noise = halved


def bypassed(step: int, run: Run) -> None:
    """One update by the optimiser inside, with gradients that got no noise."""
    if step == 3:
        for parameter in run.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        run.optimizer.original_optimizer.step()


def decayed(step: int, run: Run) -> None:
    """What a noise scheduler does."""
    run.optimizer.noise_multiplier = SIGMA * 0.9**step


def unfrozen(run: Run) -> None:
    """A tensor frozen while make_private looked."""
    run.model.register_parameter("extra", nn.Parameter(torch.zeros(3)))


def clipped_higher(run: Run) -> None:
    """Ghost clipping clips to its module's norm; the optimiser's only scales the noise."""
    run.private.max_grad_norm = 5.0


def used_before(run: Run) -> None:
    run.engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)


weights = torch.rand(RECORDS)
OPACUS = {"generator": "opacus"}
SCENARIOS: dict[str, Setting] = {
    "right": Setting(),
    "right, noise of Opacus": Setting(guarded=OPACUS),
    "right, ghost clipping": Setting(make={"grad_sample_mode": "ghost"}),
    "right, virtual steps": Setting(physical=16),
    "right, ghost and virtual steps": Setting(make={"grad_sample_mode": "ghost"}, physical=16),
    "right, worker processes": Setting(loader={"num_workers": 2}),
    "right, learning rates": Setting(scheduler=True),
    "right, per layer": Setting(
        bundle="layers", sigma=SIGMA, clip=[CLIP] * 4, make={"clipping": "per_layer"}
    ),
    "right, more noise": Setting(sigma=2.0),
    "sigma": Setting(sigma=1.0),
    "clip": Setting(clip=1.5),
    "ghost clip": Setting(make={"grad_sample_mode": "ghost"}, after=clipped_higher),
    "accumulated ghosts": Setting(make={"grad_sample_mode": "ghost"}, lots_per_step=2),
    "shuffled": Setting(make={"poisson_sampling": False}, loader={"shuffle": True}),
    "weighted": Setting(loader={"sampler": WeightedRandomSampler(weights, 200)}),
    "weighted lots": Setting(
        make={"poisson_sampling": False},
        loader={"sampler": WeightedRandomSampler(weights, RECORDS)},
    ),
    "lot": Setting(batch=128),
    "Muon and AdamW": Setting(matrices_only=True, make={"grad_sample_mode": "ghost"}),
    "too many steps": Setting(steps=STEPS + 2),
    "reseeded": Setting(before_step=reseeded),
    "reseeded, noise of Opacus": Setting(before_step=reseeded, guarded=OPACUS),
    "noiseless": Setting(after=noiseless),
    "one tensor noiseless": Setting(after=one_tensor_noiseless, guarded=OPACUS),
    "half the noise": Setting(after=half_noise),
    "bypassed": Setting(before_step=bypassed),
    "noise decays": Setting(before_step=decayed),
    "accumulated lots": Setting(lots_per_step=2),
    "other loader": Setting(own_loader=True),
    "new tensor": Setting(after=unfrozen),
    "used before": Setting(after=used_before),
    "adaptive clipping": Setting(
        make={
            "clipping": "adaptive",
            "target_unclipped_quantile": 0.5,
            "clipbound_learning_rate": 0.2,
            "max_clipbound": 10.0,
            "min_clipbound": 0.1,
            "unclipped_num_std": 1.0,
        }
    ),
}


def unguarded(setting: Setting, folder: Path) -> str:
    """What came of one scenario without the guard."""
    try:
        Run(setting, folder, None).train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "finished"


def outcome(name: str, setting: Setting, folder: Path) -> dict[str, Any]:
    """What came of one scenario with the guard."""
    result: dict[str, Any] = {}
    record = folder / name.replace(" ", "_").replace(",", "")
    run = None
    try:
        run = Run(setting, folder, record)
        run.train()
        result["guarded"] = None
    except guard.GuardStop as stop:
        result["guarded"] = stop.code
        result["message"] = str(stop)
    except Exception:
        result["guarded"] = traceback.format_exc()
    result["changed"] = run is not None and run.changed
    lines = (record / "record.jsonl").read_text().splitlines() if record.exists() else []
    result["released"] = sum(json.loads(line)["type"] == "release" for line in lines)
    result["record"] = str(record / "record.jsonl")
    result["accounted"] = [] if run is None else run.engine.accountant.history
    result["notes"] = [] if run is None or run.guard is None else list(run.guard.notes)
    return result


def prepare() -> None:
    """All that they need is imported with this module."""


def main(arguments: Sequence[str]) -> None:
    """Write what came of every scenario."""
    warnings.simplefilter("ignore")
    folder, results = map(Path, arguments[:2])
    with contextlib.redirect_stdout(io.StringIO()):
        outcomes = {
            name: unguarded(setting, folder)
            if "unguarded" in arguments
            else outcome(name, setting, folder)
            for name, setting in SCENARIOS.items()
        }
    results.write_text(json.dumps(outcomes))
