"""Hand runs to an engine that schedules and executes them."""
