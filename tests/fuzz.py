"""The number of inputs that a fuzz test tries: a few in every run, or RACKLOOM_FUZZ in a fuzz run."""

import os

FUZZ = "RACKLOOM_FUZZ"


def tries(usual: int) -> int:
    """The number of inputs. The variable never makes it smaller."""
    return max(usual, int(os.environ.get(FUZZ, "0")))
