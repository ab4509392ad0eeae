"""Runs: requested training, claimed by one worker and settled by its record."""
