"""Verification of a bundle in numbered steps, and what a verifier requires."""
