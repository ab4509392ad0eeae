"""DP-Muon and its rivals at one certified ε on real text, row by row.

    python -m examples.study --data ../shared/data --out build/study [--minutes 60]

Trains a model on public text, chooses learning rates on public text, and then trains each row on
E2E's development set, as a run of a service of its own: requested, certified, trained by a worker,
checked against its certificate, charged to the ledger. Each run leaves its evidence file, which is
verified, and a JSON file with the scores of its texts, in ``--out``/results. What is there is not
done again, so that an interrupted study goes on where it was; ``--minutes`` begins no run after so
many. Leave the checkout as it is meanwhile: another version may tell the story of an evidence file
in other words, and refuse this one's. On a GPU take ``--size large``.

The page is made by ``python -m examples.study.page``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from affidavit.trust import KeyStore, statement_in
from examples.paper.generation import decoder_of, generated, nll
from examples.paper.scores import scores
from examples.study import public
from examples.study.data import e2e, e2e_texts, prepared
from examples.study.rows import ROWS, SIZES, Size, plan
from examples.train.local_service import LocalService, free_port, require

START, NONE = "start", "none"
"""The public model alone, and trained further without privacy."""
NONE_RATE = 0.003
ALL = (START, NONE, *ROWS)
BUDGET = {"adjacency": "add_remove", "epsilon": 5000, "delta": 0.01, "reason": "a study"}
"""The ledger adds up what all runs of the study cost together; E2E is public, so it may."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """The study in a folder."""

    folder: Path
    size: Size

    @property
    def public(self) -> Path:
        """The folder of what public text decided."""
        return self.folder / "public"

    @property
    def service(self) -> LocalService:
        """The service that certifies, charges and logs."""
        return LocalService(self.folder / "service")

    def result(self, row: str, epsilon: float, seed: int) -> Path:
        """The file of a run's result."""
        of = f"{row}-{epsilon:g}" if row in ROWS else row
        return self.folder / "results" / f"{of}-{seed}.json"

    def scores(self, weights: Path | None) -> dict[str, Any]:
        """Loss on the references of every so manieth test meaning, and scores of greedy texts."""
        of = prepared(str(self.public))
        references: dict[str, list[str]] = defaultdict(list)
        for source, target in e2e_texts(of.data, "testset_w_refs.csv"):
            references[source].append(target)
        chosen = sorted(references)[:: self.size.meanings]
        model = public.weights_at(self.public, weights)
        texts = of.records((source, target) for source in chosen for target in references[source])
        result = {"nll": nll(model, texts, device=public.DEVICE, batch=64)}
        state = {name: item.cpu() for name, item in model.module.state_dict().items()}
        decoder = decoder_of(self.public, state, of.tokenizer.vocabulary).to(public.DEVICE)
        written = list(
            generated(decoder, chosen, of.tokenizer, of.tokenizer.decode, batch=128, beams=1)
        )
        result |= scores(written, [references[source] for source in chosen])
        return result | {"meanings": len(chosen)}

    def without_privacy(self, seed: int) -> dict[str, Any]:
        """The public model trained further on the private records by AdamW."""
        model = public.weights_at(self.public, None)
        public.train(
            model, e2e(str(self.public)),
            steps=self.size.steps, lot=self.size.lot, rate=NONE_RATE, seed=seed,
        )  # fmt: skip
        weights = self.folder / "none.pt"
        torch.save(model.module.state_dict(), weights)
        return self.scores(weights)


def main(arguments: list[str] | None = None) -> int:
    """Do what is left of the study; 0 when all is done."""
    parser = argparse.ArgumentParser(prog="python -m examples.study")
    parser.add_argument("--data", type=Path, required=True, help="folder with e2e and dart")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[8.0, 3.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=ALL, default=ALL)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run later")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    study = Study(folder=options.out.resolve(), size=SIZES[options.size])
    (study.folder / "results").mkdir(parents=True, exist_ok=True)
    os.environ["AFFIDAVIT_HOME"] = str(study.folder / "home")
    if not list((study.folder / "home" / "keys").glob("*.pem")):
        KeyStore(study.folder / "home" / "keys").new("study")
    public.prepare(options.data, study.public, options.size)
    rates = public.rates(study.public, study.size, max(options.epsilon), end)
    if rates is None:
        return 3
    wanted = [
        (row, epsilon, seed)
        for epsilon in options.epsilon
        for seed in range(1, options.seeds + 1)
        for row in options.rows
        if not study.result(row, epsilon, seed).exists() and (row != START or seed == 1)
    ]
    if not wanted:
        return 0
    study.service.create()
    port = free_port()
    with study.service.serve(port) as base:
        tokens = study.service.token("admin", "submit", "audit"), study.service.token("work")
        for row, epsilon, seed in wanted:
            if time.monotonic() > end:
                return 3
            path = study.result(row, epsilon, seed)
            if path.exists():  # a row without privacy has no ε
                continue
            began = time.process_time() + children()
            if row == START:
                result = study.scores(None) | {"rate": 0.0}
            elif row == NONE:
                result = study.without_privacy(seed) | {"rate": NONE_RATE}
            else:
                result = private_run(study, base, tokens, rates, row, epsilon, seed)
            seconds = time.process_time() + children() - began
            result |= {"row": row, "target": epsilon, "seed": seed, "seconds": round(seconds)}
            path.write_text(json.dumps(result, indent=1) + "\n")
            say(
                f"{path.stem}: loss {result['nll']:.4f}, BLEU {result['bleu']:.2f}, {seconds:.0f} s"
            )
    return 0


