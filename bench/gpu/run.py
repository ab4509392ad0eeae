"""Check, time and report the trainer on a GPU, in one run of under five minutes.

GPT-2 small (124 million parameters) at T = 64, 128 and 1024, a Llama of 1.1 billion at T = 512, by
adapters and in full, ViT-B/16 and ResNet-50 with group norms, from a seed and under bfloat16
autocast. A row has the trainer's own step, DP-Muon by matrix or DP-SGD with flat clipping, beside a
plain step with the same microbatches, optimiser and types, in some rows compiled too; the private
step with each microbatch as one CUDA graph; Opacus' ghost clipping of GPT-2 where it can be
imported; memory, and the shares of noise, Newton-Schulz, noise test and sampling in the private
step. Then the row with the largest ratio is profiled. Times are medians of whole steps with the
device waited for; ratios are of one run. What is known after each row is saved in
``build/bench-gpu.json``. The table goes to the standard error, a JSON document to the standard
output. ``make bench-gpu`` runs it; by hand, with ``PYTHONPATH=.``:

    python bench/gpu/run.py              on a machine with CUDA
    python bench/gpu/run.py --twin       the same on a processor with sizes that take seconds
    python bench/gpu/run.py --markdown   print the table to the standard output, and no document

The goals, for an H200: a private step at most 1.15 times the plain one (1.20 at T = 1024; flat
1.20 and 1.30; LoRA 1.10), 1.25 times the compiled one, memory 1.05, noise 1 % and noise test
0.5 % of it.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import graph
import images
import llama
import torch
from checks import all_checks
from torch import Tensor, nn

from affidavit.assessment import Execution
from affidavit.plan import plan_from
from affidavit.trainer.distributed.peers import Peers
from affidavit.trainer.models.layout import add_lora, group_hidden_matrices, single_block
from affidavit.trainer.noise.chacha import Ratchet
from affidavit.trainer.noise.source import NoiseSource
from affidavit.trainer.optimizers.inputs import optimizer_inputs
from affidavit.trainer.optimizers.muon import map_matrices, orthogonalize
from affidavit.trainer.optimizers.registry import optimizer_of
from affidavit.trainer.run_config import RunConfig
from affidavit.trainer.settings import Settings
from affidavit.trainer.steps.training_state import RunKeys, TrainingState
from examples.train.gpt2 import GPT2, GPT2Config, LanguageModel, hidden_matrices

MAX_SECONDS = 240.0
"""After this nothing more is begun."""


Model = LanguageModel | images.ImageModel


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of one measurement; ``size`` is T, or the pixels of an image's side.

    ``rank`` is that of adapters, 0 for none. A flat case has DP-SGD with one clip norm; in a
    compiled one, the plain step is compiled too.
    """

    model: str
    size: int
    lot: int
    microbatch: int
    repeats: int
    shape: dict[str, Any]
    rank: int = 0
    kind: Literal["by matrix", "compiled", "flat"] = "by matrix"

    @property
    def is_flat(self) -> bool:
        """Whether all tensors are one block."""
        return self.kind == "flat"

    @property
    def has_images(self) -> bool:
        """Whether records are images."""
        return self.model in ("ViT-B/16", "ResNet-50")

    @property
    def words(self) -> int:
        """The tokens that there are, or the classes."""
        kinds = {"GPT-2": "vocab_size", "Llama": "words"}
        words: int = self.shape[kinds.get(self.model, "classes")]
        return words

    @property
    def name(self) -> str:
        """For lines of the output."""
        adapters = f", LoRA {self.rank}" if self.rank else ""
        size = f"{self.size} pixels" if self.has_images else f"T = {self.size}"
        flat = ", flat" if self.is_flat and not self.has_images else ""
        return f"{self.model}{adapters}, {size}, microbatch {self.microbatch}{flat}"


