"""Policies, waivers, and their effect on a plan."""
