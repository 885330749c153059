"""Rackloom: carve, claim and prove rack-scale GPU fabrics."""

__version__ = "0.1.0"
