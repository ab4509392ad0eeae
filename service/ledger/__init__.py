"""Budgets, and what runs have reserved, committed and settled against them."""
