"""Several processes that train one run, and what each has of a sharded model."""
