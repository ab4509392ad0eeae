"""Check correctness on the device against float64 on the processor; a failed check raises.

matrix unit   products of bfloat16 operands into float32 err by no more than the bound that
              ``affidavit.trainer.norm_bounds`` takes for them
clipping      what a record adds never passes the clip norm, plain or cancelling, in bfloat16
sums          the clipped sums of a small GPT-2 in float32 are those of float64, and so are those
              of matrices in bfloat16, of which one record is discarded
noise         variates on the device are those of the processor, up to the last digits, and so are
              the sums of entries by which noise is tested
graph         a private microbatch is one graph, which adds for other records what they add eagerly;
              on a device the host launches that graph and nothing else
"""

from __future__ import annotations

from collections.abc import Callable

import graph
import torch
from torch import Tensor

from affidavit.trainer.clipping.ghost_norm import LinearFactors, batched_matmul
from affidavit.trainer.clipping.private_model import PrivateModel
from affidavit.trainer.clipping.requirements import BlockSpec
from affidavit.trainer.models.layout import group_hidden_matrices
from affidavit.trainer.noise.noise_statistics import NoiseTest
from affidavit.trainer.noise.normal import standard_normal
from affidavit.trainer.norm_bounds import MATRIX_UNIT_ERROR, rounding_bound
from examples.train.gpt2 import GPT2, GPT2Config, LanguageModel

CLIP_NORM = 0.1
SHAPES = ((4, 64, 768, 768), (4, 64, 768, 3072), (2, 128, 3072, 768), (1, 1024, 768, 2304))
SMALL = ((4, 8, 12, 10),)


def all_checks(device: str, *, small: bool) -> dict[str, str]:
    """What was checked, and by how much it held; raises ``AssertionError``."""
    checks: dict[str, Callable[[str, bool], str]] = {
        "matrix unit": matrix_unit,
        "clipping": clipping,
        "sums": sums,
        "noise": noise,
        "graph": graph_of_microbatch,
    }
    return {name: check(device, small) for name, check in checks.items()}


def factors_of(shape: tuple[int, int, int, int], kind: str, device: str) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients in bfloat16, which cancel in pairs or do not."""
    n, steps, wide, high = shape
    drawn = torch.Generator().manual_seed(1)
    a = torch.randn(n, steps, wide, generator=drawn)
    b = torch.randn(n, steps, high, generator=drawn)
    if kind == "cancelling":
        a[:, 1::2], b[:, 1::2] = -a[:, ::2] * (1 + 2.0**-7), b[:, ::2]
    return a.bfloat16().to(device), b.bfloat16().to(device)


def matrix_unit(device: str, small: bool) -> str:
    """The largest error of a Gram matrix over its bound."""
    worst = 0.0
    for shape in SMALL if small else SHAPES:
        for kind in ("plain", "cancelling"):
            a, _ = factors_of(shape, kind, device)
            exact = a.double() @ a.double().mT
            sizes = a.double().abs() @ a.double().abs().mT
            bound = rounding_bound(MATRIX_UNIT_ERROR * shape[2], torch.float32) * sizes
            worst = max(
                worst, float(((batched_matmul(a, a.mT).double() - exact).abs() / bound).max())
            )
    assert worst <= 1, f"a matrix unit errs by {worst:.2f} times its bound"
    return f"errors are at most {worst:.3f} of their bound"


def clipping(device: str, small: bool) -> str:
    """The largest contribution over the clip norm, and the least of plain ones."""
    most, least = 0.0, 1.0
    for shape in SMALL if small else SHAPES:
        for kind in ("plain", "cancelling"):
            a, b = factors_of(shape, kind, device)
            for record in range(len(a)):
                one = LinearFactors(a[record : record + 1], b[record : record + 1])
                added = one.clipped_sum(CLIP_NORM)
                share = float(added.double().norm()) / CLIP_NORM
                most = max(most, share)
                least = min(least, share) if kind == "plain" else least
    assert most <= 1, f"a record adds {most:.6f} times its clip norm"
    return f"contributions are {least:.3f} to {most:.6f} of the clip norm"


def small_model(device: str, dtype: torch.dtype) -> tuple[LanguageModel, PrivateModel]:
    """A small GPT-2 by matrix."""
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 40, "n_positions": 16}
    module = GPT2(GPT2Config.parsed(shape), seed=3).to(device, dtype)
    matrices = [n for n, p in module.named_parameters() if ".h." in n and p.ndim == 2]
    model = LanguageModel(module, group_hidden_matrices(module, {"hidden": matrices}), 40)
    groups = [group for of in model.blocks().values() for group in of]
    specs = [
        BlockSpec(name=str(place), clip_norm=CLIP_NORM, names=group.names)
        for place, group in enumerate(groups)
    ]
    return model, PrivateModel(module, specs)


def clipped_sums(device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of one lot of made-up text."""
    model, private = small_model(device, dtype)
    batch = tuple(item.to(device) for item in model.made_up(9))
    private.accumulate(lambda: model.losses(batch), records=9)
    return {name: item.double().cpu() for name, item in private.sums().items()}


