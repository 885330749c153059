"""Prove: measure the path that was claimed, and say what is wrong."""
