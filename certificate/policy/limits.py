"""Limits of policies, and of what a policy or a caller may ask for."""

MAX_DATASETS = 1000
MAX_VALID_DAYS = 3650
MAX_APPROVALS = 10
MAX_RECORDS = 200
"""The most records of a group whose ε is bounded."""
