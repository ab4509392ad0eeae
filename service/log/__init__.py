"""The audit log: a Merkle tree of entries with signed checkpoints (RFC 9162, C2SP)."""
