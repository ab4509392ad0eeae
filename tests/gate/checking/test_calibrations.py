"""Noise that a script calibrates by Opacus' ``get_noise_multiplier``, and how far it is read."""

from __future__ import annotations

import math
from typing import Any

import pytest
from opacus.accountants.utils import get_noise_multiplier

from affidavit.accountants import opacus_noise_multiplier
from affidavit.importers.scripts import importer
from affidavit.plan import MalformedPlan

RECORDS, BATCH, EPOCHS = 1003, 100, 4
SCRIPT = """\
import math
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from torch.utils.data import DataLoader
EPOCHS = 4
train = load()
test = load()
loader = DataLoader(train, batch_size=100)
{before}
sigma = get_noise_multiplier({arguments})
model, optimizer, loader = PrivacyEngine().make_private(
    module=m, optimizer=o, data_loader=loader, noise_multiplier=sigma, max_grad_norm=1.0)
for epoch in range(EPOCHS):
    for x in loader:
        loss(model(x)).backward()
        optimizer.step()
# affidavit: dataset_size=1003 adjacency=zero_out
"""
TARGET = "target_epsilon=3.0, target_delta=1e-5, "


def plan_of(arguments: str, before: str = "", change: tuple[str, str] = ("", "")) -> dict[str, Any]:
    text = SCRIPT.format(arguments=TARGET + arguments, before=before).replace(*change)
    partial = importer.read(text.encode())
    assert partial is not None
    return partial.completed({}, "train.py", opacus_noise_multiplier)


@pytest.mark.ordinary("sample_rate=q, steps*")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("arguments", "before", "rate", "steps"),
    [
        ("sample_rate=1 / len(loader), epochs=EPOCHS", "", 1 / 11, 44),
        ("sample_rate=q, steps=n", "q = 100 / len(train)\nn = EPOCHS * len(loader)",
         BATCH / RECORDS, 44),
        ("sample_rate=q, epochs=EPOCHS // 2", "q = 100 / len(loader.dataset)", BATCH / RECORDS,
         math.floor(EPOCHS // 2 * RECORDS / BATCH)),
    ],
)  # fmt: skip
def test_the_noise_is_what_opacus_gives_for_these_arguments(
    arguments: str, before: str, rate: float, steps: int
) -> None:
    plan = plan_of(arguments, before)
    assert plan["releases"][0]["noise_multiplier"] == get_noise_multiplier(
        target_epsilon=3.0, target_delta=1e-5, sample_rate=rate, steps=steps
    )
    assert plan["target"] == {"epsilon": 3.0, "delta": 1e-5}
    assert plan["steps"] == EPOCHS * math.ceil(RECORDS / BATCH)


@pytest.mark.ordinary("not *-change4")
@pytest.mark.parametrize(
    ("arguments", "before", "change"),
    [
        ("sample_rate=q, epochs=EPOCHS", "q = 100 / len(test)", ("", "")),
        ("sample_rate=0.1, epochs=EPOCHS, epsilon_tolerance=1.0", "", ("", "")),
        ("sample_rate=0.1, epochs=EPOCHS", "", ("=sigma", "=sigma / 2")),
        ("sample_rate=0.1, epochs=EPOCHS", "", ("from opacus.accountants.utils", "from mine")),
        ("sample_rate=0.1, epochs=EPOCHS", "", ("=1003", "=1003 noise_multiplier=9.0")),
        ("sample_rate=0.1, epochs=EPOCHS", "", ("=1003", "=1003 target_epsilon=9.0")),
        ("sample_rate=0.1, epochs=EPOCHS", "# affidavit: target_delta=1e-6",
         ("1e-5", "1e-3 / len(train)")),
    ],
)  # fmt: skip
def test_noise_that_is_not_its_result_is_refused(
    arguments: str, before: str, change: tuple[str, str]
) -> None:
    with pytest.raises(MalformedPlan):
        plan_of(arguments, before, change)