SMALL = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "n_positions": 1024}
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
LARGE = {"layers": 22, "width": 2048, "heads": 32, "shared": 4, "inner": 5632, "words": 32000}
LITTLE = {"layers": 2, "width": 16, "heads": 4, "shared": 2, "inner": 32, "words": 50}
VIT = {"layers": 12, "width": 768, "heads": 12, "patch": 16, "pixels": 224, "classes": 1000}
SLIGHT = {"layers": 1, "width": 16, "heads": 2, "patch": 8, "pixels": 16, "classes": 4}
RESNET = {"blocks": (3, 4, 6, 3), "width": 64, "classes": 1000}
THIN = {"blocks": (1, 1), "width": 8, "classes": 4}
CASES = (
    Case(model="GPT-2", size=64, lot=1024, microbatch=128, repeats=5, shape=SMALL),
    Case(model="GPT-2", size=64, lot=1024, microbatch=512, repeats=5, shape=SMALL, kind="compiled"),
    Case(model="Llama", size=512, lot=32, microbatch=16, repeats=3, shape=LARGE, rank=16),
    Case(model="Llama", size=512, lot=32, microbatch=16, repeats=3, shape=LARGE),
    Case(model="GPT-2", size=1024, lot=128, microbatch=32, repeats=3, shape=SMALL),
    Case(model="GPT-2", size=128, lot=1024, microbatch=256, repeats=3, shape=SMALL),
    Case(model="GPT-2", size=64, lot=1024, microbatch=512, repeats=3, shape=SMALL, kind="flat"),
    Case(model="GPT-2", size=1024, lot=128, microbatch=32, repeats=3, shape=SMALL, kind="flat"),
    Case(model="ViT-B/16", size=224, lot=256, microbatch=64, repeats=3, shape=VIT, kind="flat"),
    Case(model="ResNet-50", size=224, lot=256, microbatch=64, repeats=3, shape=RESNET, kind="flat"),
)
TWIN = (
    Case(model="GPT-2", size=8, lot=8, microbatch=4, repeats=2, shape=TINY, kind="compiled"),
    Case(model="GPT-2", size=16, lot=4, microbatch=2, repeats=2, shape=TINY, kind="flat"),
    Case(model="Llama", size=8, lot=4, microbatch=2, repeats=2, shape=LITTLE, rank=2),
    Case(model="Llama", size=8, lot=4, microbatch=2, repeats=2, shape=LITTLE),
    Case(model="ViT-B/16", size=16, lot=4, microbatch=2, repeats=1, shape=SLIGHT, kind="flat"),
    Case(model="ResNet-50", size=16, lot=4, microbatch=2, repeats=1, shape=THIN, kind="flat"),
)


class Records:
    """One lot of random texts, every token of which counts, or of random images with labels."""

    digest = "sha256:" + "0" * 64

    def __init__(self, case: Case) -> None:
        drawn = torch.Generator().manual_seed(1)
        if case.has_images:
            images = torch.randn(case.lot, 3, case.size, case.size, generator=drawn)
            self.items = images, torch.randint(case.words, (case.lot,), generator=drawn)
        else:
            tokens = torch.randint(case.words, (case.lot, case.size + 1), generator=drawn)
            self.items = tokens, torch.ones_like(tokens, dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.items[0])

    def collate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and whether they count, or images and labels."""
        first, second = self.items
        return first[indices], second[indices]


def model_of(case: Case, device: str) -> Model:
    """A model with the paper's blocks, or its adapters, each a block; flat, with one block."""
    torch.manual_seed(1)
    module: nn.Module
    if case.model == "GPT-2":
        config = GPT2Config.parsed({**case.shape, "tie_word_embeddings": False})
        module = GPT2(config, seed=1)
    else:
        kinds = {"Llama": llama.Llama, "ViT-B/16": images.ViT, "ResNet-50": images.ResNet}
        with torch.device(device):
            module = kinds[case.model](**case.shape)
    module = module.to(device)
    if case.is_flat:
        layout = single_block(module)
    else:
        hidden = (hidden_matrices if case.model == "GPT-2" else llama.hidden_matrices)(module)
        if case.rank:
            drawn = torch.Generator(device).manual_seed(2)
            hidden = add_lora(module, hidden, rank=case.rank, alpha=case.rank, generator=drawn)
        layout = group_hidden_matrices(module, {"hidden": hidden})
    if case.has_images:
        return images.ImageModel(module, layout, case.size)
    return LanguageModel(module, layout, case.words)


