"""Policies: which plans an organisation lets through, and who may make an exception."""
