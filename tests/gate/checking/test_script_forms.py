"""Where scripts take their numbers from: each form is read, and what may change it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from affidavit.importers.scripts import importer
from affidavit.plan import MalformedPlan

HEAD = "from tensorflow_privacy import DPKerasSGDOptimizer\n"
USE = "DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier={noise}, num_microbatches=6)\n"
YAML = "dp:\n  sigma: 4.0\n"
DATACLASS = (
    "from dataclasses import dataclass, field\n"
    "@dataclass\nclass Dp:\n    sigma: float = 4.0\n"
    "@dataclass\nclass Config:\n    dp: Dp = field(default_factory=Dp)\n"
)
LOADER = (
    "import yaml\ndef load(path='c.yaml'):\n    with open(path) as f:\n"
    "        cfg = yaml.safe_load(f)\n    return cfg\n"
)
PARSER = (
    "import argparse\nparser = argparse.ArgumentParser()\n"
    "parser.add_argument('-s', '--sigma', type=float, default=4.0)\nargs = parser.parse_args()\n"
)
HYDRA = "import hydra\n@hydra.main(config_path='.', config_name='c')\ndef main(cfg):\n    o = "

FORMS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "a loader of this file": (LOADER + "o = ", "load()['dp']['sigma']", "", {"c.yaml": YAML}),
    "a dictionary as arguments": (
        DATACLASS.replace("= 4.0", "= 9.0") + "cfg = Dp(**{'sigma': 4.0})\no = ", "cfg.sigma", "",
        {},
    ),
    "a parser": (PARSER + "o = ", "args.sigma", "", {}),
    "a parser that a function makes": (
        "import argparse\ndef make():\n    p = argparse.ArgumentParser()\n"
        "    p.add_argument('--sigma', type=float, default=4.0)\n    return p\n"
        "parser = make()\nargs = parser.parse_args()\no = ", "args.sigma", "", {},
    ),
    "a name that a notebook sets twice": ("S = 4.0\nS = 4.0\no = ", "S", "", {}),
    "an item that a package has too": (
        LOADER.replace("c.yaml", "o.yaml") + "import torch\ntorch.optim.SGD(p)\no = ",
        "load()['optim']['sigma']", "", {"o.yaml": YAML.replace("dp", "optim")},
    ),
    "attributes of one assignment": (
        "class Own:\n    def __init__(self):\n        self.a, self.b = 4.0, 1\n"
        "    def run(self):\n        o = ", "self.a", "Own().run()\n", {},
    ),
    "a flag's holder": (
        "from absl import flags\nS = flags.DEFINE_float('sigma', 4.0, 'x')\no = ", "S.value", "",
        {},
    ),
    "training arguments": (
        "from transformers import TrainingArguments\nargs = TrainingArguments(sigma=4.0)\no = ",
        "args.sigma", "", {},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def noise_of(form: str) -> Any:
    before, noise, after, files = FORMS[form]
    text = HEAD + before + USE.format(noise=noise) + after
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
    partial = importer.read(text.encode(), Path(), name="train.py")
    assert partial is not None
    return partial.data["releases"][0]["noise_multiplier"]


OTHERS = {
    "a class that gin configures": (
        "import gin\n@gin.configurable\nclass Trainer:\n    def __init__(self, sigma=9.0):\n"
        "        o = ", "sigma", "gin.parse_config_file('a.gin')\nTrainer()\n",
    ),
    "a function that gin configures": (
        "import gin\n@gin.configurable\ndef train(sigma=9.0):\n    o = ", "sigma",
        "gin.parse_config_file('a.gin')\ntrain()\n",
    ),
    "a structured config": (
        DATACLASS + "cs.store(name='c', node=Config)\n" + HYDRA, "cfg.dp.sigma", "main()\n",
    ),
    "settings that change before a class gets them": (
        DATACLASS + "s = {'sigma': 4.0}\ns['sigma'] = 9.0\ncfg = Dp(**s)\no = ", "cfg.sigma", "",
    ),
    "a value of another file": ("from config import SIGMA\no = ", "SIGMA", ""),
    "what typer runs": (
        "import typer\napp = typer.Typer()\n@app.command()\n"
        "def main(sigma: float = typer.Option(4.0)):\n    o = ", "sigma", "app()\n",
    ),
    "a configuration of Hydra's": (HYDRA, "cfg.dp.sigma", "main()\n"),
    "what Hydra composes": (
        "from hydra import compose, initialize\nwith initialize(config_path='.'):\n"
        "    cfg = compose('c', overrides=['dp.sigma=4.0'])\no = ", "cfg.dp.sigma", "",
    ),
    "the run configuration of Flower": (
        "def server(context):\n    o = ", "context.run_config['sigma']", "server(context)\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", OTHERS)
def test_settings_of_other_frameworks_are_asked(form: str) -> None:
    before, noise, after = OTHERS[form]
    Path("c.yaml").write_text(YAML)
    Path("config.py").write_text("SIGMA = 4.0\n")
    with pytest.raises(MalformedPlan, match="noise_multiplier"):
        importer.read((HEAD + before + USE.format(noise=noise) + after).encode(), Path())


@pytest.mark.parametrize("form", FORMS)
def test_a_number_is_read_from_where_it_is(form: str) -> None:
    assert noise_of(form) == 4.0


@pytest.mark.parametrize("change", ["cfg['dp'] = 1", "cfg.update(x)", "weaken(cfg)"])
def test_what_a_function_may_change_before_it_returns_it_is_not_read(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, *rest = FORMS["a loader of this file"]
    changed = before.replace("    return cfg", f"    {change}\n    return cfg")
    monkeypatch.setitem(FORMS, "a loader of this file", (changed, *rest))
    with pytest.raises(MalformedPlan):
        noise_of("a loader of this file")


@pytest.mark.parametrize(
    ("form", "line"),
    [
        ("a parser", "python train.py --seed 1 --sigma 1 | tee log"),
        ("a parser", "CUDA_VISIBLE_DEVICES=0 torchrun ./train.py -s=1"),
        ("a parser", "python train.py --sig 1"),
        ("a flag's holder", "python train.py --sigma=1"),
    ],
)
def test_a_default_that_a_shell_script_overrides_is_not_read(form: str, line: str) -> None:
    Path("scripts").mkdir()
    for other in (line.replace("train", "other"), f"# {line.splitlines()[-1]}"):
        Path("scripts/run.sh").write_text(f"{other}\n")
        assert noise_of(form) == 4.0
    Path("scripts/run.sh").write_text(f"cd ..\n{line}\n")
    with pytest.raises(MalformedPlan, match=r"run\.sh"):
        noise_of(form)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("Makefile", "SIGMA ?= 1\ntrain:\n\tpython train.py --sigma $(SIGMA)\n"),
        ("jobs/run", "ARGS=(\n  --seed 3\n  --sigma 1\n)\npython train.py ${ARGS[@]}\n"),
        ("run.sh", 'OPTIONS="--seed 3\n --sigma 1"\npython train.py $OPTIONS\n'),
        ("run.sh", 'ARGS=(--seed 3 --sigma 1)\npython train.py "${ARGS[@]}"\n'),
        ("run.sh", 'run() { python train.py "$@"; }\nrun --sigma 1\n'),
        ("pixi.toml", '[tasks]\ntrain = {cmd = "python train.py --sigma 1"}\n'),
        ("all.py", "sys.argv = ['train.py', '--sigma', '1']\nrunpy.run_path('train.py')\n"),
        ("Dockerfile", 'FROM python\nCMD ["python", "train.py", "--sigma", "1"]\n'),
        (".github/workflows/a.yml", "jobs:\n  a:\n    steps:\n    - run: >\n        python train.py"
         "\n        --sigma 1\n"),
        ("dvc.yaml", "stages:\n  train:\n    cmd: python train.py --sigma 1\n"),
        ("pod.yaml", "command: [python, train.py]\nargs: [--sigma, 1]\n"),
        ("sweep.yaml", "program: train.py\nparameters:\n  sigma:\n    values: [1, 4.0]\n"),
        ("MLproject", 'entry_points:\n  main:\n    command: "python train.py --sigma {sigma}"\n'),
        ("sweep.py", "import subprocess\nsubprocess.run(['python', 'train.py', '--sigma', s])\n"),
        ("all.py", "import os\nfor s in (1, 2):\n    os.system(f'python train.py --sigma {s}')\n"),
        (".vscode/launch.json", '{"a": [{"program": "train.py", "args": ["--sigma", "1"]}]}'),
    ],
)  # fmt: skip
def test_a_default_that_any_file_of_the_repository_overrides_is_not_read(
    file: str, text: str
) -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    for other in ("train.py", "infer.py"):
        Path(file).write_text(text.replace("train.py", other))
        if other == "infer.py":
            assert noise_of("a flag's holder") == 4.0
        else:
            with pytest.raises(MalformedPlan, match=Path(file).name):
                noise_of("a flag's holder")
    Path("README.md").write_text("python train.py --sigma 1\n")
    assert noise_of("a flag's holder") == 4.0


def test_documents_that_repeat_themselves_are_read_once() -> None:
    lines = ["a0: &a0 [python, train.py]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]"
             for n in range(1, 30))]  # fmt: skip
    Path("a.yaml").write_text("\n".join(lines))
    assert noise_of("a flag's holder") == 4.0


ARGS = """\
import argparse
p = argparse.ArgumentParser()
p.add_argument("--sigma", type=float, default=4.0)
args = p.parse_args()
"""
ITEMS = "import json\ncfg = json.load(open('c.json'))\n"
OPTION, ITEM = "args.sigma", "cfg['dp']['sigma']"


@pytest.mark.parametrize(
    ("before", "noise", "helper", "is_read"),
    [
        (ARGS + "h(args)", OPTION, "def h(a):\n    print(a.seed)\n", False),
        (ARGS + "class A:\n    def __init__(self):\n        self.sigma = 1", OPTION, "", True),
        (ITEMS + "h(cfg)", ITEM, "def h(a):\n    return a['seed']\n", False),
        (ITEMS + "seen = []\nseen.append(1)\nother['sigma'] = 1", ITEM, "", True),
        (ITEMS + "for v in cfg.values():\n    v['sigma'] = 1", ITEM, "", False),
        (ITEMS + "d = cfg.get('dp')\nd['sigma'] = 1", ITEM, "", False),
        (ITEMS + "cfg['dp'] = x", ITEM, "", False),
        (ITEMS + "cfg['seed'] = x", ITEM, "", True),
    ],
)  # fmt: skip
def test_an_object_that_another_file_gets_or_another_name_changes_is_not_read(
    before: str, noise: str, helper: str, is_read: bool
) -> None:
    Path("c.json").write_text('{"dp": {"sigma": 4.0}, "seed": 3}')
    Path("helper.py").write_text(helper)
    text = HEAD + "from helper import h\n" + before + "\no = " + USE.format(noise=noise)
    if not is_read:
        with pytest.raises(MalformedPlan):
            importer.read(text.encode(), Path(), name="train.py")
        return
    partial = importer.read(text.encode(), Path(), name="train.py")
    assert partial is not None
    assert partial.data["releases"][0]["noise_multiplier"] == 4.0


@pytest.mark.parametrize(
    ("change", "is_read"),
    [
        ("self.net(df['args'].values)", True),
        ("print({k: v for k, v in vars(args).items()})", True),
        ("self.args = other", False),
        ("self.args.sigma = 1", False),
        ("change(self)", False),
        ("self.update(2)", False),
    ],
)
def test_settings_that_an_object_holds_are_read(change: str, is_read: bool) -> None:
    text = (
        HEAD + ARGS + "class A:\n    def __init__(self, args):\n        self.args = args\n"
        f"        self.net = Net()\n        {change}\n        o = "
        + USE.format(noise="self.args.sigma") + "A(args)\n"
    )  # fmt: skip
    if not is_read:
        with pytest.raises(MalformedPlan):
            importer.read(text.encode())
        return
    partial = importer.read(text.encode())
    assert partial is not None
    assert partial.data["releases"][0]["noise_multiplier"] == 4.0


def test_the_repository_of_a_library_is_not_that_of_the_script() -> None:
    """The script is in a folder of it, where Python imports the installed package."""
    Path("opacus.py").write_text("class PrivacyEngine:\n    def f(self):\n        self.o.step()\n")
    text = (
        "from opacus import PrivacyEngine\ne = PrivacyEngine(m, batch_size=6, sample_size=60,"
        " noise_multiplier=4.0, max_grad_norm=1.0)\ne.attach(o)\n"
    )
    Path("examples").mkdir()
    partial = importer.read(text.encode(), Path("examples"), name="examples/train.py")
    assert partial is not None
    assert partial.data["releases"][0]["noise_multiplier"] == 4.0


SETTINGS = "dp = {'l2_norm_clip': 1.0, 'noise_multiplier': 4.0}\n"


@pytest.mark.parametrize(
    ("settings", "noise"),
    [
        (SETTINGS, 4.0),
        ("dp = dict(l2_norm_clip=1.0, noise_multiplier=4.0)\n", 4.0),
        ("dp = dict(noise_multiplier=4.0) if fast() else {'noise_multiplier': 0.1}\n", None),
        (SETTINGS + "dp['noise_multiplier'] = 0.1\n", None),
        (SETTINGS + "change(dp)\n", None),
        (SETTINGS + "dp.update({'learning_rate': 0.1})\n", 4.0),
        (SETTINGS + "dp.update({'noise_multiplier': 0.1})\n", None),
        (SETTINGS + "dp.update({}, noise_multiplier=0.1)\n", None),
        (SETTINGS + "dp |= other\n", None),
        (SETTINGS + "from other import *\n", None),
        ("if fast():\n    " + SETTINGS, None),
    ],
)
def test_arguments_that_a_dictionary_unpacks_are_read(settings: str, noise: float | None) -> None:
    text = HEAD + settings + "o = DPKerasSGDOptimizer(num_microbatches=6, **dp)\n"
    if noise is None:
        with pytest.raises(MalformedPlan):
            importer.read(text.encode())
        return
    partial = importer.read(text.encode())
    assert partial is not None
    assert partial.data["releases"][0]["noise_multiplier"] == noise


@pytest.mark.parametrize(
    ("options", "lot"),
    [
        ("{'num_workers': 1, 'pin_memory': True} if cuda() else {}", 6),
        ("{'batch_sampler': mine} if cuda() else {}", None),
        ("options()", None),
    ],
)
def test_a_loader_with_the_options_of_a_device_is_read(options: str, lot: int | None) -> None:
    text = (
        f"from opacus import PrivacyEngine\nkwargs = {options}\n"
        "loader = DataLoader(data, batch_size=6, **kwargs)\n"
        "m, o, loader = PrivacyEngine().make_private(module=m, optimizer=o, data_loader=loader, "
        "noise_multiplier=1.0, max_grad_norm=1.0)\n"
    )
    partial = importer.read(text.encode())
    assert partial is not None
    assert partial.data["sampling"].get("lot_size") == lot
