"""Waiting, and leaving: `until` is everybody's, and so is its deadline."""

from tests.waiting import until

__all__ = ["LEAVE", "until"]
LEAVE = ("--wait=false", "--ignore-not-found")
"""For `kubectl delete` at the end: what is being collected already is no trouble."""
