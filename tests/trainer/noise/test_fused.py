"""The kernel makes the variates of the tensor operations; run by Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.support.triton_interpreter import interpreted

pytest.importorskip("triton")

COMPARED = """
import torch
from affidavit.trainer.noise.fused import fill_normal
from affidavit.trainer.noise.normal import standard_normal

key = bytes(range(32))
for groups, step, tensor in ((1, 0, 0), (17, 5, 3), (40, 2**40, 2**31 + 7)):
    out = torch.full((groups, 2, 128), torch.nan)
    fill_normal(out, key, step=step, tensor=tensor)
    expected = standard_normal(key, step=step, tensor=tensor, shape=out.shape)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-6)
    rest = torch.full((groups - groups // 2, 2, 128), torch.nan)
    fill_normal(rest, key, step=step, tensor=tensor, first_group=groups // 2)
    assert torch.equal(rest, out[groups // 2:])
fill_normal(torch.empty(0, 2, 128), key, step=0, tensor=0)
for wrong in (dict(key=bytes(31), step=0, tensor=0), dict(key=key, step=2**64, tensor=0)):
    try:
        fill_normal(torch.empty(1, 2, 128), **wrong)
    except ValueError:
        continue
    raise SystemExit("no stream, and not refused")
print("the same")
"""


def test_the_kernel_makes_the_same_variates() -> None:
    finished = interpreted(COMPARED)
    assert finished.stdout.strip() == "the same", finished.stderr
