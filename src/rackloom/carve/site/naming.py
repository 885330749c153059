"""What may be the name of an object that people refer to."""

import re

from rackloom.carve.site.problems import invalid

NAME = r"^[^\s\x00-\x1f\x7f]([^\x00-\x1f\x7f]*[^\s\x00-\x1f\x7f])?$"
NAME_MEANING = "must hold no control characters, and neither begin nor end with a space"
SHORTEST, LONGEST = 2, 256


def check_name(name: str) -> None:
    """Refuse a name that is too short, too long, or that nobody could tell from another."""
    if not SHORTEST <= len(name) <= LONGEST:
        raise invalid("Error validating name", name=f"must have {SHORTEST} to {LONGEST} characters")
    if re.match(NAME, name) is None:
        raise invalid("Error validating name", name=NAME_MEANING)