def plan_of(case: Case, model: Model) -> Any:
    """DP-Muon, or DP-SGD with flat clipping, on the whole lot at every step."""
    noise = {"clip_norm": 0.1, "noise_multiplier": 1.0}
    return plan_from(
        {
            "version": 1,
            "dataset": {"size": case.lot},
            "adjacency": "add_remove",
            "sampling": {"scheme": "full_batch"},
            "steps": 1_000_000,
            "releases": [
                {"name": name, "count": len(groups), **noise}
                for name, groups in model.layout.items()
            ],
            "optimizer": {"name": "dp_sgd" if case.is_flat else "dp_muon", "learning_rate": 1e-4},
            "target": {"delta": 1e-4},
        }
    )


Step = Callable[[], None]


def private(case: Case, device: str) -> tuple[Step, TrainingState]:
    """The trainer's own step."""
    model, data = model_of(case, device), Records(case)
    plan = plan_of(case, model)
    settings = Settings(device=device, microbatch=case.microbatch, precision="bfloat16")
    config = RunConfig(
        certificate_id="bench", plan_digest="", plan=plan, execution=Execution.of(plan),
        strategies=(None,), guarantee={},
    )  # fmt: skip
    keys = RunKeys(lots=bytes(32), probes=bytes(32))
    machine = TrainingState(
        config, model, data, settings=settings, peers=Peers.alone(device), keys=keys
    )
    steps, ratchet = iter(range(1_000_000)), Ratchet(bytes(32))
    return lambda: machine.step(next(steps), ratchet, lambda _: None) and None, machine


def graphed(machine: TrainingState, case: Case, device: str) -> Step:
    """The private step with each microbatch as one graph, which adds to the sums of its lot."""
    data = Records(case)
    batch = tuple(item.to(device) for item in data.collate(torch.arange(case.microbatch)))
    replay, sums = graph.captured(machine.private, lambda *at: machine._gradient._losses(at), batch)
    steps, ratchet = iter(range(machine._noise[0].step, 1_000_000)), Ratchet(bytes(32))

    def step() -> None:
        at = next(steps)
        lot, _ = machine.draw(at, ratchet)
        machine.begin_lot(at, lot)
        for total in sums.values():
            total.zero_()
        for places in lot:
            replay(*data.collate(places))
        machine.release(at, ratchet, sums)

    return step


def plain(case: Case, device: str, *, is_compiled: bool = False) -> Step:
    """A step without privacy: the mean gradient, with the same microbatches and update."""
    model, data = model_of(case, device), Records(case)
    if is_compiled:
        model.module.compile(backend="inductor" if device == "cuda" else "eager")
    of = dict(model.module.named_parameters())
    tensors = {
        release: {name: of[name] for group in groups for name in group.names}
        for release, groups in model.layout.items()
    }
    dtype = torch.bfloat16 if device == "cuda" else None
    optimizer = optimizer_of(
        optimizer_inputs(plan_of(case, model), tensors, newton_schulz_dtype=dtype)
    )

    def step() -> None:
        for places in torch.arange(case.lot).split(case.microbatch):
            batch = tuple(item.to(device) for item in data.collate(places))
            with torch.autocast(device, dtype=torch.bfloat16):
                losses = model.losses(batch)
            (losses.sum() / case.lot).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ghost(case: Case, device: str) -> Step:
    """Opacus' ghost clipping of one norm over all tensors, noise and plain SGD after it."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model, data = model_of(case, device), Records(case)
    module = _with_positions_of_records(model.module)
    held = GradSampleModuleFastGradientClipping(module, max_grad_norm=0.1, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(held.parameters(), lr=1e-4), noise_multiplier=1.0, max_grad_norm=0.1,
        expected_batch_size=case.lot, loss_reduction="mean",
    )  # fmt: skip
    criterion = DPLossFastGradientClipping(
        held, optimizer, nn.CrossEntropyLoss(reduction="mean"), loss_reduction="mean"
    )

    def step() -> None:
        chunks = torch.arange(case.lot).split(case.microbatch)
        for place, places in enumerate(chunks):
            tokens, _ = (item.to(device) for item in data.collate(places))
            optimizer.signal_skip_step(do_skip=place < len(chunks) - 1)
            with torch.autocast(device, dtype=torch.bfloat16):
                logits = held(tokens[:, :-1].contiguous())
            shape = (len(places), case.size, logits.shape[-1])
            requested = tokens[:, 1:].flatten()
            criterion(logits.flatten(0, 1).float(), requested, shape=shape).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def _with_positions_of_records(module: nn.Module) -> nn.Module:
    """Opacus wants a row of positions for each record."""
    table = module.transformer.wpe
    module.transformer.wpe = _Repeated(table)
    return module


class _Repeated(nn.Module):
    records = 1

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, places: Tensor) -> Tensor:
        return self.table(places.repeat(_Repeated.records, 1))


def seconds(step: Callable[[], Any], device: str, repeats: int) -> float:
    """The median of ``repeats`` calls, after one that warms up."""
    result = []
    for _ in range(repeats + 1):
        _wait(device)
        begin = time.perf_counter()
        step()
        _wait(device)
        result.append(time.perf_counter() - begin)
    return statistics.median(result[1:])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def peak(device: str, into: dict[str, Any], name: str) -> Iterator[None]:
    """The most memory of the device that was held inside, in MiB; nothing on a processor."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield
    if device == "cuda":
        into[name] = torch.cuda.max_memory_allocated() / 2**20


