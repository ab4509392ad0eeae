"""Built-in models: their blocks are those that plans name, and their losses are a record's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from affidavit.trainer.adapters import ModelAdapter, select_records
from affidavit.trainer.clipping.private_model import PrivateModel
from affidavit.trainer.clipping.probe import probe
from affidavit.trainer.clipping.requirements import BlockSpec
from affidavit.trainer.data.numeric_data import Labelled
from affidavit.trainer.models.layout import LoRALinear
from affidavit.trainer.models.mlp import mlp
from affidavit.trainer.sources import WrongOption, load_model
from examples.train.gpt2 import LanguageModel, gpt2
from examples.train.text import TextRecords, generated

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 20, "n_positions": 64}


@pytest.fixture(scope="module")
def text() -> TextRecords:
    return generated("40,seed=1")


@pytest.fixture(scope="module")
def numbers() -> Labelled:
    return Labelled(torch.randn(30, 6), torch.arange(30) % 3, classes=3)


@pytest.fixture
def language(tmp_path: Path, text: TextRecords) -> Callable[[str], LanguageModel]:
    def of(options: str) -> LanguageModel:
        (tmp_path / "tiny.json").write_text(json.dumps(SHAPE))
        return gpt2(f"{tmp_path / 'tiny.json'},seed=1{options}", text)

    return of


def private(model: ModelAdapter, clip_norm: float = 1.0) -> PrivateModel:
    specs = [
        BlockSpec(
            name=f"{release}-{place}",
            clip_norm=clip_norm,
            names=group.names,
            uses={layer: share * clip_norm for layer, share in group.uses.items()},
        )
        for release, groups in model.blocks().items()
        for place, group in enumerate(groups)
    ]
    return PrivateModel(model.module, specs)


@pytest.mark.ordinary("-counts0", ",tie=uses-*", ",lora=2,blocks=kinds-*")
@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ("", {"hidden": 8, "auxiliary": 1}),
        (",tie=untied", {"hidden": 8, "auxiliary": 1}),
        (",tie=uses", {"hidden": 8, "tied": 1, "auxiliary": 1}),
        (
            ",blocks=kinds",
            {"attention-in": 2, "attention-out": 2, "mlp-in": 2, "mlp-out": 2, "auxiliary": 1},
        ),
        (",blocks=all", {"all": 1}),
        (",lora=2", {"hidden": 16}),
        (",lora=2,blocks=all", {"adapters": 1}),
        (
            ",lora=2,blocks=kinds",
            {"attention-in": 4, "attention-out": 4, "mlp-in": 4, "mlp-out": 4},
        ),
    ],
)
def test_blocks_are_the_releases_that_a_plan_names_and_every_tensor_is_in_one(
    language: Callable[[str], LanguageModel], options: str, counts: dict[str, int]
) -> None:
    model = language(options)
    assert {release: len(groups) for release, groups in model.blocks().items()} == counts
    held = private(model)  # refuses a tensor in no block or in two
    result = probe(held, lambda rows: model.losses(select_records(model.made_up(3), rows)))
    tied = "lm_head.weight" not in result and "lora" not in options
    assert max(result.values()) == (2 if tied else 1)


def test_a_tied_table_is_clipped_by_the_rule_that_was_asked_for(
    language: Callable[[str], LanguageModel], text: TextRecords
) -> None:
    """All three rules keep a record within what the plan says; the exact one wastes least."""
    batch = text.collate(torch.tensor([3]))
    moved = {}
    for rule in ("exact", "uses", "untied"):
        model = language(f",tie={rule}")
        held = private(model, clip_norm=1e-3)
        held.accumulate(lambda model=model: model.losses(batch), records=1)
        moved[rule] = float(held.sums()["transformer.wte.weight"].norm())
    assert max(moved.values()) <= 1e-3
    assert moved["uses"] > 0
    assert len(set(moved.values())) == 3


@pytest.mark.parametrize("options", ["", ",lora=2", ",tie=untied"])
def test_losses_are_each_records_own_and_only_the_target_counts(
    language: Callable[[str], LanguageModel], text: TextRecords, options: str
) -> None:
    model = language(options)
    together = model.losses(text.collate(torch.arange(12)))
    for record in range(12):
        tokens, counted = text.collate(torch.tensor([record]))
        (alone,) = model.losses((tokens, counted))
        logits = model.module(tokens)[0].log_softmax(-1)
        item = [
            -logits[t - 1, tokens[0, t]] for t in range(1, tokens.shape[1]) if bool(counted[0, t])
        ]
        torch.testing.assert_close(alone, torch.stack(item).mean())
        torch.testing.assert_close(together[record], alone)


def test_a_record_without_a_target_has_no_loss_and_no_gradient(
    language: Callable[[str], LanguageModel],
) -> None:
    model = language("")
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    counted = torch.tensor([[False, False, False], [False, False, True]])
    held = private(model)
    losses = held.accumulate(lambda: model.losses((tokens, counted)), records=2)
    assert losses[0] == 0
    assert losses[1] > 0


def test_lora_trains_only_its_own_tensors_and_starts_at_the_base(
    language: Callable[[str], LanguageModel], text: TextRecords
) -> None:
    base, adapted = language(""), language(",lora=2,alpha=8")
    batch = text.collate(torch.arange(4))
    assert torch.equal(base.losses(batch), adapted.losses(batch))
    names = {n for n, item in adapted.module.named_parameters() if item.requires_grad}
    assert {name.split(".")[-2] for name in names} == {"down", "up"}


def test_a_perceptron_has_hidden_matrices_and_the_rest(numbers: Labelled) -> None:
    model = mlp("5-4,seed=1", numbers)
    groups = model.blocks()
    assert [group.names for group in groups["hidden"]] == [("0.weight",), ("2.weight",)]
    assert groups["auxiliary"][0].names == ("0.bias", "2.bias", "4.weight", "4.bias")
    assert model.losses(numbers.collate(torch.arange(7))).shape == (7,)
    assert set(
        probe(
            private(model), lambda rows: model.losses(select_records(model.made_up(3), rows))
        ).values()
    ) == {1}
    assert isinstance(mlp("linear,seed=1,blocks=all", numbers).module, nn.Sequential)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("", "give layer widths"),
        ("0-3,seed=1", "give layer widths"),
        ("8", "give seed"),
        ("8,seed=-1", "seed"),
        ("8,seed=1,seed=1", "twice"),
        ("8,seed=1,depth=2", "unknown option depth"),
        ("8,seed=1,blocks=each", "one of hidden, all"),
        ("linear,seed=1", "blocks=all"),
        ("8,seed", "not an option"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    argument: str, message: str, numbers: Labelled
) -> None:
    with pytest.raises(WrongOption, match=message):
        mlp(argument, numbers)


def test_models_refuse_data_that_is_not_theirs(text: TextRecords, numbers: Labelled) -> None:
    with pytest.raises(WrongOption, match="needs data with features"):
        load_model("mlp:8,seed=1", text)
    with pytest.raises(WrongOption, match="needs text data"):
        gpt2("config.json,seed=1", numbers)


def test_positions_must_be_enough_for_the_longest_record(tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps({**SHAPE, "n_positions": 8}))
    with pytest.raises(WrongOption, match="longest=9"):
        gpt2(f"{tmp_path / 'tiny.json'},seed=1", generated("4,seed=1"))


def test_an_adapter_is_on_the_device_of_its_layer() -> None:
    generator = torch.Generator()
    with torch.device("meta"):
        base = nn.Linear(4, 3)
    adapter = LoRALinear(base, rank=2, alpha=1.0, generator=generator)
    assert {item.device.type for item in adapter.parameters()} == {"meta"}
