"""Read plans from training scripts, which are parsed and never run."""
