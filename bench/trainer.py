"""Compare a private step with a plain one, by processor time and peak memory, in one run.

A GPT, a Llama, a ResNet-18 with group normalisation and a model of many small tensors
(``bench/trainer_models.py``) take whole steps: private ones as the trainer takes them (its machine
under DP-Muon: lot, clipping with every hidden matrix a block and the rest one auxiliary block,
noise, Newton-Schulz, update), plain ones with the same update from the gradient of the mean loss.
Beside them stands the part that clipping changes, forward and backward alone, next to Opacus' ghost
clipping and ``vmap(grad)`` on the same model, and to fast-differential-privacy where it is
installed: it is on no package index (``pip install
git+https://github.com/awslabs/fast-differential-privacy``).

Each kind has a process of its own, so that the peak of its memory is its own. Times are
processor time of single steps, alternated between the processes by turns of ``STEPS``; the
ratio is that of medians, with the least and the largest ratio of a turn as its spread.

    make bench BENCHES=trainer
    python -m bench.trainer resnet
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import importlib
import itertools
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from bench.trainer_models import LOT, SHAPES, Shape

TURNS, STEPS = 7, 3


def plan_of(shape: Shape, model: nn.Module) -> Any:
    """Return a DP-Muon plan with the whole of ``LOT`` records at every step."""
    from affidavit.plan import plan_from

    return plan_from(
        {
            "version": 1,
            "dataset": {"size": LOT},
            "adjacency": "add_remove",
            "sampling": {"scheme": "full_batch"},
            "steps": 1_000_000,
            "releases": [
                {
                    "name": "hidden",
                    "count": len(shape.hidden(model)),
                    "clip_norm": 0.1,
                    "noise_multiplier": 1.0,
                },
                {"name": "auxiliary", "clip_norm": 0.1, "noise_multiplier": 1.0},
            ],
            "optimizer": {"name": "dp_muon", "learning_rate": 1e-4},
            "target": {"delta": 1e-3},
        }
    )


def plain(shape: Shape, model: nn.Module) -> Callable[[], None]:
    """Return a Muon step without privacy."""
    from affidavit.trainer.optimizers.inputs import optimizer_inputs
    from affidavit.trainer.optimizers.registry import optimizer_of

    of = dict(model.named_parameters())
    hidden = {name: of.pop(name) for name in shape.hidden(model)}
    inputs = optimizer_inputs(plan_of(shape, model), {"hidden": hidden, "auxiliary": of})
    optimizer = optimizer_of(inputs)

    def step() -> None:
        shape.losses(model, *shape.data()).mean().backward()
        optimizer.step()

    return step


class Adapter:
    """The model and its one lot, as the trainer sees them."""

    digest = "sha256:" + "0" * 64

    def __init__(self, shape: Shape, model: nn.Module) -> None:
        self.shape, self.module = shape, model

    def losses(self, batch: Any) -> Tensor:
        """(n,)."""
        return self.shape.losses(self.module, *batch)

    def blocks(self) -> Any:
        """One block for each hidden matrix, and one for the rest."""
        from affidavit.trainer.models.layout import group_hidden_matrices

        return group_hidden_matrices(self.module, {"hidden": self.shape.hidden(self.module)})

    def made_up(self, records: int) -> Any:
        """Return part of the lot as made-up records."""
        return tuple(item[:records] for item in self.shape.data())

    def __len__(self) -> int:
        return LOT

    def collate(self, indices: Tensor) -> Any:
        """Return the records of the lot."""
        return tuple(item[indices] for item in self.shape.data())


def private(shape: Shape, model: nn.Module) -> Callable[[], None]:
    """Return the trainer's own step."""
    from affidavit.assessment import Execution
    from affidavit.trainer.distributed.peers import Peers
    from affidavit.trainer.noise.chacha import Ratchet
    from affidavit.trainer.run_config import RunConfig
    from affidavit.trainer.settings import Settings
    from affidavit.trainer.steps.training_state import RunKeys, TrainingState

    plan, adapter = plan_of(shape, model), Adapter(shape, model)
    config = RunConfig(
        certificate_id="bench", plan_digest="", plan=plan, execution=Execution.of(plan),
        strategies=(None,), guarantee={},
    )  # fmt: skip
    machine = TrainingState(
        config, adapter, adapter, settings=Settings(device="cpu", microbatch=LOT),
        peers=Peers.alone(), keys=RunKeys(lots=bytes(32), probes=bytes(32)),
    )  # fmt: skip
    steps, ratchet = itertools.count(), Ratchet(bytes(32))

    def step() -> None:
        machine.step(next(steps), ratchet, lambda _: None)

    return step


def plain_gradients(shape: Shape, model: nn.Module) -> Callable[[], None]:
    """Return a forward and backward pass."""
    return lambda: shape.losses(model, *shape.data()).mean().backward()


def private_gradients(shape: Shape, model: nn.Module) -> Callable[[], None]:
    """Return a forward and backward pass that computes clipped sums."""
    from affidavit.trainer.clipping.private_model import PrivateModel
    from affidavit.trainer.clipping.requirements import BlockSpec

    hidden = shape.hidden(model)
    rest = tuple(name for name, _ in model.named_parameters() if name not in hidden)
    blocks = [BlockSpec(name=name, clip_norm=0.1, names=(name,)) for name in hidden]
    held = PrivateModel(model, [*blocks, BlockSpec(name="rest", clip_norm=0.1, names=rest)])

    def step() -> None:
        held.accumulate(lambda: shape.losses(model, *shape.data()), records=LOT)

    return step


