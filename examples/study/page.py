"""``python -m examples.study.page FOLDER``: the results of a study, and the page that tells them.

Collects FOLDER's results in ``docs/cases/dp-muon-at-a-true-epsilon.json``, and writes page and
picture from that file alone; without FOLDER it only writes them. Losses of another study that the
file had before are stored beside the new ones, and compared with them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as student

from affidavit.assessment import certify
from affidavit.plan import plan_from
from examples.study.rows import CLIP_NORM, MUON, PUBLISHED, RECORDS, ROWS, SIZES, plan

PAGE = Path(__file__).parents[2] / "docs/cases/dp-muon-at-a-true-epsilon.md"
RESULTS, PICTURE = PAGE.with_suffix(".json"), PAGE.with_suffix(".svg")
START, NONE = "start", "none"
HERE = Path(__file__).parent
TARGETS = FIRST, _ = (8.0, 3.0)
TITLES = {
    START: "the public model alone",
    NONE: "no privacy (AdamW)",
    **{name: row.title for name, row in ROWS.items()},
}
SCORES = {"nll": 4, "bleu": 2, "nist": 3, "rouge_l": 2, "meteor": 2, "cider": 3}
"""Scores of a run, and the digits that they are shown with."""
QUESTIONS = (
    ("Optimal allocation instead of equal noise", "dp-muon-optimal", "dp-muon"),
    ("Newton-Schulz from the paper's start instead of the Frobenius norm",
     "dp-muon-paper-start", "dp-muon"),
    ("DP-MuonBC's correction", "dp-muonbc", "dp-muon"),
    ("Denoising DP-Muon", "dp-muon-denoised", "dp-muon"),
    ("Denoising DP-Adam", "dp-adam-denoised", "dp-adam"),
    ("DP-AdamBC's correction", "dp-adambc", "dp-adam"),
    ("DP-Muon instead of DP-Adam", "dp-muon", "dp-adam"),
    ("The published noise instead of the certified one", PUBLISHED, "dp-muon"),
)  # fmt: skip
"""A change, the row with it and the row without it."""
Runs = Sequence[Mapping[str, Any]]


def collect(folder: Path, stored: Mapping[str, Any]) -> dict[str, Any]:
    """All results of a study, and what was tried on public text; losses of the one before it."""
    from examples.study.public import blocks_of  # it loads PyTorch, which the page does not need

    public = folder / "public"
    names = ("n_layer", "n_head", "n_embd", "vocab_size")
    config = json.loads((public / "config.json").read_text())
    runs = [json.loads(path.read_text()) for path in sorted((folder / "results").glob("*.json"))]
    records = {run["record"] for run in runs if "record" in run}
    if records.isdisjoint(run.get("record") for run in stored["runs"]):
        compared = ("row", "target", "seed", "rate", "nll")
        before = [{name: run[name] for name in compared} for run in stored["runs"]]
    else:
        before = stored.get("before", [])
    return {
        "size": json.loads((public / "about.json").read_text())["size"],
        "model": {name: config[name] for name in names},
        "blocks": {layout: blocks_of(public, layout) for layout in ("all", "hidden", "kinds")},
        "rates": json.loads((public / "rates.json").read_text()),
        "runs": runs,
        "before": before,
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half the width of its 95 % interval by Student's t; NaN for one value."""
    if len(values) < 2:
        return values[0], math.nan
    scale = stdev(values) / math.sqrt(len(values))
    return fmean(values), float(student.ppf(0.975, len(values) - 1)) * scale


def shown(values: Sequence[float], digits: int) -> str:
    """A mean with its interval."""
    mean, half = interval(values)
    return f"{mean:.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")


def of_row(runs: Runs, row: str, target: float) -> Runs:
    """The runs of a row at a target; those without privacy are in every table."""
    return [
        run for run in runs if run["row"] == row and (row not in ROWS or run["target"] == target)
    ]


def table(runs: Runs, target: float) -> Iterable[str]:
    """The lines of the table of a target, the least loss first."""
    yield "| row | ε | σ | rate | runs | loss | BLEU | NIST | ROUGE-L | METEOR | CIDEr |"
    yield "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    rows = {row: some for row in TITLES if (some := of_row(runs, row, target))}
    for row in sorted(rows, key=lambda row: fmean(run["nll"] for run in rows[row])):
        some = rows[row]
        scores = (shown([run[name] for run in some], of) for name, of in SCORES.items())
        first = some[0]
        epsilon = {START: "0", NONE: "∞"}.get(row) or rounded_up(first["epsilon"])
        noise = first.get("noise_multipliers", {"": 0.0}).values()
        sigma = " to ".join(f"{of:.4g}" for of in sorted({min(noise), max(noise)}))
        yield (
            f"| {TITLES[row]} | {epsilon} | {sigma} | {first['rate']:g} | {len(some)} | "
            f"{' | '.join(scores)} |"
        )