def sums(device: str, small: bool) -> str:
    """The largest relative error of a tensor's clipped sum in float32."""
    for shape in SMALL if small else SHAPES:
        a, b = factors_of(shape, "plain", device)
        a[0, 0, 0] = torch.nan
        found = LinearFactors(a, b).clipped_sum(CLIP_NORM).double()
        each = b[1:].double().mT @ a[1:].double()
        each *= CLIP_NORM / each.flatten(1).norm(dim=1).view(-1, 1, 1)
        gap = float((found - each.sum(0)).norm()) / CLIP_NORM
        assert gap <= 1e-2 * len(each), f"a clipped sum in bfloat16 errs by {gap:.1e}"
    exact, result = clipped_sums("cpu", torch.float64), clipped_sums(device, torch.float32)
    worst = max(float((result[n] - item).norm() / item.norm()) for n, item in exact.items())
    assert worst <= 2e-3, f"clipped sums differ by {worst:.1e}"
    return f"clipped sums differ by at most {worst:.1e} of themselves"


def noise(device: str, small: bool) -> str:
    """The largest difference of a variate."""
    shape, key = (1000,) if small else (3_000_000,), bytes(range(32))
    there = standard_normal(key, step=5, tensor=7, shape=shape, device=device).cpu()
    here = standard_normal(key, step=5, tensor=7, shape=shape)
    worst = float((there - here).abs().max())
    assert worst <= 1e-4, f"variates differ by {worst:.1e}"
    test = NoiseTest({"z": "z"}, {"z": shape[0]})
    gap = float((test.read({"z": there.to(device)}).cpu() - test.read({"z": there})).abs().max())
    assert gap <= 1e-3, f"sums of variates differ by {gap:.1e}"
    return f"variates differ by at most {worst:.1e}, and their sums by {gap:.1e}"


def graph_of_microbatch(device: str, small: bool) -> str:
    """The largest relative difference of a sum, and what was launched."""
    del small
    model, private = small_model(device, torch.float32)
    first, second = (
        tuple(item[rows].to(device) for item in model.made_up(8))
        for rows in (slice(4), slice(4, 8))
    )
    replay, found = graph.captured(private, lambda *of: model.losses(of), first)
    for total in found.values():
        total.zero_()
    replay(*second)
    found = {name: total.clone() for name, total in found.items()}
    launches = graph.launches_of(replay, second) if device == "cuda" else {"traced": 1}
    assert sum(launches.values()) == 1, f"a microbatch is not one launch: {launches}"
    private.clear_sums()
    private.accumulate(lambda: model.losses(second), records=4)
    exact = private.sums()
    worst = max(float((found[n] - item).norm() / item.norm()) for n, item in exact.items())
    assert worst <= 1e-5, f"the sums of a graph differ by {worst:.1e}"
    return f"one launch, and sums differ by at most {worst:.1e} of themselves"
