"""Conditions on options and constants: what they leave out, and what they never hide."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from affidavit.importers.scripts import importer
from tests.gate.checking.script_codes import questions

SCRIPT = """\
import argparse
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
# affidavit: adjacency=zero_out target_epsilon=9

{top}
def learn(model, lots, optimizer):
    for x, y in lots:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        {step}

def main(args):
    data = datasets.MNIST("files", train=True, transform=transforms.ToTensor())
    lots = DataLoader(data, batch_size=args.lot)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sigma = 1.1
    {before}
    if {private}:
        engine = PrivacyEngine()
        model, optimizer, lots = engine.make_private(
            module=model, optimizer=optimizer, data_loader=lots, noise_multiplier=sigma,
            max_grad_norm=1.0)
        {after}
    for epoch in range(args.rounds):
        {turn}
    print(engine.get_epsilon(delta=1e-5))

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lot", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--eps", type=int, default=4)
    parser.add_argument("--mode", default="plain")
    parser.add_argument("--private", {flag})
    parser.add_argument("--no-dp", action="store_true")
    args = parser.parse_args()
    {start}
"""
PLAIN = {
    "top": "pass", "step": "optimizer.step()", "before": "pass", "after": "pass",
    "turn": "learn(model, lots, optimizer)", "private": "not args.no_dp",
    "flag": 'action="store_true"', "start": "main(args)",
}  # fmt: skip
TUNE = "from tools import tune; tune(model, optimizer, lots)"
EITHER = "if {0}:\n            {1}\n        else:\n            {2}"
LEARN, AGAIN = PLAIN["turn"], "[learn(model, lots, optimizer) for turn in range(50)]"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def script(**places: str) -> str:
    return SCRIPT.format(**PLAIN | places)


def is_complete(data: Mapping[str, Any]) -> bool:
    return {"epochs", "sampling", "dataset", "target"} <= data.keys()


CHAIN = """if args.eps == 8:
        sigma = 0.7
    elif args.eps == 4:
        sigma = 1.4
    else:
        raise ValueError(args.eps)"""


@pytest.mark.parametrize(
    ("places", "field", "value"),
    [
        ({}, "noise", 1.1),
        ({"before": "if args.no_dp:\n        sigma = 0.1"}, "noise", 1.1),
        ({"before": "if args.no_dp and args.eps > 2:\n        sigma = 0.1"}, "noise", 1.1),
        ({"turn": EITHER.format("args.no_dp", AGAIN, LEARN)}, "epochs", 4),
        ({"turn": EITHER.format("args.no_dp", TUNE, LEARN)}, "epochs", 4),
        ({"private": "args.private", "turn": EITHER.format("args.private", LEARN, AGAIN)},
         "epochs", 4),
        ({"private": 'args.mode == "dp"'}, "epochs", 4),
    ],
)  # fmt: skip
def test_what_a_known_condition_leaves_out_is_no_question(
    places: dict[str, str], field: str, value: Any
) -> None:
    partial = importer.read(script(**places).encode(), Path(), name="train.py")
    assert partial is not None
    assert not partial.open_uses
    assert not [item for item in partial.broken if item.adjacencies is None]
    own = partial.data["releases"][0]["noise_multiplier"] if field == "noise" else partial.data
    assert (own if field == "noise" else own[field]) == value


@pytest.mark.parametrize("table", ["{8: 0.7, 4: 1.4}[args.eps]", "{8: 0.7, 4: 1.4}.get(args.eps)"])
def test_a_table_by_a_known_option_is_read(table: str) -> None:
    text = script().replace("sigma = 1.1", f"sigma = {table}")
    partial = importer.read(text.encode(), Path(), name="train.py")
    assert partial is not None
    assert partial.data["releases"][0]["noise_multiplier"] == 1.4


def test_a_chain_of_conditions_on_an_option_is_read() -> None:
    text = script(before=CHAIN).replace("    sigma = 1.1\n", "")
    partial = importer.read(text.encode(), Path(), name="train.py")
    assert partial is not None
    assert partial.data["releases"][0]["noise_multiplier"] == 1.4
    Path("run.sh").write_text("python train.py --eps 8\n")
    assert questions(text, is_complete)


@pytest.mark.parametrize(
    "places",
    [
        # The private call runs where an option is not at its default: what is beside it counts.
        {"private": "args.private", "after": TUNE},
        {"private": "args.private", "turn": EITHER.format("args.private", TUNE, LEARN)},
        {"private": "args.private", "turn": EITHER.format("args.private", AGAIN, LEARN)},
        {"private": 'args.mode == "dp"', "turn": EITHER.format('args.mode == "dp"', TUNE, LEARN)},
        {"private": 'args.mode != "plain"',
         "turn": EITHER.format('args.mode == "dp"', TUNE, LEARN)},
        {"private": "args.private", "flag": "type=int, default=False",
         "turn": EITHER.format("args.private == 2", TUNE, LEARN)},
        {"private": "PRIVATE", "top": "PRIVATE = False",
         "turn": EITHER.format("PRIVATE", TUNE, LEARN)},
        # Another turn of a loop, or another call, takes the other side.
        {"turn": EITHER.format("epoch == 0", LEARN, AGAIN)},
        {"top": "def choose(own, *some):\n    if own:\n        learn(*some)\n    else:\n"
                "        for turn in range(99):\n            learn(*some)",
         "turn": "choose(True, model, lots, optimizer); choose(False, model, lots, optimizer)"},
        # A function that is left out by name, and runs by another.
        {"top": "def more(some):\n    for turn in range(99):\n        learn(*some)",
         "turn": "learn(model, lots, optimizer); again = more; again([model, lots, optimizer])",
         "before": "if args.no_dp:\n        more([])"},
        # What a condition depends on changes.
        {"before": "args.no_dp = True\n    if args.no_dp:\n        sigma = 0.1"},
        {"before": "weak = False\n    weak = bool(data)\n    if weak:\n        sigma = 0.1"},
    ],
)  # fmt: skip
def test_what_runs_with_the_private_call_is_never_left_out(places: dict[str, str]) -> None:
    assert questions(script(**places), is_complete)


def test_a_layer_that_the_model_calls_is_never_left_out() -> None:
    layer = (
        "class Own(torch.nn.Module):\n    def forward(self, x):\n"
        "        return x - x.mean(0)\nlayer = Own()\n"
    )
    text = script(top=layer, before="if args.no_dp:\n        print(model.forward(torch.zeros(1)))")
    assert questions(text.replace("torch.nn.Flatten()", "layer, torch.nn.Flatten()"), is_complete)


def test_a_fault_is_shown_beside_the_numbers_that_are_missing(checked: Any) -> None:
    step = "if len(optimizer.param_groups) > 1:\n            optimizer.step()"
    text = script(step=step).replace("batch_size=args.lot", "batch_size=read()")
    Path("train.py").write_text(text)
    code, document = checked("train.py")
    found = {item["rule"] for item in document["plans"][0]["findings"]}
    assert code == 2
    assert {"missing_field", "accumulated_lots"} <= found
    Path("train.py").write_text(text.replace(step, "optimizer.step()"))
    found = {item["rule"] for item in checked("train.py")[1]["plans"][0]["findings"]}
    assert "accumulated_lots" not in found


MAKES = (
    "def make(some, short=True):\n    if short:\n        return torch.optim.{0}\n    return {1}\n"
)
RATES = "lr_scheduler.StepLR(some, 2)", "torch.optim.lr_scheduler.ExponentialLR(some, 0.9)"


@pytest.mark.parametrize(
    ("made", "harmless"),
    [
        (MAKES.format(*RATES), True),
        ("from transformers import get_constant_schedule as make\n", True),
        (MAKES.format("SGD(some.param_groups, lr=1.0)", RATES[1]), False),
        (MAKES.format(RATES[0], "(other := torch.optim.SGD(some.param_groups, lr=1.0))"), False),
    ],
)
def test_steps_of_what_a_function_makes_are_told_apart(made: str, harmless: bool) -> None:
    text = script(top=made, after="rate = make(optimizer)", turn=LEARN + "; rate.step()")
    if harmless:
        partial = importer.read(text.encode(), Path(), name="train.py")
        assert partial is not None
        assert partial.data["epochs"] == 4
    assert bool(questions(text, is_complete)) is not harmless


SCALER = "from sklearn.preprocessing import StandardScaler\n    scaler = StandardScaler()\n    "


@pytest.mark.parametrize(
    ("lines", "steps"),
    [
        (SCALER + "scaler.fit([[1.0], [2.0]])", False),
        (SCALER + "import skorch; scaler = skorch.NeuralNetClassifier(model); scaler.fit(a)", True),
        (SCALER + "net = skorch.NeuralNetClassifier(model); scaler = net; scaler.fit(a, b)", True),
        (SCALER + "for scaler in [scaler, net]:\n        scaler.fit(a, b)", True),
        ("from sklearn.pipeline import make_pipeline\n    make_pipeline(net).fit(a, b)", True),
    ],
)
def test_a_scaler_is_no_training(lines: str, steps: bool) -> None:
    text = script(before=lines)
    partial = importer.read(text.encode(), Path(), name="train.py")
    assert partial is not None
    assert ("epochs" in partial.data) is not steps
    assert bool(questions(text, is_complete)) is steps


def turns(
    test: str, every: int = 1, loop: str = "i, (x, y) in enumerate(lots)", before: str = "pass"
) -> str:
    body = f"{before}\n        if {test}:\n            {{}}"
    body = body.format("continue\n        optimizer.step()" if "!=" in test else "optimizer.step()")
    text = script(step=body, turn="learn(model, lots, optimizer, args.eps)")
    text = text.replace("x, y in lots", loop).replace("optimizer):", "optimizer, every):")
    return text.replace("int, default=4)\n    parser.add_argument(\"--mode", (
        f"int, default={every})\n    parser.add_argument(\"--mode"))  # fmt: skip


TURNS = ["(i + 1) % every == 0", "i % every == 0 or i == len(lots) - 1", "(i + 1) % every != 0"]


def faults(text: str) -> set[str]:
    partial = importer.read(text.encode(), Path(), name="train.py")
    assert partial is not None
    return {item.code for item in partial.broken if item.adjacencies is None}


@pytest.mark.parametrize("test", TURNS)
def test_a_step_for_each_lot_accumulates_none(test: str) -> None:
    assert questions(turns(test), is_complete) == 0
    assert "accumulated_lots" in faults(turns(test, every=2))
    Path("run.sh").write_text("python train.py --eps 2\n")
    assert "accumulated_lots" in faults(turns(test))


@pytest.mark.parametrize(
    "text",
    [
        turns("i % 1 == 0", before="i = i / 2"),
        turns("(i + 0.5) % 1 == 0"),
        turns("(i / 2) % 1 == 0"),
        turns("i % 1 == 1"),
        turns("x % 1 == 0"),
        turns("i % 1 == 0", loop="i, (j, (x, y)) in zip([0.5, 1] * 99, enumerate(lots))"),
        turns("i % 1 == 0").replace(
            "def learn", "def enumerate(lots):\n    return lots\n\ndef learn"
        ),
    ],
)
def test_a_step_for_some_lots_accumulates_the_others(text: str) -> None:
    assert questions(text, is_complete) > 0


def test_a_dictionary_call_is_a_literal_unless_the_script_defines_its_own() -> None:
    text = script(before="settings = dict(sigma=0.7)")
    text = text.replace("noise_multiplier=sigma", "noise_multiplier=settings['sigma']")
    partial = importer.read(text.encode(), Path(), name="train.py")
    assert partial is not None
    assert partial.data["releases"][0]["noise_multiplier"] == 0.7
    own = text.replace("pass\n", "def dict(sigma):\n    return {'sigma': 0.1}\n", 1)
    partial = importer.read(own.encode(), Path(), name="train.py")
    assert partial is not None
    assert partial.data["releases"][0]["noise_multiplier"] == 0.1


def tried(handler: str, *, here: bool = True) -> str:
    loop = "for x, y in lots:\n            optimizer.zero_grad()\n            "
    loop += "F.cross_entropy(model(x), y).backward()\n            optimizer.step()"
    text = script(step="optimizer.step()" if not here else "pass", turn=loop if here else LEARN)
    call = text[text.index("model, optimizer, lots = engine") : text.index("max_grad_norm")]
    return text.replace(call, f"try:\n            {call}").replace(
        "max_grad_norm=1.0)\n", f"max_grad_norm=1.0)\n        except ValueError:\n{handler}\n"
    )


@pytest.mark.parametrize(
    ("handler", "here", "stops"),
    [
        ("            return", True, True),
        ("            return", False, False),  # the caller may go on
        ("            return model", True, False),
        ("            pass", True, False),
        ("            if args.eps:\n                raise", True, False),
        ("            if args.eps:\n                raise\n            else:\n"
         "                exit(1)", True, True),
        ("            return\n        finally:\n            LEARN", True, False),
    ],
)  # fmt: skip
def test_a_handler_that_stops_skips_no_private_call(handler: str, here: bool, stops: bool) -> None:
    assert ("private_call_skipped" in faults(tried(handler, here=here))) is not stops


COUNTER = """class Log:
    def __init__(self):
        self.step = 0

    def tell(self):
        self.step += 1
        print(self.step)
