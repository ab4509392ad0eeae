"""Training frameworks whose own loops run certified steps."""
