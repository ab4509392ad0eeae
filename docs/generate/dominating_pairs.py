"""``docs/theorems/dominating-pairs.md``, written from the table that the checker reads."""

from __future__ import annotations

from collections.abc import Iterator

from affidavit.checker import dominating_pairs

HEAD = """\
# Dominating pairs

Generated from the table `checker/dominating_pairs.toml` by `make docs`. The
[checker](checker.md) reads its laws from that table, and a certificate with a proof names the rows
that it rests on.

N(m) is a normal around m clip norms whose standard deviation is the noise's. Where a row has a
place, its pair holds for the losses on that side of it, in clip norms, and what its pairs leave of
a mass of one has a loss of zero. "Either order": the pairs with P and Q exchanged are the other
direction of the adjacency. "Both": those with a place, exchanged, belong to the same direction.
"Values": the pair holds for values of P - αQ, over N(0), of that sign; exchanged, of the other.

The checker proves what follows from a row; that a row is true is proved on its source's page. A
program in the tests, `tests/accountants/falsifier`, tries to refute every row: it draws data sets
of up to 1,200 records (all others alike, opposite, at right angles, mixed, or zero), computes what
one release shows of two neighbours from exact mixtures, without the engine, and compares the row at
losses on both sides of zero, in each direction. It finds each of the faults that are planted in
rows. A search that finds nothing is no proof.
"""


def page() -> str:
    """The whole page."""
    rows = (
        section
        for name, row in dominating_pairs.DOMINATING_PAIRS.items()
        for section in _section(name, row)
    )
    return HEAD + "\n".join(rows)


def _section(name: str, row: dominating_pairs.Row) -> Iterator[str]:
    where = "".join(f", `{field}` = `{value}`" for field, value in row.where.items())
    yield f"\n## {name}\n"
    yield f"* **Release** `{row.release}`{where}."
    yield f"* **Requires** {row.requires}."
    yield f"* **Orders** {row.orders}."
    yield f"* **Source** [{row.source}]({row.source}.md)."
    if row.pairs:
        yield "\n| P | Q | where |\n|---|---|---|"
    for pair in row.pairs:
        places = [f"{side} {pair[side]}" for side in ("above", "below", "values") if side in pair]
        yield f"| `{pair['over']}` | `{pair['under']}` | {', '.join(places) or 'everywhere'} |"
    yield ""
