"""Two-sided accounting by tilted Fourier transforms, with every error bounded.

Throughout, losses are in nats, and with them ε, cuts, tops, and the nodes and steps of grids.
Orders (tilts) and slopes of log δ are in 1/nat, masses are probabilities, logarithms natural,
and a noise multiplier is the noise's standard deviation over the clip norm.
"""
