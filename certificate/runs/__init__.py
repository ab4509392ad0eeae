"""Runs: the requirements of each step, the run record, and the cost."""
