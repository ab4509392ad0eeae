"""Data adapters, one file each; the registry names them."""
