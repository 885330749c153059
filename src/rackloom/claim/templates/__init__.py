"""Claim templates for the hardware at hand: the selectors that people type by hand, made and verified."""
