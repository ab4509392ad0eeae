"""Files that are made to hang or break the gate are refused, each for what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

IN_A_BOX = True

SCRIPT = """\
import torch
import yaml
from opacus import PrivacyEngine
cfg = yaml.safe_load(open("cfg.yaml"))
loader = torch.utils.data.DataLoader(data, batch_size=500)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader,
    noise_multiplier=cfg["noise"], max_grad_norm=1.0)
for epoch in range(3):
    for batch in loader:
        loss(batch).backward()
        optimizer.step()
# affidavit: adjacency=zero_out target_delta=1e-5 dataset_size=50000
"""
BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{inner}'] * 8)}]\n"
    for inner, name in zip("abcdefghijklmnop", "bcdefghijklmnopq", strict=True)
)
"""Eight to the power of seventeen numbers."""
ITSELF = "a: &a [*a]\nb: &b {b: *b}\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)


def only(document: dict[str, Any]) -> dict[str, Any]:
    (plan,) = document["plans"]
    (finding,) = (item for item in plan["findings"] if item["blocks"])
    return dict(finding)


@pytest.mark.parametrize("text", [BOMB, ITSELF], ids=["bomb", "itself"])
def test_aliases_are_not_written_out(checked: Any, text: str) -> None:
    Path("cfg.yaml").write_text(f"noise: 1.0\n{text}")
    code, document = checked("cfg.yaml")
    assert (code, only(document)["rule"]) == (2, "yaml_alias")
    Path("train.py").write_text(SCRIPT)
    code, document = checked("train.py")
    assert (code, only(document)["rule"]) == (2, "not_imported")
    assert "too large, or refers to itself" in only(document)["message"]


def test_aliases_of_plain_settings_are_read(checked: Any) -> None:
    Path("cfg.yaml").write_text("low: &low {sigma: 1.0}\nhigh: *low\nnoise: 1.0\n")
    Path("train.py").write_text(SCRIPT)
    assert checked("train.py")[0] == 0


DOTTED = ".".join(["a"] * 200_000)


@pytest.mark.parametrize(
    "text",
    ["a=" + "[" * 20_000, "a=1" + "0" * 5_000, f"{DOTTED}=1", f"[{DOTTED}]"],
    ids=["deep", "long", "dotted", "headed"],
)
def test_toml_that_python_cannot_read_is_refused(checked: Any, text: str) -> None:
    Path("plan.toml").write_text(text)
    code, document = checked("plan.toml")
    assert (code, only(document)["rule"]) == (2, "syntax")


@pytest.mark.parametrize("ends", ["10**50", "1, 9, 0"], ids=["endless", "without a step"])
def test_a_range_that_python_cannot_count_is_asked_for(checked: Any, ends: str) -> None:
    Path("cfg.yaml").write_text("noise: 1.0\n")
    Path("train.py").write_text(SCRIPT.replace("range(3)", f"range({ends})"))
    code, document = checked("train.py")
    assert (code, only(document)["pointer"]) == (2, "/steps")


def test_a_script_beyond_all_size_is_not_parsed(checked: Any) -> None:
    Path("train.py").write_text(SCRIPT + "x = 1\n" * 50_000)
    code, document = checked("train.py")
    assert (code, only(document)["rule"]) == (2, "not_imported")
    assert "longer than" in only(document)["message"]


def test_many_loops_inside_each_other_are_read(checked: Any) -> None:
    loops = "".join(" " * i + "for x in loader:\n" for i in range(30))
    step = "".join(" " * 30 + line + "\n" for line in ("f(m(x)).backward()", "optimizer.step()"))
    Path("cfg.yaml").write_text("noise: 1.0\n")
    Path("train.py").write_text(SCRIPT + loops + step)
    assert checked("train.py")[0] == 2


def test_an_unknown_encoding_is_refused_on_the_first_line(checked: Any) -> None:
    Path("train.py").write_text("# -*- coding: none -*-\n" + SCRIPT)
    code, document = checked("train.py")
    assert (code, only(document)["line"]) == (2, 1)


def test_an_option_that_any_launch_names_is_open_whatever_its_word(checked: Any) -> None:
    Path("train.py").write_text(
        SCRIPT.replace("import yaml", "import argparse").replace(
            'cfg = yaml.safe_load(open("cfg.yaml"))',
            "parser = argparse.ArgumentParser()\n"
            "parser.add_argument('--noise', type=float, default=1.0)\n"
            "args = parser.parse_args()",
        ).replace('cfg["noise"]', "args.noise")
    )  # fmt: skip
    for first, code in (("", 0), ("--noise 1.0", 2), ("--noise 2024-99-99", 2)):
        Path("run.sh").write_text(f"python train.py {first}\npython train.py\n")
        assert checked("train.py")[0] == code


HYDRA = "import hydra\n@hydra.main(config_path='.', config_name='cfg')\ndef main(cfg):\n" + "".join(
    f"    {line}\n" for line in SCRIPT.splitlines() if not line.startswith(("cfg", "#"))
)
ODD = {
    "defaults that are no list": (HYDRA, "defaults: 3\nnoise: 1.0\n"),
    "a group without a name": (HYDRA, "defaults: [{1: a}]\nnoise: 1.0\n"),
    "a file without a name": (SCRIPT.replace('open("cfg.yaml")', "open()"), "noise: 1.0\n"),
    "an index without a part": (
        SCRIPT.replace("    for batch", "    x = next(iter(loader))[()]\n    for batch").replace(
            'cfg["noise"]', "unknown"
        ),
        "noise: 1.0\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_settings_ask_for_the_noise(checked: Any, name: str) -> None:
    script, settings = ODD[name]
    Path("train.py").write_text(script)
    Path("cfg.yaml").write_text(settings)
    code, document = checked("train.py")
    rules = {item["rule"] for item in document["plans"][0]["findings"]}
    assert (code, "internal_error" in rules) == (2, False), document["plans"][0]["findings"]
