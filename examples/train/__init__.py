"""Demonstrations that train."""
