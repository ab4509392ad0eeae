"""What the GPU kernels of clipping take at once."""

from __future__ import annotations

PARTS, PART_COLUMNS = 64, 1024
"""Parts of a row whose squares are added up at most, and columns that are added up at once."""

TILE, PART_STEPS = 128, 32
"""Rows and columns of B_iᵀ A_i, and steps, that are multiplied at once."""

PIECE = 64
"""Steps of a record that are normalised at once."""

LOOK_UP_COLUMNS = 128
"""Columns of the rows of a look-up that are added up at once."""

STEPS_AT_ONCE, LEAST_STEPS = 64, 16
"""Steps of a record that are multiplied and weighted at once, and fewest that a kernel takes."""

GRAM_TILE, GRAM_PART = 128, 64
"""Rows and columns of A Aᵀ at most, and columns of A, that are multiplied at once."""

MAX_SPLITS, MULTIPROCESSORS = 4, 132
"""Parts that records are divided into at most to fill a device, and programs that fill an H200."""
