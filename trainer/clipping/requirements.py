"""Requirements on a model and its blocks, checked before the model runs.

A trainable tensor in no block would be trained without noise, and a layer that mixes records has no
per-record gradients. ``affidavit.trainer.clipping.probe`` and the gradient hooks find what shows
only when the model runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import jit, nn
from torch.nn.parameter import is_lazy

from affidavit.trainer.clipping.frozen_statistics import is_frozen
from affidavit.trainer.errors import UnsupportedModel
from affidavit.trainer.norm_bounds import MAX_CLIP_NORM, MIN_CLIP_NORM


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSpec:
    """The parameters ``names``, clipped together to l2 norm ``clip_norm``.

    ``uses`` is for a tied tensor: the layers that use it, each with its own clip norm. A record
    then moves the tensor by at most their sum, which is at most ``clip_norm``.
    """

    name: str
    clip_norm: float
    names: tuple[str, ...]
    uses: Mapping[str, float] = field(default_factory=dict)


def require_partition(trainable: Mapping[str, nn.Parameter], blocks: Sequence[BlockSpec]) -> None:
    """Raise ``UnsupportedModel`` unless each trainable tensor is in exactly one block."""
    named = [name for block in blocks for name in block.names]
    twice = sorted({name for name in named if named.count(name) > 1})
    if twice:
        raise UnsupportedModel(
            f"{', '.join(twice)}: named twice by the blocks; name each tensor once."
        )
    unknown = sorted(set(named) - set(trainable))
    if unknown:
        raise UnsupportedModel(
            f"{', '.join(unknown)}: no trainable tensor of the model has this name (a tied tensor "
            "has the name of its first use)."
        )
    missing = sorted(set(trainable) - set(named))
    if missing:
        raise UnsupportedModel(
            f"{', '.join(missing)}: trainable, but in no block; it would be trained without "
            "clipping and noise. Put it in a block, or freeze it."
        )
    labels = [block.name for block in blocks]
    if len(set(labels)) < len(labels):
        raise UnsupportedModel("two blocks have one name; give each block its own.")
    for block in blocks:
        _require_clip_norm(block)
    for name, parameter in trainable.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UnsupportedModel(
                f"{name} has a gradient hook, which would see no gradient: the tensor only gets "
                "noisy means. Remove the hook."
            )
        if is_lazy(parameter) or parameter.is_meta:
            raise UnsupportedModel(
                f"{name} has no values yet. Run a lazy layer once on made-up records, and load the "
                "weights of a model on the meta device."
            )
        if not parameter.numel():
            raise UnsupportedModel(f"{name} has no entries: there is nothing to train. Freeze it.")
        if not parameter.is_floating_point():
            raise UnsupportedModel(
                f"{name} is {parameter.dtype}: it has no real gradient to clip. Freeze it."
            )


def _require_clip_norm(block: BlockSpec) -> None:
    if not block.names:
        raise UnsupportedModel(f"block {block.name}: names no tensor.")
    for clip_norm in (block.clip_norm, *block.uses.values()):
        if not MIN_CLIP_NORM <= clip_norm <= MAX_CLIP_NORM:
            raise UnsupportedModel(
                f"block {block.name}: clip_norm {clip_norm:g} lies outside "
                f"[{MIN_CLIP_NORM:g}, {MAX_CLIP_NORM:g}], where norms in float32 are valid."
            )
    if block.uses and len(block.names) != 1:
        raise UnsupportedModel(f"block {block.name}: uses need exactly one tensor; name one.")
    if block.uses and math.fsum(block.uses.values()) > block.clip_norm * (1 + 2.0**-50):
        raise UnsupportedModel(
            f"block {block.name}: its uses are clipped to {math.fsum(block.uses.values()):g} "
            f"together, above its clip_norm {block.clip_norm:g}."
        )


def require_supported(path: str, layer: nn.Module, trained: Sequence[str]) -> None:
    """Raise ``UnsupportedModel`` for a layer that mixes records or cannot be hooked.

    ``trained`` are the layer's own trainable tensors.
    """
    where = f"{path or 'the model'} ({type(layer).__name__})"
    if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not is_frozen(layer):
        raise UnsupportedModel(
            f"{where} mixes records: its output for one record depends on others in the lot. "
            "Use group or layer normalisation, or call eval() on the layer before the run, which "
            "freezes its running statistics."
        )
    if isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats:
        raise UnsupportedModel(
            f"{where} keeps running statistics of raw data; set track_running_stats=False."
        )
    if type(layer).get_extra_state is not nn.Module.get_extra_state:
        raise UnsupportedModel(
            f"{where} saves more than tensors of its own (get_extra_state), which may be "
            "statistics of raw data. Remove get_extra_state."
        )
    if not trained:
        return
    if isinstance(layer, jit.ScriptModule):
        raise UnsupportedModel(
            f"{where} was compiled by TorchScript, which runs past the trainer. Give the module "
            "that it was made from."
        )
    if "forward" in layer.__dict__:
        raise UnsupportedModel(
            f"{where}: its forward was replaced, by another library or by a PrivateModel that was "
            "not detached."
        )
    _require_plain(where, layer)


def _require_plain(where: str, layer: nn.Module) -> None:
    if isinstance(layer, nn.Embedding) and (
        layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse
    ):
        raise UnsupportedModel(
            f"{where}: max_norm, scale_grad_by_freq and sparse make the table or its gradient "
            "depend on the lot; turn them off."
        )
