"""Signing keys: their roles, their storage, and the keys that a verifier trusts."""
