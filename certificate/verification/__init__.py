"""The verification of a bundle in numbered steps, and the requirements of a verifier."""
