"""Model adapters: one file for each kind of model."""
