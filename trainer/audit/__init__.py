"""The audit: attacks that try to prove a run less private than its certificate says."""
