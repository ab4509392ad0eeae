"""Evidence that travels with a model: what is signed beside the weights, and its verification.

A model is a folder. ``manifest`` lists its files as OpenSSF's model signing does, and signs
that list so that the package ``model-signing`` verifies it, ``claim`` derives what certificate
and record prove about the weights, and ``verification`` checks all of it offline.
"""
