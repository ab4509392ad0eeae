"""GPT-2's function, against the logits of the library whose files it reads."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from examples.train.gpt2 import (
    GPT2,
    GPT2Config,
    WrongConfig,
    WrongWeights,
    grow_vocabulary,
    hidden_matrices,
    pretrained,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "vectors" / "gpt2.json").read_text())
CASES = pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 6}


def published(config: GPT2Config) -> dict[str, Tensor]:
    """The vector's weights, under the names and in the orientation of published files."""
    state = GPT2(config, seed=0).state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    result = {}
    for place, name in enumerate(sorted(state)):
        is_transposed = state[name].ndim == 2 and ".h." in name
        shape = state[name].mT.shape if is_transposed else state[name].shape
        wave = torch.sin(torch.arange(shape.numel(), dtype=torch.float64) * 0.37 + 1.3 * place)
        scale = ".ln_" in name and name.endswith("weight")
        result[name] = (0.4 * wave.view(shape) + scale).float()
    return result


def folder_of(tmp_path: Path, document: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(document))
    save_file({name: item.contiguous() for name, item in weights.items()}, tmp_path / FILE)
    return tmp_path


FILE = "model.safetensors"


@CASES
def test_logits_are_those_of_the_published_implementation(
    case: dict[str, Any], tmp_path: Path
) -> None:
    config = GPT2Config.parsed(case["config"])
    model = pretrained(folder_of(tmp_path, case["config"], published(config)))
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-5)):
        with torch.no_grad():
            result = model.to(dtype)(torch.tensor(case["ids"]))[:, ::3]
        expected = torch.tensor(case["logits"], dtype=dtype)
        assert (result - expected).abs().max() <= tolerance * (1 + expected.abs().max())


