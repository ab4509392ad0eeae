"""ViT-B/16 and ResNet-50 with GroupNorm in plain PyTorch, which need no other package.

Their sizes are those of arXiv:2010.11929 and arXiv:1512.03385, with the group norms that private
training needs in place of batch norms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from affidavit.trainer.adapters import Batch, Group
from affidavit.trainer.models.layout import Layout


class Block(nn.Module):
    """Attention and a feed-forward part, normalised before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, width)."""
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class ViT(nn.Module):
    """From images (n, 3, pixels, pixels) to logits (n, classes)."""

    def __init__(
        self, *, layers: int, width: int, heads: int, patch: int, pixels: int, classes: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.places = nn.Embedding((pixels // patch) ** 2, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """The mean over patches stands for the image."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        places = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        return self.head(self.norm(self.blocks(x + self.places(places))).mean(1))


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.body = nn.Sequential(
            *_convolution(channels, inner, 1),
            nn.ReLU(),
            *_convolution(inner, inner, 3, stride),
            nn.ReLU(),
            *_convolution(inner, outer, 1),
        )
        self.shortcut = (
            nn.Identity()
            if channels == outer and stride == 1
            else nn.Sequential(*_convolution(channels, outer, 1, stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, h, w) to (n, 4 inner, h / stride, w / stride)."""
        return functional.relu(self.body(x) + self.shortcut(x))


def _convolution(
    channels: int, out: int, size: int, stride: int = 1
) -> tuple[nn.Conv2d, nn.GroupNorm]:
    convolution = nn.Conv2d(channels, out, size, stride, padding=size // 2, bias=False)
    return convolution, nn.GroupNorm(min(32, out // 4), out)


class ResNet(nn.Module):
    """From images (n, 3, pixels, pixels) to logits (n, classes); ``width`` is 64, or less."""

    def __init__(self, *, blocks: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.GroupNorm(min(32, width // 4), width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]
        channels = width
        for stage, count in enumerate(blocks):
            for place in range(count):
                stride = 2 if stage and not place else 1
                layers.append(Bottleneck(channels, width * 2**stage, stride))
                channels = 4 * width * 2**stage
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """The mean over places stands for the image."""
        return self.head(self.layers(images).mean((2, 3)))


@dataclass
class ImageModel:
    """A classifier of images, and its blocks."""

    module: nn.Module
    layout: Layout
    pixels: int

    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of each record, (n,)."""
        images, labels = batch
        return functional.cross_entropy(self.module(images).float(), labels, reduction="none")

    def blocks(self) -> Mapping[str, Sequence[Group]]:
        """Return the layout."""
        return self.layout

    def made_up(self, records: int) -> Batch:
        """Return images that differ, and labels."""
        drawn = torch.Generator().manual_seed(1)
        shape = (records, 3, self.pixels, self.pixels)
        return torch.randn(shape, generator=drawn), torch.arange(records) % 2