"""


def test_an_attribute_that_counts_is_no_step() -> None:
    assert (
        questions(
            script(top=COUNTER, before="log = Log()", turn=f"{LEARN}; log.tell()"), is_complete
        )
        == 0
    )
    other = COUNTER.replace("self.step += 1", "self.step = other.step")
    assert (
        questions(script(top=other, before="log = Log()", turn=f"{LEARN}; log.tell()"), is_complete)
        > 0
    )


SCORE = """def score(model, rows):
    hits = [(model(x).argmax(1) == y).float().mean().item() for x, y in rows]
    if not sum(hits):
        {leaves}
    {rest}
    return sum(hits) / len(hits)
"""
HELD = "held = DataLoader(datasets.MNIST('files', train=True), batch_size=99)"


@pytest.mark.parametrize(
    ("leaves", "rest", "turn", "asked"),
    [
        ("return 0.0", "pass", LEARN, False),
        ("return 0.0", "print(hits)", LEARN, False),
        ("return 0.0", "torch.save(model, 'm.pt')", LEARN, True),
        ("return 0.0", "seen.append(1)", LEARN, True),
        ("return 0.0", "rows.dataset.targets = hits", LEARN, True),
        ("return 0.0", "other()", LEARN, True),
        ("return 0.0", "torch.manual_seed(0)", LEARN, True),
        ("return 0.0", "turn = next(seen)", LEARN, True),
        ("return 0.0", "old = torch.set_default_dtype(torch.float64)", LEARN, True),
        ("return 0.0", "model.eval()", LEARN, True),
        ("return 0.0", "rows += [1]", LEARN, True),
        ("return", "pass", LEARN, True),
        ("return 0.0", "pass", f"if score(model, held):\n            {LEARN}", True),
        ("raise ValueError", "pass", LEARN, True),
    ],
)
def test_leaving_a_function_that_only_computes_is_no_question(
    leaves: str, rest: str, turn: str, *, asked: bool
) -> None:
    top = "seen = []\ndef other():\n    torch.manual_seed(3)\n" + SCORE.format(
        leaves=leaves, rest=rest
    )
    turn = f"{turn}; print(score(model, held))"
    assert (questions(script(top=top, before=HELD, turn=turn), is_complete) > 0) is asked


TRIED = """def safely(args):
    try:
        {tried}
        return 0
    except Exception as error:
        print(error)
        {handler}
    print(args)
def other(args):
    return [x.mean() for x, y in DataLoader(datasets.MNIST('files'))]
"""


@pytest.mark.parametrize(
    ("handler", "tried", "start", "asked"),
    [
        ("return 1", "main(args)", "safely(args)", False),
        ("raise", "main(args)", "safely(args)", False),
        ("exit(1)", "main(args)", "safely(args)", False),
        ("pass", "main(args)", "safely(args)", False),
        ("torch.save(1, 'a')", "main(args)", "safely(args)", True),
        ("return 1", "other(args)", "main(args); safely(args)", True),
        ("return 1", "main(args)", "while safely(args):\n        print(args)", True),
    ],
)
def test_an_error_that_ends_the_training_is_no_question(
    handler: str, tried: str, start: str, *, asked: bool
) -> None:
    text = script(top=TRIED.format(tried=tried, handler=handler), start=start)
    returned = "return [F.cross_entropy(model(x), y) for x, y in lots]"
    text = text.replace("print(engine.get_epsilon(delta=1e-5))", returned)
    assert (questions(text, is_complete) > 0) is asked