def measured(case: Case, device: str) -> dict[str, Any]:
    """Seconds, shares and memory of one case."""
    result: dict[str, Any] = {"case": case.name, "size": case.size, "lot": case.lot}
    with peak(device, result, "plain_mib"):
        result["plain"] = seconds(plain(case, device), device, case.repeats)
    if case.kind == "compiled":
        compiled = plain(case, device, is_compiled=True)
        result["compiled"] = seconds(compiled, device, case.repeats)
        del compiled
    with peak(device, result, "private_mib"):
        step, machine = private(case, device)
        result["private"] = seconds(step, device, case.repeats)
    result |= parts(machine, case, device)
    try:
        result["graph"] = seconds(graphed(machine, case, device), device, case.repeats)
    except RuntimeError as error:
        result["graph_failed"] = str(error).splitlines()[0]
    machine.close()
    del step, machine
    if case.model == "GPT-2" and importlib.util.find_spec("opacus") is not None:
        try:
            _Repeated.records = case.microbatch
            with peak(device, result, "ghost_mib"):
                result["ghost"] = seconds(ghost(case, device), device, case.repeats)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            result["ghost_failed"] = str(error).splitlines()[0]
    for name in ("plain", "compiled"):
        if name in result:
            result[f"over_{name}"] = result["private"] / result[name]
    for name in PARTS:
        result[f"{name}_share"] = result[name] / result["private"]
    for name in ("graph", "ghost"):
        if name in result:
            result[f"{name}_over_private"] = result[name] / result["private"]
    if device == "cuda":
        result["memory_over_plain"] = result["private_mib"] / result["plain_mib"]
    return result


PARTS = ("noise", "newton_schulz", "noise_test", "sampling")


def parts(machine: TrainingState, case: Case, device: str) -> dict[str, float]:
    """Seconds of ``PARTS`` of a step, each by itself."""
    tensors = {n: p for of in machine.layout.tensors.values() for n, p in of.items()}
    sums = {name: torch.zeros_like(item, dtype=torch.float32) for name, item in tensors.items()}
    source = NoiseSource(machine.layout.noise(machine._requirement(0)), device=device)
    matrices = [sums[name] for name in machine.layout.tensors.get("hidden", ())]
    dtype = torch.bfloat16 if device == "cuda" else None
    steps: dict[str, Step] = {
        "noise": lambda: source.add_to(sums, bytes(32)),
        "newton_schulz": lambda: map_matrices(
            matrices, lambda batch: orthogonalize(batch, dtype=dtype)
        ),
        "noise_test": lambda: [machine.noise_test.read(sums) for _ in range(2)] and None,
        "sampling": lambda: machine.draw(0, Ratchet(bytes(32))) and None,
    }
    return {name: seconds(steps[name], device, case.repeats) for name in PARTS}


