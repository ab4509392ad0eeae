"""A step: its lot, its blocks, its clipped sums, and the training state."""
