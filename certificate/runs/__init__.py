"""Runs: what a certificate requires of each step, what was recorded, and what it costs."""
