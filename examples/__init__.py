"""Demonstrations and plans to start from."""
