"""The transparency log: what happened, in an order that cannot be rewritten."""
