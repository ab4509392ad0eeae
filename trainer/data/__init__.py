"""Data adapters: one file for each kind of data."""
