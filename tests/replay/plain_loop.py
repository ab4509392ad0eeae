"""A loop that clips and adds noise by itself, and faults that are planted in it."""

from tests.replay.faults import Fault

PLAIN = """\
import affidavit
import torch


def main():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 6, generator=generator)
    y = torch.randint(0, 2, (200,), generator=generator)
    x, y = affidavit.records(x, y)
    clip_norm, noise_multiplier, rate, size = 1.0, 1.1, 0.05, len(x)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    # prepared
    for step in range(6):
        lot = torch.nonzero(torch.rand(size) < rate).flatten()
        lot = affidavit.lot(lot)
        with torch.no_grad():
            error = torch.sigmoid(model(x[lot])[:, 0]) - y[lot]
            gradients = torch.cat([error[:, None] * x[lot], error[:, None]], 1)
            # gradients
            norms = gradients.norm(dim=1, keepdim=True)
            clipped = gradients * (clip_norm / norms.clamp(min=clip_norm))
            total = clipped.sum(0)
            noisy = total + noise_multiplier * clip_norm * torch.randn(7)
            noisy = affidavit.release(
                total, noisy, clip_norm=clip_norm, noise_multiplier=noise_multiplier
            )
            mean = noisy / (rate * size)
        model.weight.grad, model.bias.grad = mean[:6].reshape(1, 6), mean[6:]
        optimizer.step()
        scheduler.step()
        # stepped
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
"""


PREPARED, STEPPED = "    # prepared\n", "        # stepped\n"
PLAIN_FAULTS = [
    Fault(
        "statistics of the batch scale its records",
        {
            "            # gradients\n": "            gradients = gradients / gradients.std()\n"
            "            mean_norm = gradients.norm(dim=1).mean()\n",
            "clip_norm / norms.clamp(min=clip_norm)": "clip_norm / mean_norm",
        },
        "sensitivity_exceeded",
        "affidavit.release",
    ),
    Fault(
        "a record is used twice",
        {"affidavit.lot(lot)": "affidavit.lot(torch.cat([lot, lot]))"},
        "sensitivity_exceeded",
        "affidavit.release",
    ),
    Fault(
        "the divisor is the lot's size",
        {"noisy / (rate * size)": "noisy / max(1, len(lot))"},
        "state_differs",
        "optimizer.step()",
        "Linear.weight",
    ),
    Fault(
        "the noise is a fifth smaller",
        {
            "noisy = total + noise": "noisy = total + 0.8 * noise",
            "torch.nn.Linear(6, 1)": "torch.nn.Linear(60, 1)",
            "torch.randn(200, 6,": "torch.randn(200, 60,",
            "torch.randn(7)": "torch.randn(61)",
            "mean[:6].reshape(1, 6), mean[6:]": "mean[:60].reshape(1, 60), mean[60:]",
        },
        "noise_scaled",
        "affidavit.release",
    ),
    Fault(
        "a part of a release has no noise",
        {"clip_norm * torch.randn(7)": "clip_norm * torch.randn(7) * (torch.arange(7) < 6)"},
        "noise_missing",
        "affidavit.release",
        "the release",
    ),
    Fault(
        "a small tensor has a tenth of the noise",
        {
            "            noisy = total + noise_multiplier * clip_norm * torch.randn(7)\n": ""
            "            total = [total[:6], total[6:]]\n"
            "            noise = noise_multiplier * clip_norm * torch.randn(7)\n"
            "            noisy = [total[0] + noise[:6], total[1] + 0.1 * noise[6:]]\n",
            "noisy / (rate": "torch.cat(noisy) / (rate",
            "range(6)": "range(12)",
        },
        "noise_scaled",
        "affidavit.release",
        "[1]",
        ordinary=True,
    ),
    Fault(
        "each step has the same noise",
        {
            PREPARED: "    noise = torch.randn(7)\n",
            "clip_norm * torch.randn(7)": "clip_norm * noise",
        },
        "noise_repeated",
        "affidavit.release",
    ),
    Fault(
        "training stops by a private metric",
        {
            PREPARED: "    best = 0.0\n",
            STEPPED: "        score = ((model(x)[:, 0] > 0) == y).float().mean().item()\n"
            "        if score < best:\n"
            "            break\n"
            "        best = score\n",
        },
        "steps_differ",
        "if score < best",
    ),
    Fault(
        "the best model is chosen by a private metric",
        {
            PREPARED: "    best, kept = 0.0, None\n",
            STEPPED: "        score = ((model(x)[:, 0] > 0) == y).float().mean().item()\n"
            "        if score > best:\n"
            "            best, kept = score, [p.detach().clone() for p in model.parameters()]\n",
            "torch.save(model.state_dict()": "torch.save(kept",
        },
        "file_differs",
        "torch.save(kept",
        "model.pt",
        ordinary=True,
    ),
    Fault(
        "the learning rate follows the loss",
        {STEPPED: "        optimizer.param_groups[0]['lr'] *= 1 - error.abs().mean().item()\n"},
        "state_differs",
        "optimizer.param_groups",
        "SGD.param_groups[0].lr",
    ),
    Fault(
        "initial weights are means of the records",
        {PREPARED: "    model.weight.data[:] = x.mean(0)\n"},
        "state_differs",
        "x.mean(0)",
        "Linear.weight",
    ),
    Fault(
        "a head has no noise",
        {
            PREPARED: "    head = torch.nn.Linear(6, 1)\n",
            STEPPED: "        head.weight.data -= (error[:, None] * x[lot]).mean(0)\n",
        },
        "state_differs",
        "head.weight.data -=",
        "Linear#2.weight",
    ),
]
