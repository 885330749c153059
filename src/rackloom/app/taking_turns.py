"""How soon a thread that wants to run takes its turn from one that computes."""

import sys

TURN = 0.001
"""Seconds; CPython's own are 0.005. A request of REST changes threads a few times, and beside a thread that
computes (a reading of the map, an examination) each change waits for a turn to end; beside two, for two."""


def take_short_turns() -> None:
    """Let whoever answers wait less for whoever computes."""
    sys.setswitchinterval(TURN)
