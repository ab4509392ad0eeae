"""The evidence in a model's folder: the signed claim about its training, and its verification.

``manifest`` lists and signs the files of the folder as OpenSSF's ``model-signing`` does, ``claim``
derives the claim about the weights from certificate and record, and ``verification`` checks
everything offline.
"""
