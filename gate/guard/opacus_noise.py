"""Noise in a run of Opacus: where its own comes from, and ours put in its place.

The state of PyTorch's generator says which noise comes next: if it is one that was seen before,
so is the noise. Ours is drawn in float64 from a ChaCha20 stream of its own for each release,
and put on the clipped sums just as Opacus puts its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from affidavit.gate.guard.randomness import Stream
from affidavit.gate.guard.stopping import GuardStop


def put_noise(
    stream: Stream, std: float, names: Sequence[str], tensors: Sequence[Any], *, replacing: bool
) -> None:
    """Noise of ``std`` on every clipped sum, in the tensor's ``grad``.

    With ``replacing`` Opacus has put its own there already, and marked the sums as used.

    Raises ``GuardStop`` for a sum that is not there, not this release's or not finite.
    """
    torch = sys.modules["torch"]
    for name, each in zip(names, tensors, strict=True):
        total = each.summed_grad
        if total is None or (hasattr(total, "_processed") and not replacing):
            raise GuardStop(
                "accumulation",
                f"{name} has no sum of its own for this release.",
                "Call optimizer.zero_grad() after each step, and train every tensor.",
            )
        if not bool(total.isfinite().all()):
            raise GuardStop(
                "non_finite",
                f"the sum of {name} is not finite, which tells of a record.",
                "Let records whose gradient is not finite contribute zero.",
            )
        noise = torch.from_numpy(std * stream.normal(total.numel())).to(total)
        each.grad = (total + noise.view_as(total)).view_as(each)
        total._processed = True


def state_of(optimizer: Any, tensor: Any) -> bytes | None:
    """The state of the generator that Opacus' noise comes from; None where none can be seen."""
    torch, source = sys.modules["torch"], optimizer.generator
    if source is None and tensor.device.type == "cpu":
        state = torch.get_rng_state()
    elif source is None:
        state = getattr(torch, tensor.device.type).get_rng_state(tensor.device)
    else:
        try:
            state = source.get_state()
        except RuntimeError:  # the operating system's generator has none
            return None
    return bytes(state.cpu().numpy().tobytes())


def generator_of(optimizer: Any) -> str:
    """What Opacus draws from, by the name that a run record gets."""
    return "torchcsprng" if optimizer.secure_mode else "torch"
