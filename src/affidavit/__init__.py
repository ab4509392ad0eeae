"""Affidavit certifies differentially private training.

The rooms of the product are its sub-packages: ``plan`` (what is run), ``mechanisms``
(what is released), ``accountants`` (how much it costs), ``certificate`` (the signed
statement), ``service`` (HTTP) and ``gate`` (the command line).
"""

__version__ = "0.2.0"
