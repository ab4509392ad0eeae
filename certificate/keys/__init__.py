"""Signing keys: what each may sign, where it is kept, and which ones a verifier trusts."""