def profiled(case: Case, device: str) -> list[str]:
    """The operations of a private step that take most of its time."""
    step, machine = private(case, device)
    step()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        step()
        _wait(device)
    machine.close()
    key = f"self_{device}_time_total"
    return profile.key_averages().table(sort_by=key, row_limit=25).splitlines()


def main(arguments: list[str]) -> int:
    """Check, measure, print a line for each case, a table and a document at the end."""
    twin = "--twin" in arguments
    device = "cpu" if twin else "cuda"
    if not twin and not torch.cuda.is_available():
        sys.stderr.write("there is no CUDA device here; --twin runs the same on a processor\n")
        return 2
    began = time.perf_counter()
    result: dict[str, Any] = {
        "device": "cpu" if twin else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.util.find_spec("triton") is not None,
        "checks": all_checks(device, small=twin),
        "cases": [],
    }
    for name, told in result["checks"].items():
        sys.stderr.write(f"{name}: {told}\n")
    cases = TWIN if twin else CASES
    for case in cases:
        if time.perf_counter() - began > MAX_SECONDS:
            result["left_out"] = [*result.get("left_out", []), case.name]
            continue
        try:
            result["cases"].append(measured(case, device))
        except RuntimeError as error:
            result["failed"] = result.get("failed", {}) | {case.name: str(error).splitlines()[0]}
            continue
        line = {k: round(v, 4) for k, v in result["cases"][-1].items() if isinstance(v, float)}
        sys.stderr.write(f"{case.name}: {line}\n")
        save(result)
    if result["cases"]:
        worst = max(result["cases"], key=lambda row: row["over_plain"])
        result["profile"] = profiled(
            next(case for case in cases if case.name == worst["case"]), device
        )
    result["seconds"] = time.perf_counter() - began
    save(result)
    table = "\n".join(tables(result))
    if "--markdown" in arguments:
        sys.stdout.write(f"{table}\n")
    else:
        sys.stderr.write(f"{table}\n")
        sys.stdout.write(f"{json.dumps(result, indent=1)}\n")
    return 1 if "failed" in result else 0


SAVED = Path("build/bench-gpu.json")


def save(result: dict[str, Any]) -> None:
    """Write what is known until now, so that a run that is cut off leaves it."""
    SAVED.parent.mkdir(exist_ok=True)
    SAVED.write_text(json.dumps(result, indent=1))


SHOWN = {
    "case": "model",
    "lot": "lot",
    "plain": "plain, s",
    "private": "private, s",
    "over_plain": "private / plain",
    "over_compiled": "private / compiled",
    "graph_over_private": "graph / private",
    "memory_over_plain": "memory / plain",
    "noise_share": "noise",
    "newton_schulz_share": "Newton-Schulz",
    "noise_test_share": "noise test",
    "sampling_share": "sampling",
    "ghost_over_private": "ghost clipping / private",
}
"""What the table has of a case, and how it is headed."""


def tables(found: dict[str, Any]) -> Iterator[str]:
    """Lines of Markdown: the device, a row for each case, what was checked."""
    kernel = "with" if found["triton"] else "without"
    yield f"{found['device']}, torch {found['torch']}, {kernel} Triton.\n"
    yield f"| {' | '.join(SHOWN.values())} |\n{'|---' * len(SHOWN)}|"
    for case in found["cases"]:
        cells = [case.get(key, "") for key in SHOWN]
        yield f"| {' | '.join(c if isinstance(c, str) else f'{c:.4g}' for c in cells)} |"
    yield ""
    for case in found["cases"]:
        for name, what in (("ghost", "Ghost clipping"), ("graph", "The graph")):
            if reason := case.get(f"{name}_failed"):
                yield f"- {what} failed for {case['case']}: {reason}"
    for name, told in found["checks"].items():
        yield f"- {name}: {told}"
    for name, reason in found.get("failed", {}).items():
        yield f"- {name} failed: {reason}"
    for name in found.get("left_out", []):
        yield f"- {name} was left out: the time was over."


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
