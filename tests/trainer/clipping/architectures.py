"""Architectures that people train, as small as they go: a model, inputs and a loss each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

RECORDS, TOKENS, WORDS = 3, 6, 31
Losses = Callable[[nn.Module, Tensor], Tensor]
Case = tuple[nn.Module, Tensor, Losses]

WIDTH = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": WORDS}
DECODER = {**WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
HEADS = {**DECODER, "head_dim": 4}
ENCODER = {**WIDTH, "num_attention_heads": 2, "max_position_embeddings": 32}
STATES = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}
STILL = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
VISION = {
    **{name: size for name, size in WIDTH.items() if name != "vocab_size"},
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}
PAIRED = {
    "d_model": 16,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "vocab_size": WORDS,
    "dropout": 0,
}


@cache
def hf() -> Any:
    """Transformers, imported late: every process of the tests collects this module."""
    result = import_module("transformers")
    result.logging.set_verbosity_error()
    return result


def words() -> Tensor:
    """Token numbers (n, T), none of them special."""
    return torch.randint(3, WORDS, (RECORDS, TOKENS))


def squares(values: Tensor) -> Tensor:
    """One loss a record, of which no gradient is bounded."""
    return values.flatten(1).square().sum(1)


def language(kind: str, config: str, **sizes: Any) -> Case:
    """A causal language model."""
    model = getattr(hf(), kind)(getattr(hf(), config)(**sizes))
    return model, words(), lambda m, x: squares(m(input_ids=x, use_cache=False).logits)


def encoder(kind: str, config: str, **sizes: Any) -> Case:
    """A model of whole texts, without a pooler."""
    model = getattr(hf(), kind)(getattr(hf(), config)(**sizes))
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model, words(), lambda m, x: squares(m(input_ids=x).last_hidden_state)


def translator(kind: str, config: str, **sizes: Any) -> Case:
    """An encoder and a decoder."""
    model = getattr(hf(), kind)(getattr(hf(), config)(**sizes))
    return (
        model,
        words(),
        lambda m, x: squares(m(input_ids=x, decoder_input_ids=x, use_cache=False).logits),
    )


def vision(kind: str, config: str, **sizes: Any) -> Case:
    """A classifier of images."""
    model = getattr(hf(), kind)(getattr(hf(), config)(**sizes))
    return model, torch.randn(RECORDS, 3, 32, 32), lambda m, x: squares(m(x).logits)


def whisper() -> Case:
    """Sound to text."""
    config = hf().WhisperConfig(
        **PAIRED,
        max_source_positions=8,
        max_target_positions=8,
        num_mel_bins=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        ids = (x[:, 0, :TOKENS].abs() * 5).long() % WORDS
        result = model(input_features=x, decoder_input_ids=ids, use_cache=False)
        return squares(result.last_hidden_state)

    return hf().WhisperModel(config), torch.randn(RECORDS, 4, 16), losses


def sound(kind: str, config: str) -> Case:
    """Sound, with a convolution under weight normalisation."""
    sizes = getattr(hf(), config)(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        conv_dim=[8, 8],
        conv_stride=[4, 2],
        conv_kernel=[4, 2],
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        do_stable_layer_norm=True,
        feat_extract_norm="layer",
        mask_time_prob=0,
        hidden_dropout=0,
        attention_dropout=0,
        feat_proj_dropout=0,
        activation_dropout=0,
        layerdrop=0,
    )
    model = getattr(hf(), kind)(sizes)
    return model, torch.randn(RECORDS, 160), lambda m, x: squares(m(x).last_hidden_state)


class Residual(nn.Module):
    """Two convolutions with group normalisation, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.GroupNorm(2, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.GroupNorm(2, outputs),
        )
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, outputs, height / stride, width / stride)."""
        return torch.relu(self.body(x) + self.around(x))


def resnet18(*widths: int, classes: int = 10) -> nn.Module:
    """ResNet-18 with group normalisation, of these four widths."""
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.ReLU()]
    before = widths[0]
    for place, width in enumerate(widths):
        layers += [Residual(before, width, 1 + (place > 0)), Residual(width, width, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


CHEAP: dict[str, Callable[[], Case]] = {
    "gpt2": lambda: language(
        "GPT2LMHeadModel",
        "GPT2Config",
        n_embd=16,
        n_layer=2,
        n_head=2,
        vocab_size=WORDS,
        n_positions=16,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    ),
    "llama": lambda: language("LlamaForCausalLM", "LlamaConfig", **HEADS),
    "gemma2": lambda: language("Gemma2ForCausalLM", "Gemma2Config", **HEADS),
    "mixtral": lambda: language(
        "MixtralForCausalLM", "MixtralConfig", **HEADS, num_local_experts=3
    ),
    "vit": lambda: vision("ViTForImageClassification", "ViTConfig", **VISION),
    "resnet18": lambda: (
        resnet18(4, 4, 8, 8),
        torch.randn(RECORDS, 3, 8, 8),
        lambda m, x: squares(m(x)),
    ),
}
"""Those of the ordinary run of the tests."""

OTHERS: dict[str, Callable[[], Case]] = {
    "qwen2": lambda: language("Qwen2ForCausalLM", "Qwen2Config", **DECODER),
    "qwen3": lambda: language("Qwen3ForCausalLM", "Qwen3Config", **HEADS),
    "mistral": lambda: language("MistralForCausalLM", "MistralConfig", **HEADS),
    "gemma": lambda: language("GemmaForCausalLM", "GemmaConfig", **HEADS),
    "gemma3": lambda: language("Gemma3ForCausalLM", "Gemma3TextConfig", **HEADS),
    "phi3": lambda: language("Phi3ForCausalLM", "Phi3Config", **DECODER),
    "gpt-neox": lambda: language("GPTNeoXForCausalLM", "GPTNeoXConfig", **ENCODER),
    "opt": lambda: language(
        "OPTForCausalLM",
        "OPTConfig",
        **{n: s for n, s in ENCODER.items() if n != "intermediate_size"},
        ffn_dim=32,
        word_embed_proj_dim=16,
        dropout=0,
    ),
    "bloom": lambda: language(
        "BloomForCausalLM", "BloomConfig", hidden_size=16, n_layer=2, n_head=2, vocab_size=WORDS
    ),
    "mamba": lambda: language(
        "MambaForCausalLM",
        "MambaConfig",
        hidden_size=16,
        state_size=4,
        num_hidden_layers=1,
        vocab_size=WORDS,
    ),
    "mamba2": lambda: language(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        hidden_size=16,
        state_size=4,
        num_hidden_layers=1,
        num_heads=4,
        head_dim=8,
        n_groups=1,
        chunk_size=4,
        vocab_size=WORDS,
    ),
    "bamba": lambda: language(
        "BambaForCausalLM", "BambaConfig", **DECODER, **STATES, attn_layer_indices=[1]
    ),
    "falcon-h1": lambda: language(
        "FalconH1ForCausalLM", "FalconH1Config", **HEADS, **STATES, mamba_d_ssm=32
    ),
    "recurrent-gemma": lambda: language(
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        **{**HEADS, "num_hidden_layers": 3},
        lru_width=16,
        attention_window_size=8,
    ),
    "rwkv": lambda: language(
        "RwkvForCausalLM",
        "RwkvConfig",
        **WIDTH,
        attention_hidden_size=16,
        context_length=16,
        rescale_every=0,  # else a pass in evaluation mode writes to weights
    ),
    "qwen2-moe": lambda: language(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        **DECODER,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    ),
    "bert": lambda: encoder("BertModel", "BertConfig", **ENCODER, **STILL),
    "roberta": lambda: encoder("RobertaModel", "RobertaConfig", **ENCODER, **STILL),
    "albert": lambda: encoder("AlbertModel", "AlbertConfig", **ENCODER, **STILL, embedding_size=8),
    "modernbert": lambda: encoder("ModernBertModel", "ModernBertConfig", **ENCODER, pad_token_id=0),
    "deberta-v2": lambda: encoder(
        "DebertaV2Model",
        "DebertaV2Config",
        **ENCODER,
        **STILL,
        relative_attention=True,
        position_buckets=4,
        pos_att_type=["p2c", "c2p"],
    ),
    "t5": lambda: translator(
        "T5ForConditionalGeneration",
        "T5Config",
        d_model=16,
        d_ff=32,
        d_kv=8,
        num_layers=2,
        num_heads=2,
        vocab_size=WORDS,
        dropout_rate=0,
    ),
    "bart": lambda: translator(
        "BartForConditionalGeneration", "BartConfig", **PAIRED, max_position_embeddings=32
    ),
    "whisper": whisper,
    "longt5": lambda: translator(
        "LongT5ForConditionalGeneration",
        "LongT5Config",
        d_model=16,
        d_ff=32,
        d_kv=8,
        num_layers=1,
        num_heads=2,
        vocab_size=WORDS,
        dropout_rate=0,
        local_radius=3,
        global_block_size=2,
        encoder_attention_type="transient-global",
    ),
    "wav2vec2": lambda: sound("Wav2Vec2Model", "Wav2Vec2Config"),
    "hubert": lambda: sound("HubertModel", "HubertConfig"),
    "swin": lambda: vision(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
        drop_path_rate=0,
    ),
    "convnext": lambda: vision(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        hidden_sizes=[8, 8, 8, 8],
        depths=[1, 1, 1, 1],
        drop_path_rate=0,
    ),
    "dinov2": lambda: vision("Dinov2ForImageClassification", "Dinov2Config", **VISION),
}
"""Those of ``make soak``."""
