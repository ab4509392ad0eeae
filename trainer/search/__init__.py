"""Searches: a random number of certified runs, of which the best is released."""