def opacus(shape: Shape, model: nn.Module) -> Callable[[], None]:
    """Return a step with Opacus' ghost clipping: two backward passes, one norm."""
    warnings.simplefilter("ignore")
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    held = GradSampleModuleFastGradientClipping(model, max_grad_norm=0.1, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(held.parameters(), lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=0.1,
        expected_batch_size=LOT,
        loss_reduction="mean",
    )
    criterion = DPLossFastGradientClipping(
        held, optimizer, nn.CrossEntropyLoss(reduction="mean"), loss_reduction="mean"
    )
    inputs, targets = shape.data()

    def step() -> None:
        loss = criterion(held(inputs).flatten(0, -2), targets.flatten(), shape=shape.logits)
        loss.backward()

    return step


def fast_dp(shape: Shape, model: nn.Module) -> Callable[[], None]:
    """Return a step with fast-differential-privacy: one backward pass, one norm."""
    engine_of: Any = importlib.import_module("fastDP").PrivacyEngine
    with redirect_stdout(sys.stderr):  # it prints, and this process answers on that stream
        engine = engine_of(
            model,
            batch_size=LOT,
            sample_size=LOT,
            epochs=1,
            noise_multiplier=0.0,
            max_grad_norm=0.1,
            clipping_mode="MixOpt",
            clipping_fn="Abadi",
        )
        engine.attach(torch.optim.SGD(model.parameters(), lr=0.0))
    return plain_gradients(shape, model)


def vmap_gradients(shape: Shape, model: nn.Module) -> Callable[[], None]:
    """Return the clipped sums of ``vmap(grad)``, with the blocks of ``private_gradients``."""
    parameters = {name: item.detach() for name, item in model.named_parameters()}
    hidden = set(shape.hidden(model))
    blocks = [[name] for name in hidden]
    blocks.append([name for name in parameters if name not in hidden])

    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            return shape.losses(self.model, inputs, targets)

    losses = Losses()

    def loss(values: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        of = {f"model.{name}": item for name, item in values.items()}
        return functional_call(losses, of, (inputs[None], targets[None]))[0]

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))

    def step() -> None:
        found = gradients(parameters, *shape.data())
        for names in blocks:
            norms = torch.stack([found[name].flatten(1).norm(dim=1) for name in names])
            weights = (0.1 / norms.norm(dim=0)).clamp(max=1)
            for name in names:
                torch.tensordot(weights, found[name], dims=1)

    return step


KINDS: dict[str, Callable[[Shape, nn.Module], Callable[[], None]]] = {
    "plain": plain,
    "private": private,
    "plain gradients": plain_gradients,
    "private gradients": private_gradients,
    "opacus gradients": opacus,
    "vmap gradients": vmap_gradients,
    "fast-differential-privacy gradients": fast_dp,
}
BASES = {"plain": "plain", "private": "plain"}
"""What a kind is compared with, where it is not plain gradients."""


def serve(name: str, kind: str) -> None:
    """Answer each line with the processor times of ``STEPS`` steps and the peak memory."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = SHAPES[name]
    model = shape.build()
    step = KINDS[kind](shape, model)

    def once() -> float:
        model.zero_grad(set_to_none=True)
        begin = time.process_time()
        step()
        return time.process_time() - begin

    resting = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    once()
    _print("ready")
    for _ in sys.stdin:
        times = [once() for _ in range(STEPS)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        _print(json.dumps({"times": times, "peak": peak, "resting": resting}))


def ask(server: subprocess.Popen[str]) -> dict[str, Any]:
    """Return one turn of a process."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write("go\n")
    server.stdin.flush()
    result: dict[str, Any] = json.loads(server.stdout.readline())
    return result


def start(name: str, kind: str) -> subprocess.Popen[str] | None:
    """Start and warm up a process; return None if it cannot run."""
    server = subprocess.Popen(
        [sys.executable, "-m", "bench.trainer", "serve", name, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    return server if server.stdout.readline().strip() == "ready" else None


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(names: list[str]) -> None:
    """Measure, and print a table for each shape."""
    _print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, one thread")
    for name in names or SHAPES:
        servers = {kind: start(name, kind) for kind in KINDS}
        running = {kind: server for kind, server in servers.items() if server is not None}
        turns = [{kind: ask(server) for kind, server in running.items()} for _ in range(TURNS)]
        for server in running.values():
            server.communicate()
        _print(f"\n{SHAPES[name].size}\n")
        _print("| step | seconds | over plain | spread | peak MiB | over plain | above rest |")
        _print("|---|---|---|---|---|---|---|")
        for kind in running:
            _print(row(kind, turns))
        if missing := servers.keys() - running.keys():
            _print(f"\nNot measured, because it is not installed or fails: {', '.join(missing)}.")


def row(kind: str, turns: list[dict[str, dict[str, Any]]]) -> str:
    """Return a table row; the last column excludes the memory of the idle process."""

    def median(turn: dict[str, dict[str, Any]], of: str) -> float:
        return statistics.median(turn[of]["times"])

    base = BASES.get(kind, "plain gradients")
    ratios = [median(turn, kind) / median(turn, base) for turn in turns]
    seconds = statistics.median(median(turn, kind) for turn in turns)
    mine, other = turns[-1][kind], turns[-1][base]
    above = (mine["peak"] - mine["resting"]) / (other["peak"] - other["resting"])
    return (
        f"| {kind} | {seconds:.3f} | {statistics.median(ratios):.3f} | "
        f"{min(ratios):.3f}-{max(ratios):.3f} | {mine['peak'] / 1024:.0f} | "
        f"{mine['peak'] / other['peak']:.3f} | {above:.3f} |"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
    else:
        main(sys.argv[1:])
