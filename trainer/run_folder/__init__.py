"""The folder of a run: its record, its checkpoints, and the order in which rank 0 writes them."""
