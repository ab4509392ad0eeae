"""Check, time and report the trainer on a GPU, in one run of under ten minutes.

GPT-2 small (124 million parameters) at T = 64, 128 and 1024, and a Llama of 1.1 billion at
T = 512, by adapters and in full, from a seed and under bfloat16 autocast: the trainer's own
DP-Muon step beside a plain Muon step with the same microbatches, optimiser and types, their
memory, the share of the noise and of Newton-Schulz in the private step, and Opacus' ghost
clipping of GPT-2 where it can be imported. Times are medians of whole steps with the device
waited for; ratios are of one run. The table goes to the standard error, a JSON document to the
standard output. ``make bench-gpu`` runs it; by hand, with ``PYTHONPATH=.``:

    python bench/gpu/run.py              on a machine with CUDA
    python bench/gpu/run.py --twin       the same on a processor with sizes that take seconds
    python bench/gpu/run.py --markdown   print the table to the standard output, and no document

The goals, for an H200: a private step at most 1.15 times the plain one (1.20 at T = 1024),
memory at most 1.10, noise at most 2 % and Newton-Schulz at most 7 % of it, at least 1.6 times
faster than ghost clipping.
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
from typing import Any

import llama
import torch
from checks import all_checks
from torch import Tensor, nn

from affidavit.assessment import Execution
from affidavit.plan import plan_from
from affidavit.trainer.distributed.peers import Peers
from affidavit.trainer.models.layout import add_lora, group_hidden_matrices
from affidavit.trainer.noise.chacha import Ratchet
from affidavit.trainer.optimizers.inputs import optimizer_inputs
from affidavit.trainer.optimizers.muon import map_matrices, orthogonalize
from affidavit.trainer.optimizers.registry import optimizer_of
from affidavit.trainer.run_config import RunConfig
from affidavit.trainer.settings import Settings
from affidavit.trainer.steps.training_state import RunKeys, TrainingState
from examples.train.gpt2 import GPT2, GPT2Config, LanguageModel, hidden_matrices

MAX_SECONDS = 540.0
"""After this nothing more is begun."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of one measurement; ``tokens`` is T, and ``rank`` that of adapters, 0 for none."""

    model: str
    tokens: int
    lot: int
    microbatch: int
    repeats: int
    shape: dict[str, int]
    rank: int = 0

    @property
    def words(self) -> int:
        """The tokens that there are."""
        return self.shape["vocab_size" if self.model == "GPT-2" else "words"]

    @property
    def name(self) -> str:
        """For lines of the output."""
        adapters = f", LoRA {self.rank}" if self.rank else ""
        return f"{self.model}{adapters}, T = {self.tokens}, microbatch {self.microbatch}"


SMALL = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "n_positions": 1024}
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
LARGE = {"layers": 22, "width": 2048, "heads": 32, "shared": 4, "inner": 5632, "words": 32000}
LITTLE = {"layers": 2, "width": 16, "heads": 4, "shared": 2, "inner": 32, "words": 50}
CASES = (
    Case(model="GPT-2", tokens=64, lot=1024, microbatch=128, repeats=5, shape=SMALL),
    Case(model="GPT-2", tokens=64, lot=1024, microbatch=512, repeats=5, shape=SMALL),
    Case(model="Llama", tokens=512, lot=32, microbatch=16, repeats=3, shape=LARGE, rank=16),
    Case(model="Llama", tokens=512, lot=32, microbatch=16, repeats=3, shape=LARGE),
    Case(model="GPT-2", tokens=1024, lot=128, microbatch=32, repeats=3, shape=SMALL),
    Case(model="GPT-2", tokens=128, lot=1024, microbatch=256, repeats=3, shape=SMALL),
    Case(model="GPT-2", tokens=1024, lot=128, microbatch=8, repeats=3, shape=SMALL),
)
TWIN = (
    Case(model="GPT-2", tokens=8, lot=8, microbatch=4, repeats=2, shape=TINY),
    Case(model="GPT-2", tokens=16, lot=4, microbatch=2, repeats=2, shape=TINY),
    Case(model="Llama", tokens=8, lot=4, microbatch=2, repeats=2, shape=LITTLE, rank=2),
    Case(model="Llama", tokens=8, lot=4, microbatch=2, repeats=2, shape=LITTLE),
)


