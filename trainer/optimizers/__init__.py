"""Optimisers: how the noisy releases of a step update the parameters, one file each.

All of them read ``parameter.grad`` = the noisy mean of a lot and public numbers of the
certified plan, and nothing else, so that their updates are post-processing. A new one is a
file here and a line in ``affidavit.trainer.optimizers.registry``.
"""