def private_run(
    study: Study,
    base: str,
    tokens: tuple[str, str],
    rates: dict[str, float],
    row: str,
    epsilon: float,
    seed: int,
) -> dict[str, Any]:
    """A row as a run of the service; its scores, ε and evidence."""
    layout, public_folder = ROWS[row].blocks, study.public
    rate = rates[ROWS[row].rates]
    blocks = public.blocks_of(public_folder, layout)
    document = plan(row, study.size, epsilon, blocks, rate, rates["dp-adam"])
    bearer = {"authorization": f"Bearer {tokens[0]}"}
    with httpx.Client(base_url=base, timeout=300, headers=bearer) as client:
        budget = f"/v1/ledgers/{document['dataset']['name']}/budget"
        require(client.post(budget, json=BUDGET | {"adjacency": document["adjacency"]}))
        # A certificate that takes longer than a request may wait is answered by a later one.
        while not (
            certified := require(client.post("/v1/certificates", json=document))["certificate"]
        ):
            time.sleep(1)
        output = f"{row}-{epsilon:g}-{seed}"
        run = require(
            client.post(
                "/v1/runs",
                json={
                    "certificate": certified["id"],
                    "data": f"python:examples.study.data:e2e:{public_folder}",
                    "model": f"python:examples.train.gpt2:gpt2:{public_folder},blocks={layout}",
                    "output": output,
                },
            )
        )
        (trusted,) = study.service.keys("service")
        outputs = study.folder / "runs"
        worked = study.service.command(
            "worker", "worker", "--server", base, "--run", run["id"], "--keys", str(trusted),
            "--own-code", "--files", str(public_folder), "--outputs", str(outputs),
            "--microbatch", str(study.size.microbatch),
            *(["--gpu"] if public.DEVICE == "cuda" else []),
            quiet=True, AFFIDAVIT_TOKEN=tokens[1],
        )  # fmt: skip
        run = require(client.get(f"/v1/runs/{run['id']}"))
    if run["code"] != "conformant":
        raise SystemExit(f"{output}: {run['state']}, {run['code']}\n{worked.stderr}")
    (attempt,) = (outputs / output).glob(f"{run['id']}-*")
    stated = statement_in((attempt / "bundle.json").read_bytes())["predicate"]
    return {
        **study.scores(attempt / "run" / "weights.pt"),
        "epsilon": float(stated["guarantee"]["epsilon"]["upper"]),
        "adjacency": document["adjacency"],
        "sampling": document["sampling"]["scheme"],
        "noise_multipliers": {
            of["name"]: float(of["given"] or of["required"])
            for of in stated["noise_multiplier"]["releases"]
        },
        "rate": rate,
        "record": run["record"],
        "evidence": evidence(study, base, tokens[0], run["id"], output),
    }


def evidence(study: Study, base: str, token: str, run: str, output: str) -> str:
    """Fetch the evidence file of a run and verify it; its digest."""
    path = study.folder / "evidence" / f"{output}.zip"
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    keys = [*study.service.keys("service"), *study.service.keys("worker")]
    fetch = ["evidence", run, "--server", base, "--out", str(path)]
    for _ in range(60):  # the log takes a moment
        done = study.service.command("service", *fetch, quiet=True, AFFIDAVIT_TOKEN=token)
        if path.exists():
            break
        time.sleep(1)
    else:
        raise SystemExit(done.stderr)
    trusted = [part for key in keys for part in ("--keys", str(key))]
    verified = study.service.command("service", "verify-evidence", str(path), *trusted, quiet=True)
    if verified.returncode:
        raise SystemExit(verified.stdout + verified.stderr)
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def children() -> float:
    """Processor seconds of the processes that ended, which this one started."""
    return sum(os.times()[2:4])


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
