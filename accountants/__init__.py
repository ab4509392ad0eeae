"""Accountants: from events to privacy curves with a lower and an upper bound."""
