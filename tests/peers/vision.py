"""Models of timm and torchvision, as small as they go: clipped sums equal those of single records.

``make try-peers`` runs these tests in an environment that has both packages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

try:
    import torchvision.models as tv
except RuntimeError:  # its operators, which no model here uses, are built for another device
    OPERATORS = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float threshold) -> Tensor")
    import torchvision.models as tv
import timm.layers
import timm.models as im

from tests.trainer.clipping.architectures import RECORDS, squares
from tests.trainer.clipping.test_architectures import require_equal_sums

PIXELS = 32
GROUPS = partial(nn.GroupNorm, 2)
TV: dict[str, Any] = {"num_classes": 5}
STILL: dict[str, Any] = {**TV, "stochastic_depth_prob": 0}
GROUPED: dict[str, Any] = {**TV, "norm_layer": GROUPS}
WINDOWS: dict[str, Any] = {
    "patch_size": [4, 4],
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": [4, 4],
}
IM: dict[str, Any] = {"num_classes": 5, "img_size": PIXELS}
MIXER: dict[str, Any] = {**IM, "patch_size": 16, "embed_dim": 16, "num_blocks": 2}
BLOCK = tv.convnext.CNBlockConfig
FUSED, INVERTED = tv.efficientnet.FusedMBConvConfig, tv.efficientnet.MBConvConfig
REGULAR = {
    "depths": [1, 1],
    "widths": [8, 16],
    "group_widths": [8, 8],
    "bottleneck_multipliers": [1.0, 1.0],
    "strides": [2, 2],
    "se_ratio": 0.25,
}


def named(name: str, **sizes: Any) -> nn.Module:
    """One of timm's by its name, two blocks deep."""
    return timm.create_model(name, img_size=PIXELS, depth=2, num_heads=2, num_classes=5, **sizes)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torchvision ResNet": lambda: tv.ResNet(tv.resnet.BasicBlock, [1] * 4, **GROUPED),
    "torchvision ResNeXt": lambda: tv.ResNet(
        tv.resnet.Bottleneck, [1] * 4, groups=4, width_per_group=4, **GROUPED
    ),
    "torchvision ViT": lambda: tv.VisionTransformer(PIXELS, 16, 2, 2, 16, 32, **TV),
    "torchvision Swin": lambda: tv.SwinTransformer(**WINDOWS, **STILL),
    "torchvision Swin V2": lambda: tv.SwinTransformer(
        **WINDOWS,
        **STILL,
        block=tv.swin_transformer.SwinTransformerBlockV2,
        downsample_layer=tv.swin_transformer.PatchMergingV2,
    ),
    "torchvision ConvNeXt": lambda: tv.ConvNeXt([BLOCK(8, 16, 1), BLOCK(16, None, 1)], **STILL),
    "torchvision MobileNetV2": lambda: tv.MobileNetV2(width_mult=0.25, dropout=0, **GROUPED),
    "torchvision MobileNetV3": lambda: tv.mobilenet_v3_small(width_mult=0.25, dropout=0, **GROUPED),
    "torchvision SqueezeNet": lambda: tv.SqueezeNet("1_1", dropout=0, **TV),
    "torchvision EfficientNetV2": lambda: tv.EfficientNet(
        [FUSED(1, 3, 1, 8, 8, 1), INVERTED(2, 3, 2, 8, 16, 1)],
        dropout=0,
        last_channel=16,
        norm_layer=GROUPS,
        **STILL,
    ),
    "torchvision RegNet": lambda: tv.RegNet(tv.regnet.BlockParams(**REGULAR), **GROUPED),
    "timm ViT": lambda: named("vit_tiny_patch16_224", embed_dim=16),
    "timm ViT with rotary positions": lambda: named("vit_small_patch16_rope_224", embed_dim=24),
    "timm DeiT": lambda: named("deit_tiny_distilled_patch16_224", embed_dim=16),
    "timm BEiT": lambda: named("beit_base_patch16_224", embed_dim=16),
    "timm CaiT": lambda: named("cait_xxs24_224", embed_dim=16),
    "timm EVA-02": lambda: named("eva02_base_patch16_clip_224", embed_dim=24),
    "timm ConvNeXt": lambda: im.ConvNeXt(dims=(8,) * 4, depths=(1,) * 4, num_classes=5),
    "timm ResNetV2": lambda: im.ResNetV2(
        [1, 1],
        channels=(32, 64),
        stem_chs=8,
        num_classes=5,
        norm_layer=partial(timm.layers.GroupNormAct, num_groups=4),
    ),
    "timm NFNet": lambda: im.NormFreeNet(
        im.nfnet.NfCfg(depths=(1, 1), channels=(16, 32), stem_type="3x3", stem_chs=8, group_size=8),
        num_classes=5,
    ),
    "timm MLP-Mixer": lambda: im.MlpMixer(**MIXER),
    "timm gMLP": lambda: im.MlpMixer(
        **MIXER,
        mlp_ratio=4,
        block_layer=im.mlp_mixer.SpatialGatingBlock,
        mlp_layer=timm.layers.GatedMlp,
    ),
    "timm ResMLP": lambda: im.MlpMixer(
        **MIXER, mlp_ratio=4, block_layer=im.mlp_mixer.ResBlock, norm_layer=im.mlp_mixer.Affine
    ),
    "timm PoolFormer": lambda: im.metaformer.MetaFormer(depths=(1, 1), dims=(8, 16), num_classes=5),
}


@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("name", MODELS)
def test_sums_equal_those_of_single_records(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    images = torch.randn(RECORDS, 3, PIXELS, PIXELS)
    require_equal_sums(name, (model, images, lambda m, x: squares(m(x))))
