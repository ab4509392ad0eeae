"""Budgets, and the reserved, committed and settled costs of runs."""
