"""The kernels of noise and of its test give what the tensor operations give.

``make try-peers`` runs this by Triton's interpreter, in an environment that has Triton.
"""

from __future__ import annotations

from tests.support.triton_interpreter import interpreted

COMPARED = """
import torch
from affidavit.trainer.noise.fused import write_normals
from affidavit.trainer.noise.normal import standard_normals

key = bytes(range(32))
spans = [(3, 5, 4000), (2**31 + 7, 1 << 20, 1), (9, 300, 0), (1, 512, 5000)]

expected = standard_normals(key, step=0, spans=spans)
written = [torch.full((count,), torch.nan) for _, _, count in spans]
write_normals(written, key, step=0, spans=spans)
for one, other in zip(written, expected):
    torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)

expected = standard_normals(key, step=2**40, spans=spans)
around = [torch.randn(count + 2) for _, _, count in spans]
added = [item.clone() for item in around]
scales = [0.5, 3.0, 1.0, 1e20]
write_normals([of[1:-1] for of in added], key, step=2**40, spans=spans, scales=scales)
for one, before, z, scale in zip(added, around, expected, scales):
    assert one[0] == before[0] and one[-1] == before[-1]
    torch.testing.assert_close(one[1:-1], before[1:-1] + scale * z, rtol=2e-5, atol=scale * 4e-6)

write_normals([torch.empty(0)], key, step=0, spans=[(0, 0, 0)])
for wrong in (dict(key=bytes(31), step=0), dict(key=key, step=2**64)):
    try:
        write_normals([torch.empty(1)], spans=[(0, 0, 1)], **wrong)
    except ValueError:
        continue
    raise SystemExit("no stream, and not refused")
print("the same")
"""


def test_the_kernel_makes_the_same_variates() -> None:
    finished = interpreted(COMPARED)
    assert finished.stdout.strip() == "the same", finished.stderr


ADDED_UP = """
import torch
from affidavit.trainer.noise import noise_statistics
from affidavit.trainer.noise.fused import piece_sums

noise_statistics.MAX_SUMS = 64
shapes = {"w": (700,), "one": (1,), "table": (33, 40), "same": (700,), "bias": (5,)}
test = noise_statistics.NoiseTest(
    dict.fromkeys(shapes, "all"), {n: torch.Size(of).numel() for n, of in shapes.items()}
)
sums = {name: torch.randn(of) for name, of in shapes.items()}
found = piece_sums([sums[name] for name in test._order], test._terms.tolist())
torch.testing.assert_close(found, test.read(sums), rtol=1e-5, atol=1e-5)
print("the same")
"""


def test_the_kernel_adds_up_the_same_entries() -> None:
    finished = interpreted(ADDED_UP)
    assert finished.stdout.strip() == "the same", finished.stderr
