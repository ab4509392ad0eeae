"""What one step of an Opacus script releases: one clipped lot, or what is not certified."""

from __future__ import annotations

import pytest

from affidavit.importers import scripts

HEAD = """\
from opacus import PrivacyEngine
from torch.utils.data import DataLoader
loader = DataLoader(data, batch_size=6)
engine = PrivacyEngine()
"""
ARGUMENTS = "module=m, optimizer=o, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0"
PRIVATE = f"model, optimizer, loader = engine.make_private({ARGUMENTS})\n"
GHOST = (
    "model, optimizer, criterion, loader = "
    f"engine.make_private({ARGUMENTS}, criterion=c, grad_sample_mode='ghost')\n"
)
EACH = "for e in range(3):\n    for i, x in enumerate(loader):\n"
LOSS = "        loss = criterion(model(x), y)\n        loss.backward()\n        optimizer.step()\n"
TRAIN = "def train(model, criterion, loader, optimizer):\n    for x in loader:\n" + LOSS


def broken(text: str) -> set[str]:
    partial = scripts.read((HEAD + text).encode())
    assert partial is not None
    return {item.code for item in partial.broken} - {"private_divisor"}


@pytest.mark.parametrize(
    "body",
    [
        "        f(x).backward()\n        if i % 4 == 0:\n            optimizer.step()\n",
        "        f(x).backward()\n        if i % 4:\n            continue\n"
        "        optimizer.step()\n",
        "        form(x)\n        if i % 4 == 0:\n            optimizer.step()\n",
        "        f(x).backward()\n    optimizer.step()\n",
        "        f(x).backward()\n        optimizer.signal_skip_step(i % 2)\n"
        "        optimizer.step()\n",
        "        f(x).backward()\n        if i % 2:\n            optimizer.virtual_step()\n"
        "        else:\n            optimizer.step()\n",
    ],
)
def test_a_step_that_sums_several_poisson_lots_is_not_certified(body: str) -> None:
    assert broken(PRIVATE + EACH + body) == {"accumulated_lots"}
    shuffled = PRIVATE.replace("1.0)", "1.0, poisson_sampling=False)")
    assert broken(shuffled + EACH + body) == set()


@pytest.mark.parametrize(
    "body",
    [
        "        f(x).backward()\n        optimizer.step()\n",
        "        f(x).backward()\n        if True:\n            optimizer.step()\n",
        "        if i == 0:\n            continue\n        f(x).backward()\n"
        "        optimizer.step()\n",
    ],
)
def test_a_step_for_each_lot_is(body: str) -> None:
    assert broken(PRIVATE + EACH + body) == set()


@pytest.mark.parametrize(
    "body",
    [
        "        if len(x):\n            f(x).backward()\n            optimizer.step()\n",
        "        if x.size(0) == 0:\n            continue\n"
        "        f(x).backward()\n        optimizer.step()\n",
        "        loss = f(x)\n        if not isfinite(loss):\n            continue\n"
        "        loss.backward()\n        optimizer.step()\n",
        "        try:\n            f(x).backward()\n            optimizer.step()\n"
        "        except RuntimeError:\n            pass\n",
    ],
)
def test_a_lot_that_its_own_records_can_skip_is_not_certified(body: str) -> None:
    assert broken(PRIVATE + EACH + body) == {"skipped_lots"}


@pytest.mark.parametrize("test", ["i < START", "args.resume and i < args.start", "step < 100"])
def test_what_is_settled_before_the_loop_may_skip_a_lot(test: str) -> None:
    body = f"        if {test}:\n            continue\n        step += 1\n"
    body += "        f(x).backward()\n        optimizer.step()\n"
    assert broken(PRIVATE + EACH + body) == set()


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (GHOST + EACH + LOSS, set()),
        (TRAIN + GHOST + "for e in range(3):\n    train(model, criterion, loader, optimizer)\n",
         set()),
        (GHOST + EACH + LOSS.replace("criterion(", "F.nll("), {"unclipped_loss"}),
        (GHOST + "criterion = CrossEntropyLoss()\n" + EACH + LOSS, {"unclipped_loss"}),
        (TRAIN + GHOST + "train(model, CrossEntropyLoss(), loader, optimizer)\n",
         {"unclipped_loss"}),
        (PRIVATE.replace("1.0)", "1.0, grad_sample_mode=mode())") + EACH + LOSS, set()),
        (GHOST.replace("'ghost'", "mode()") + EACH + LOSS.replace("criterion(", "F.nll("),
         {"unclipped_loss"}),
    ],
)  # fmt: skip
def test_ghost_clipping_clips_only_the_loss_that_it_returns(text: str, codes: set[str]) -> None:
    assert broken(text) == codes
