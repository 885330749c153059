"""Whole jobs onto NVLink domains. Pure."""