@CASES
def test_old_files_in_pickles_without_prefix_and_with_masks_are_the_same_model(
    case: dict[str, Any], tmp_path: Path
) -> None:
    config = GPT2Config.parsed(case["config"])
    weights = published(config)
    first = pretrained(folder_of(tmp_path, case["config"], weights))
    old = {name.removeprefix("transformer."): item for name, item in weights.items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    (tmp_path / FILE).unlink()
    torch.save(old, tmp_path / "pytorch_model.bin")
    second = pretrained(tmp_path).state_dict()
    assert all(torch.equal(item, second[name]) for name, item in first.state_dict().items())


def test_weights_in_parts_are_the_same_model(tmp_path: Path) -> None:
    config = GPT2Config.parsed(TINY)
    weights = published(config)
    whole = pretrained(folder_of(tmp_path, TINY, weights)).state_dict()
    (tmp_path / FILE).unlink()
    places = {}
    for part, names in enumerate((sorted(weights)[::2], sorted(weights)[1::2])):
        file = f"model-{part}.safetensors"
        save_file({name: weights[name].contiguous() for name in names}, tmp_path / file)
        places |= dict.fromkeys(names, file)
    index = tmp_path / f"{FILE}.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    result = pretrained(tmp_path).state_dict()
    assert all(torch.equal(item, result[name]) for name, item in whole.items())
    index.write_text(json.dumps({"weight_map": {"wte.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(WrongWeights, match="outside its folder"):
        pretrained(tmp_path)


def test_an_untied_head_starts_as_the_token_table_and_is_another_tensor(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, TINY, published(GPT2Config.parsed(TINY)))
    tied, untied = pretrained(folder), pretrained(folder, tied=False)
    assert tied.lm_head.weight is tied.transformer.wte.weight
    assert untied.lm_head.weight is not untied.transformer.wte.weight
    assert torch.equal(untied.lm_head.weight, untied.transformer.wte.weight)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(tied(ids), untied(ids))


@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_get_the_mean_row_and_old_logits_stay(tied: bool) -> None:
    model = GPT2(GPT2Config.parsed({**TINY, "tie_word_embeddings": tied}), seed=3)
    ids = torch.tensor([[1, 2, 3]])
    before, mean = model(ids).detach(), model.transformer.wte.weight.detach().mean(0)
    rows = model.lm_head.weight.detach().clone()
    grow_vocabulary(model, 13)
    assert torch.equal(model.lm_head.weight[:11], rows)  # exactly, and logits but for rounding
    assert torch.allclose(model(ids)[..., :11], before, rtol=1e-5, atol=1e-6)
    assert torch.equal(model.transformer.wte.weight[11:], mean.expand(2, -1))
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied
    grow_vocabulary(model, 5)
    assert model(ids).shape[-1] == 13


def test_later_tokens_and_padding_change_nothing_before_them() -> None:
    model = GPT2(GPT2Config.parsed(TINY), seed=3).double()
    one, other = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2, 9, 0]])
    assert torch.equal(model(one)[:, :2], model(other)[:, :2])
    assert (model(one)[:, 2:] - model(other)[:, 2:]).abs().min() > 0


def test_first_weights_are_a_function_of_the_seed() -> None:
    config = GPT2Config.parsed(TINY)
    first, again, other = (GPT2(config, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(item, again[name]) for name, item in first.items())
    assert not torch.equal(first["transformer.wte.weight"], other["transformer.wte.weight"])


def test_small_gpt2_has_the_papers_48_matrices() -> None:
    with torch.device("meta"):
        model = GPT2.__new__(GPT2)
        torch.nn.Module.__init__(model)
        model.config = GPT2Config.parsed({})
    assert len(hidden_matrices(model)) == 48


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "tanh"}, "activation_function"),
        ({"n_head": 3}, "not a multiple of n_head"),
        ({"n_layer": 0}, "n_layer"),
        ({"n_layer": True}, "n_layer"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon"),
        ({"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"model_type": "llama"}, "model_type"),
    ],
)
def test_a_configuration_that_is_not_computed_is_refused_by_field(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(WrongConfig, match=message):
        GPT2Config.parsed({**TINY, **change})


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_configuration_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(WrongConfig, match=r"config\.json"):
        pretrained(tmp_path)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "nan", "integers", "head"])
def test_weights_that_do_not_fit_are_refused_by_name(fault: str, tmp_path: Path) -> None:
    weights = published(GPT2Config.parsed(TINY))
    name = "transformer.h.1.mlp.c_fc.weight"
    match fault:
        case "missing":
            del weights[name]
        case "unknown":
            weights["transformer.h.2.ln_1.weight"] = torch.ones(8)
            name = "transformer.h.2.ln_1.weight"
        case "shape":
            weights[name] = weights[name].mT
        case "nan":
            weights[name] = torch.full_like(weights[name], torch.nan)
        case "integers":
            weights[name] = weights[name].long()
        case "head":
            weights["lm_head.weight"] = torch.ones(11, 8)
            name = "lm_head.weight"
    with pytest.raises(WrongWeights, match=name):
        pretrained(folder_of(tmp_path, TINY, weights))


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_files_that_broke_off_or_were_changed_are_refused(file: str, tmp_path: Path) -> None:
    weights = published(GPT2Config.parsed(TINY))
    folder_of(tmp_path, TINY, weights)
    if file.endswith("bin"):
        (tmp_path / FILE).unlink()
        torch.save(weights, tmp_path / file)
    whole = (tmp_path / file).read_bytes()
    for broken in [whole[:size] for size in (0, 1, 7, 9, 60, 300, len(whole) // 2, len(whole) - 9)]:
        (tmp_path / file).write_bytes(broken)
        with pytest.raises(WrongWeights):
            pretrained(tmp_path)
    for place in range(0, 200, 7):
        (tmp_path / file).write_bytes(
            whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :]
        )
        with contextlib.suppress(WrongWeights):
            pretrained(tmp_path)


class Evil:
    """What a pickle may hold: a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("called",))


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", None])
def test_files_that_are_no_weights_are_refused_and_nothing_in_them_runs(
    file: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    if file == "model.safetensors":
        (tmp_path / file).write_bytes(b"\xff" * 64)
    elif file:
        torch.save({"wte.weight": Evil()}, tmp_path / file)
    with pytest.raises(WrongWeights, match="cannot read" if file else "neither"):
        pretrained(tmp_path)
    assert "called" not in capsys.readouterr().out
