"""Policies, waivers, and which of them apply to a plan."""
