"""The folder of a run: its record, its checkpoints, and what rank 0 writes when."""