def answers(runs: Runs, target: float) -> Iterable[str]:
    """What each change does to the loss, where both rows were run."""
    yield "| change | loss without | loss with | difference | BLEU without | with |"
    yield "|---|---:|---:|---:|---:|---:|"
    for question, row, other in QUESTIONS:
        after, before = of_row(runs, row, target), of_row(runs, other, target)
        if after and before:
            losses = [[run["nll"] for run in some] for some in (before, after)]
            texts = [[run["bleu"] for run in some] for some in (before, after)]
            yield (
                f"| {question} | {shown(losses[0], 4)} | {shown(losses[1], 4)} | "
                f"{difference(*losses)} | {shown(texts[0], 2)} | {shown(texts[1], 2)} |"
            )


def difference(before: Sequence[float], after: Sequence[float]) -> str:
    """The difference of two means, with its interval if each has two values."""
    change = fmean(after) - fmean(before)
    if min(len(before), len(after)) < 2:
        return f"{change:+.4f}"
    return f"{change:+.4f} ± {welch(before, after):.4f}"


def welch(before: Sequence[float], after: Sequence[float]) -> float:
    """Half the width of Welch's 95 % interval for the difference of two means."""
    parts = [stdev(some) ** 2 / len(some) for some in (before, after)]
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(some) - 1) for part, some in zip(parts, (before, after), strict=True)
    )
    return float(student.ppf(0.975, freedom)) * math.sqrt(sum(parts))


def repeated(results: Mapping[str, Any]) -> str:
    """How the mean losses of the study before differ from those of this one."""
    compared, outside, other_rates = 0, [], []
    for target, row in product(TARGETS, ROWS):
        after = of_row(results["runs"], row, target)
        before = of_row(results["before"], row, target)
        if min(len(before), len(after)) < 2:
            continue
        name = f"{TITLES[row]} at ε = {target:g}"
        if before[0]["rate"] != after[0]["rate"]:
            other_rates.append(name)
            continue
        losses = [[run["nll"] for run in some] for some in (before, after)]
        compared += 1
        if abs(fmean(losses[1]) - fmean(losses[0])) > welch(*losses):
            outside.append(f"{name} ({difference(*losses)})")
    text = (
        "An earlier study, from nothing, had lots and noise of its own and the same public "
        "weights.\n"
        f"{compared - len(outside)} of {compared} mean losses differ from its by no more than "
        "Welch's 95 % interval"
    )
    text += f"; not so {', '.join(outside)}." if outside else "."
    if other_rates:
        text += (
            f"\nNot compared: {', '.join(other_rates)}.\n"
            "There it took another rate; a difference of rates is no finding about optimisers."
        )
    return text


def noise_energy(results: Mapping[str, Any], target: float) -> float:
    """The noise energy of optimal allocation over that of equal noise, Σ σ²C² entries."""
    energies = []
    for row in ("dp-muon-optimal", "dp-muon"):
        blocks = [tuple(of) for of in results["blocks"][ROWS[row].blocks]]
        document = plan(row, SIZES[results["size"]], target, blocks, 0.01, 0.01)
        required = certify(plan_from(document), second_opinion=False).releases
        energies.append(
            sum(
                (of.required or 0.0) ** 2 * count * entries
                for of, (_, count, entries) in zip(required, blocks, strict=True)
            )
        )
    return energies[0] / energies[1]


def picture(runs: Runs, target: float) -> str:
    """A dot for the loss of each run, a line for each row."""
    rows = {row: [run["nll"] for run in of_row(runs, row, target)] for row in TITLES}
    rows = {row: losses for row, losses in rows.items() if losses}
    order = sorted(rows, key=lambda row: fmean(rows[row]))
    low, high = min(map(min, rows.values())), max(map(max, rows.values()))
    span = (high - low) or 1.0
    height = 22 * len(order) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for place, row in enumerate(order):
        y = 22 * place + 20
        lines.append(f'<text x="8" y="{y + 4}" fill="#222">{escape(TITLES[row])}</text>')
        lines.append(f'<line x1="250" x2="700" y1="{y}" y2="{y}" stroke="#ddd"/>')
        lines += [
            f'<circle cx="{260 + 430 * (loss - low) / span:.1f}" cy="{y}" r="4" '
            'fill="#2864b4" fill-opacity="0.7"/>'
            for loss in rows[row]
        ]
    for value, x, anchor in ((low, 260, "start"), (high, 690, "end")):
        lines.append(
            f'<text x="{x}" y="{height - 8}" text-anchor="{anchor}" fill="#222">'
            f"loss {value:.3f}</text>"
        )
    return "\n".join([*lines, "</svg>", ""])


