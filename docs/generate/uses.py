"""``docs/reference/uses.md``: the uses of private objects in scripts that are understood."""

from __future__ import annotations

from affidavit.importers.scripts.use_table import FUNCTIONS, METHODS, Use
from docs.generate.tables import table

HEAD = """\
# Uses in scripts that are understood

Generated from the table `importers/uses.toml` by `make docs`.

`affidavit check` certifies a training script only if every use of its private objects is one of
these. Any other use is an open question (`open_use`) at its line, as
[Check plans in continuous integration](../how-to/gate.md) says. A use may be given objects of the
kinds that it takes, and public values. Kinds: what the script calls engine, model and criterion;
the optimizer that it makes, and the private one; data, sets and loaders of records; lots, the
private loader; lot and rows, of one lot; count, the size of a lot; loss, one term for each record
or their sum; grads, a gradient for each record; value, anything else that records decide; holder,
an object that holds another; code, a function that uses one of these.

"""


def page() -> str:
    """The whole page."""
    methods = [(use.of, _names(use), _kinds(use), use.why) for use in METHODS]
    functions = [(use.packages, _names(use), _kinds(use), use.why) for use in FUNCTIONS]
    return (
        HEAD
        + "## Methods\n\n"
        + table(("of", "methods", "take", "because"), methods)
        + "\n## Functions\n\n"
        + table(("of", "functions", "take", "because"), functions)
    )


def _names(use: Use) -> str:
    inside = f" of {', '.join(use.modules.split())}" if use.modules else ""
    return ("all" if use.names == "*" else f"`{' '.join(use.names.split())}`") + inside


def _kinds(use: Use) -> str:
    return ", ".join(kind for kind in use.takes if kind != "public") or "nothing private"