class Texts:
    """One lot of random text, every token of which counts."""

    digest = "sha256:" + "0" * 64

    def __init__(self, case: Case) -> None:
        drawn, shape = torch.Generator().manual_seed(1), (case.lot, case.tokens + 1)
        self.tokens = torch.randint(case.words, shape, generator=drawn)
        self.counted = torch.ones_like(self.tokens, dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.tokens)

    def collate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and whether they count."""
        return self.tokens[indices], self.counted[indices]


def model_of(case: Case, device: str) -> LanguageModel:
    """A model with a head of its own, and the paper's blocks; or its adapters, each a block."""
    torch.manual_seed(1)
    if case.model == "GPT-2":
        config = GPT2Config.parsed({**case.shape, "tie_word_embeddings": False})
        module: nn.Module = GPT2(config, seed=1)
        hidden = hidden_matrices(module)
    else:
        with torch.device(device):
            module = llama.Llama(**case.shape)
        hidden = llama.hidden_matrices(module)
    if case.rank:
        drawn = torch.Generator(device).manual_seed(2)
        hidden = add_lora(module, hidden, rank=case.rank, alpha=case.rank, generator=drawn)
    layout = group_hidden_matrices(module.to(device), {"hidden": hidden})
    return LanguageModel(module, layout, case.words)


def plan_of(case: Case, model: LanguageModel) -> Any:
    """DP-Muon on the whole lot at every step."""
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
            "optimizer": {"name": "dp_muon", "learning_rate": 1e-4},
            "target": {"delta": 1e-4},
        }
    )


def private(case: Case, device: str) -> tuple[Callable[[], None], TrainingState]:
    """The trainer's own step."""
    model, data = model_of(case, device), Texts(case)
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


def plain(case: Case, device: str) -> Callable[[], None]:
    """A Muon step without privacy: the mean gradient, with the same microbatches and update."""
    model, data = model_of(case, device), Texts(case)
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


def ghost(case: Case, device: str) -> Callable[[], None]:
    """Opacus' ghost clipping of one norm over all tensors, noise and plain SGD after it."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model, data = model_of(case, device), Texts(case)
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
            shape = (len(places), case.tokens, logits.shape[-1])
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
    result: dict[str, Any] = {"case": case.name, "tokens": case.tokens, "lot": case.lot}
    with peak(device, result, "plain_mib"):
        result["plain"] = seconds(plain(case, device), device, case.repeats)
    with peak(device, result, "private_mib"):
        step, machine = private(case, device)
        result["private"] = seconds(step, device, case.repeats)
    result["noise"], result["newton_schulz"] = parts(machine, case, device)
    machine.close()
    del step, machine
    if case.model == "GPT-2" and importlib.util.find_spec("opacus") is not None:
        try:
            _Repeated.records = case.microbatch
            with peak(device, result, "ghost_mib"):
                result["ghost"] = seconds(ghost(case, device), device, case.repeats)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            result["ghost_failed"] = str(error).splitlines()[0]
    result["over_plain"] = result["private"] / result["plain"]
    result["noise_share"] = result["noise"] / result["private"]
    result["newton_schulz_share"] = result["newton_schulz"] / result["private"]
    if "ghost" in result:
        result["ghost_over_private"] = result["ghost"] / result["private"]
    if device == "cuda":
        result["memory_over_plain"] = result["private_mib"] / result["plain_mib"]
    return result


def parts(machine: TrainingState, case: Case, device: str) -> tuple[float, float]:
    """Seconds of the noise of a lot, and of Newton-Schulz, each by itself."""
    tensors = {n: p for of in machine.layout.tensors.values() for n, p in of.items()}
    sums = {name: torch.zeros_like(item) for name, item in tensors.items()}
    (source,) = machine._noise
    noise = seconds(lambda: source.add_to(sums, bytes(32)), device, case.repeats)
    matrices = [sums[name] for name in machine.layout.tensors["hidden"]]
    dtype = torch.bfloat16 if device == "cuda" else None
    newton_schulz = seconds(
        lambda: map_matrices(matrices, lambda batch: orthogonalize(batch, dtype=dtype)),
        device,
        case.repeats,
    )
    return noise, newton_schulz


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
    for case in TWIN if twin else CASES:
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
    result["seconds"] = time.perf_counter() - began
    table = "\n".join(tables(result))
    if "--markdown" in arguments:
        sys.stdout.write(f"{table}\n")
    else:
        sys.stderr.write(f"{table}\n")
        sys.stdout.write(f"{json.dumps(result, indent=1)}\n")
    return 1 if "failed" in result else 0


SHOWN = {
    "case": "model",
    "lot": "lot",
    "plain": "plain, s",
    "private": "private, s",
    "over_plain": "private / plain",
    "memory_over_plain": "memory / plain",
    "noise_share": "noise",
    "newton_schulz_share": "Newton-Schulz",
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
        if "ghost_failed" in case:
            yield f"- Ghost clipping failed for {case['case']}: {case['ghost_failed']}"
    for name, told in found["checks"].items():
        yield f"- {name}: {told}"
    for name, reason in found.get("failed", {}).items():
        yield f"- {name} failed: {reason}"
    for name in found.get("left_out", []):
        yield f"- {name} was left out: the time was over."


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
