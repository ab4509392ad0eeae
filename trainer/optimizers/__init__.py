"""Optimisers: how the noisy releases of a step update the parameters.

They read only noisy means and public numbers of the certified plan, so updates are post-processing.
"""
