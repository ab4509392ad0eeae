"""Issuing certificates, deciding about them, and their status."""
