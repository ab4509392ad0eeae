"""Handing runs to an engine that decides where and when they execute."""
