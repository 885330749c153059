"""How many inputs a fuzz test tries: few in every run, as many as RACKLOOM_FUZZ says in a run for it."""

import os

FUZZ = "RACKLOOM_FUZZ"


def tries(usual: int) -> int:
    """The number of inputs; the variable never makes it smaller."""
    return max(usual, int(os.environ.get(FUZZ, "0")))