def page(results: Mapping[str, Any]) -> str:
    """The page."""
    size, runs, model = SIZES[results["size"]], results["runs"], results["model"]
    blocks, rates = results["blocks"], results["rates"]
    counts = sorted({len(some) for row in TITLES if (some := of_row(runs, row, FIRST))})
    absent = {target: [row for row in ROWS if not of_row(runs, row, target)] for target in TARGETS}
    chosen = [(min(losses, key=losses.__getitem__), [*losses]) for losses in rates.values()]
    tables = [
        f"At ε = {target:g}:\n\n" + "\n".join(table(runs, target))
        for target in TARGETS
        if len(absent[target]) < len(ROWS)
    ]
    orthogonalisations, frobenius = orthogonal(results)
    itself, *others = (float(line.split("|")[3]) for line in orthogonalisations[2:])
    return (HERE / "template.md").read_text().format(
        millions=f"{sum(count * of for _, count, of in blocks['all']) / 1e6:.2f}",
        layers=model["n_layer"],
        width=model["n_embd"],
        tokens=model["vocab_size"],
        steps=size.steps,
        lot=size.lot,
        passes=f"{size.steps * size.lot / RECORDS:.2f}",
        tried=" or ".join(sorted({str(len(grid)) for _, grid in chosen})),
        ends=sum(rate in (grid[0], grid[-1]) for rate, grid in chosen),
        grids=len(chosen),
        choice_steps=size.choice_steps,
        meanings=runs[0]["meanings"],
        tables="\n\n".join(tables),
        published=published(results),
        repeated=repeated(results),
        answers="\n".join(answers(runs, FIRST)),
        orthogonal="\n".join(orthogonalisations),
        itself=itself,
        least=min(others),
        most=max(others),
        frobenius=f"{frobenius:.2f}",
        shape=f"{model['n_embd']} rows and {4 * model['n_embd']} columns",
        saved=f"{1 - noise_energy(results, FIRST):.0%}",
        runs=" to ".join(map(str, sorted({counts[0], counts[-1]}))) + " of each row at ε = 8",
        missing="\n".join(
            f"- At ε = {target:g}, "
            + ("any row" if len(rows) == len(ROWS) else "; ".join(TITLES[row] for row in rows))
            + ". It was not run."
            for target, rows in absent.items()
            if rows
        ),
    )  # fmt: skip


def published(results: Mapping[str, Any]) -> str:
    """What the noise of the paper's derivation costs."""
    blocks = [tuple(of) for of in results["blocks"][ROWS[PUBLISHED].blocks]]
    document = plan(PUBLISHED, SIZES[results["size"]], FIRST, blocks, 0.01, 0.01)
    epsilon = certify(plan_from(document), second_opinion=False).epsilon
    assert epsilon is not None
    return (
        f"The noise of the paper's derivation for ε = {FIRST:g}, "
        f"σ = {document['releases'][0]['noise_multiplier']:.4g} for each block, is "
        f"ε = {rounded_up(epsilon.upper)} here.\nThe gap grows with the number of blocks: the "
        f"paper has 49, this model {sum(count for _, count, _ in blocks)}."
    )


def uniform(results: Mapping[str, Any]) -> tuple[float, int, int]:
    """σ of DP-Muon's matrices with equal noise; rows and columns of the widest."""
    blocks = [tuple(of) for of in results["blocks"]["hidden"]]
    document = plan("dp-muon", SIZES[results["size"]], FIRST, blocks, 0.01, 0.01)
    required = certify(plan_from(document), second_opinion=False).releases[0].required
    assert required is not None
    width = results["model"]["n_embd"]
    return required, width, 4 * width


def orthogonal(results: Mapping[str, Any]) -> tuple[list[str], float]:
    """The table of orthogonalisations, and the Frobenius norm of the momentum's noise."""
    from examples.study.orthogonal import table as lines  # it loads PyTorch

    (sigma, rows, columns), size = uniform(results), SIZES[results["size"]]
    noise_std, beta = sigma * CLIP_NORM / size.lot, MUON["momentum"]
    kept = (1 - beta ** (2 * size.steps)) / (1 - beta**2)
    table_lines = lines(
        noise_std, CLIP_NORM, steps=size.steps, rows=rows, columns=columns, beta=beta
    )
    return [*table_lines], noise_std * math.sqrt(kept * rows * columns)


def rounded_up(epsilon: float) -> str:
    """Four decimals, not less than ``epsilon``."""
    return f"{math.ceil(epsilon * 1e4) / 1e4:.4f}"


def main(arguments: Sequence[str]) -> None:
    """Collect, if a folder is named, and write."""
    if arguments:
        results = collect(Path(arguments[0]), json.loads(RESULTS.read_text()))
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    results = json.loads(RESULTS.read_text())
    PAGE.write_text(page(results))
    PICTURE.write_text(picture(results["runs"], FIRST))


if __name__ == "__main__":
    main(sys.argv[1:])
