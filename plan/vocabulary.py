"""The words that a plan's fields take, and what the sampling schemes have in common."""

from __future__ import annotations

from typing import Literal

Adjacency = Literal["add_remove", "replace_one", "zero_out"]
PrivacyUnit = Literal["example", "user"]
Allocation = Literal["uniform", "proportional", "optimal"]
Scheme = Literal[
    "poisson",
    "truncated_poisson",
    "fixed_size",
    "balls_in_bins",
    "random_allocation",
    "shuffled",
    "cyclic",
    "cyclic_poisson",
    "b_min_sep",
    "full_batch",
]

FRESH_LOTS = frozenset({"poisson", "truncated_poisson", "fixed_size"})
"""Schemes that draw every lot afresh, so that a record may take part in any steps."""
FIXED_ORDER = frozenset({"shuffled", "cyclic"})
"""Schemes in which every record takes part once per epoch, at its place in an order."""
ONE_LOT_PER_EPOCH = FIXED_ORDER | {"balls_in_bins"}
"""Schemes in which every record is in exactly one lot of each epoch."""
KNOWN_PARTICIPATIONS = ONE_LOT_PER_EPOCH | {"random_allocation"}
"""Schemes in which every record takes part in a known number of steps."""
NO_EPOCHS = FRESH_LOTS | {"b_min_sep", "random_allocation"}
"""Schemes without epochs, in which no turn of a record ends."""
SOLVABLE_LOT_SIZE = frozenset({"poisson", "fixed_size"})
"""Schemes for which ``lot_size: null`` asks for the largest lot that meets the target."""
BY_PROBABILITY = frozenset({"poisson", "truncated_poisson"})
"""Schemes that may be given by a sampling probability instead of a lot size."""
REQUIRED_FIELDS = {
    "truncated_poisson": "max_lot_size",
    "cyclic_poisson": "groups",
    "b_min_sep": "separation",
    "random_allocation": "participations",
}
"""The field of ``sampling`` that a scheme requires and no other scheme takes."""
