"""The keyset as the service keeps it: every version, as it was signed, in order."""
