"""Batch normalisation with frozen statistics: a fixed affine map of each record.

In evaluation mode a layer with running statistics neither reads nor writes those of a batch, so its
records stay apart. ``freeze`` keeps such layers in that mode, because loops call ``model.train()``.
"""

from __future__ import annotations

from types import MethodType

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def is_frozen(layer: nn.Module) -> bool:
    """Return whether ``layer`` is a batch normalisation by its running statistics."""
    return (
        isinstance(layer, _BatchNorm)
        and not layer.training
        and layer.running_mean is not None
        and layer.running_var is not None
    )


def freeze(model: nn.Module) -> None:
    """Have layers that are frozen now stay so, whatever mode ``model`` is switched to."""
    for layer in model.modules():
        if is_frozen(layer):
            layer.train = MethodType(_stay, layer)  # type: ignore[method-assign]  # until unfreeze


def unfreeze(model: nn.Module) -> None:
    """Let layers follow the mode of ``model`` again."""
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.__dict__.pop("train", None)


def _stay(layer: nn.Module, mode: bool = True) -> nn.Module:
    del mode
    return layer
